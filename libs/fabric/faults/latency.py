"""Latency: frames arrive later by a constant."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

from libs import units
from libs.fabric.faults.delivery import Delivery
from libs.fabric.faults.draw import Draw


@dataclass(frozen=True, slots=True)
class Latency:
    """A longer way, such as a detour; order within a pair is kept when all its frames are hit."""

    KIND: ClassVar[str] = "latency"

    extra_ns: int = units.us(200)

    def apply(self, delivery: Delivery, draw: Draw) -> list[Delivery]:
        """The frame, `extra_ns` later."""
        if not draw.hit():
            return [delivery]
        return [replace(delivery, deliver_ns=delivery.deliver_ns + self.extra_ns)]
