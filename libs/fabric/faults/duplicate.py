"""Duplicate: a frame arrives more than once."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

from libs import units
from libs.fabric.faults.delivery import Delivery
from libs.fabric.faults.draw import Draw


@dataclass(frozen=True, slots=True)
class Duplicate:
    """A retry below us that was not needed; the copies come after the frame, up to `spread_ns`.

    Copies are made at the target's port: they are not charged to any link again.
    """

    KIND: ClassVar[str] = "duplicate"

    copies: int = 1
    spread_ns: int = units.us(100)

    def apply(self, delivery: Delivery, draw: Draw) -> list[Delivery]:
        """The frame and, if it is hit, its copies."""
        if not draw.hit():
            return [delivery]
        late = [1 + draw.below(self.spread_ns, salt) for salt in range(self.copies)]
        copies = [replace(delivery, deliver_ns=delivery.deliver_ns + ns) for ns in late]
        return [delivery, *copies]
