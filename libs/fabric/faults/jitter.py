"""Jitter: frames arrive later, each by its own amount."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

from libs import units
from libs.fabric.faults.delivery import Delivery
from libs.fabric.faults.draw import Draw


@dataclass(frozen=True, slots=True)
class Jitter:
    """An uneven way; neighbouring frames may change places when their delays differ enough."""

    KIND: ClassVar[str] = "jitter"

    extra_ns_max: int = units.us(200)

    def apply(self, delivery: Delivery, draw: Draw) -> list[Delivery]:
        """The frame, 1 ns to `extra_ns_max` later, evenly drawn."""
        if not draw.hit():
            return [delivery]
        extra_ns = 1 + draw.below(self.extra_ns_max)
        return [replace(delivery, deliver_ns=delivery.deliver_ns + extra_ns)]
