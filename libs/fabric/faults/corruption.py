"""Corruption: bytes of the payload change on the way."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

from libs.fabric.faults.delivery import Delivery
from libs.fabric.faults.draw import Draw


@dataclass(frozen=True, slots=True)
class Corruption:
    """A bad lane behind the link's own check: the receiver's checksum has to find it."""

    KIND: ClassVar[str] = "corruption"

    flips: int = 1

    def apply(self, delivery: Delivery, draw: Draw) -> list[Delivery]:
        """The frame with `flips` of its bytes changed; a frame without payload stays as it is."""
        size = delivery.payload.size
        if size == 0 or not draw.hit():
            return [delivery]
        payload = delivery.payload.copy()
        touched: set[int] = set()
        for flip in range(min(self.flips, size)):
            place = draw.below(size, 2 * flip)
            # A byte changed twice might be itself again; its neighbour is taken instead.
            while place in touched:
                place = (place + 1) % size
            touched.add(place)
            payload[place] ^= 1 + draw.below(255, 2 * flip + 1)
        return [replace(delivery, payload=payload)]
