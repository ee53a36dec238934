"""Slow die: whatever touches the die takes several times as long on its way."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

from libs import units
from libs.fabric.faults.delivery import Delivery
from libs.fabric.faults.draw import Draw


@dataclass(frozen=True, slots=True)
class SlowDie:
    """A die that is throttled: its transfer engines are, so both directions stretch.

    Dies are hit for whole slots of time, all their traffic alike. With probability 1 the dies in
    scope are slow as long as the rule lasts. What the die computes is not the fabric's business.
    """

    KIND: ClassVar[str] = "slow_die"

    factor: int = 5
    slot_ns: int = units.ms(2)

    def apply(self, delivery: Delivery, draw: Draw) -> list[Delivery]:
        """The frame, its flight stretched by `factor` if one of the dies in scope is slow."""
        if not draw.end_hit(delivery.begin_ns // self.slot_ns):
            return [delivery]
        flight_ns = delivery.deliver_ns - delivery.begin_ns
        return [replace(delivery, deliver_ns=delivery.begin_ns + self.factor * flight_ns)]
