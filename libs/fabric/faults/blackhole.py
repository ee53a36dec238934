"""Blackhole: a link swallows everything for a while, and nobody is told."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from libs import units
from libs.fabric.faults.delivery import Delivery
from libs.fabric.faults.draw import Draw


@dataclass(frozen=True, slots=True)
class Blackhole:
    """Loss in bursts: time is cut into slots, and a link that is hit is silent for a whole slot.

    With probability 1 it is silent as long as the rule lasts.
    """

    KIND: ClassVar[str] = "blackhole"

    slot_ns: int = units.ms(2)

    def apply(self, delivery: Delivery, draw: Draw) -> list[Delivery]:
        """Nothing, if the frame left in a slot in which its link was silent."""
        return [] if draw.link_hit(delivery.begin_ns // self.slot_ns) else [delivery]
