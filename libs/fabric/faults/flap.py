"""Flap: a link goes down and comes back, again and again."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from libs import units
from libs.fabric.faults.delivery import Delivery
from libs.fabric.faults.draw import Draw


@dataclass(frozen=True, slots=True)
class Flap:
    """A loose contact: of every `period_ns` a link is down for `down_ns`, all by their own phase.

    Regular, where a blackhole is not; frames sent while the link is down are lost. Probability is
    that of a frame being lost while its link is down.
    """

    KIND: ClassVar[str] = "flap"

    period_ns: int = units.ms(10)
    down_ns: int = units.ms(2)

    def __post_init__(self) -> None:
        if self.down_ns > self.period_ns:
            raise ValueError("down_ns must not exceed period_ns")

    def apply(self, delivery: Delivery, draw: Draw) -> list[Delivery]:
        """Nothing, if the link was down when the frame left."""
        since_up = (delivery.begin_ns + draw.phase(self.period_ns)) % self.period_ns
        return [] if since_up < self.down_ns and draw.hit() else [delivery]
