"""Reorder: a frame is held back while those behind it pass."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

from libs import units
from libs.fabric.faults.delivery import Delivery
from libs.fabric.faults.draw import Draw


@dataclass(frozen=True, slots=True)
class Reorder:
    """A second path of another length; whatever is sent within `hold_ns` overtakes."""

    KIND: ClassVar[str] = "reorder"

    hold_ns: int = units.us(300)

    def apply(self, delivery: Delivery, draw: Draw) -> list[Delivery]:
        """The frame, held for half of `hold_ns` to all of it."""
        if not draw.hit():
            return [delivery]
        held_ns = self.hold_ns // 2 + draw.below(self.hold_ns - self.hold_ns // 2) + 1
        return [replace(delivery, deliver_ns=delivery.deliver_ns + held_ns)]
