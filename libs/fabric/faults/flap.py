"""Flap: a link goes down and comes back, again and again."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from libs import units
from libs.fabric.faults.delivery import Delivery
from libs.fabric.faults.draw import Draw


@dataclass(frozen=True, slots=True)
class Flap:
    """A loose contact: of every `period_ns` each link is down for the share that the rule's
    probability says, by a phase of its own.

    Regular, where a blackhole is not; frames sent while the link is down are lost.
    """

    KIND: ClassVar[str] = "flap"

    period_ns: int = units.ms(10)

    def apply(self, delivery: Delivery, draw: Draw) -> list[Delivery]:
        """Nothing, if the link was down when the frame left."""
        since_down = (delivery.begin_ns + draw.phase(self.period_ns)) % self.period_ns
        return [] if since_down < draw.share_of(self.period_ns) else [delivery]
