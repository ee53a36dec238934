"""One-way loss: frames vanish, each by its own chance."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from libs.fabric.faults.delivery import Delivery
from libs.fabric.faults.draw import Draw


@dataclass(frozen=True, slots=True)
class OneWayLoss:
    """A lossy link. Ways are judged apart: with a scope of one direction the answers still come."""

    KIND: ClassVar[str] = "one_way_loss"

    def apply(self, delivery: Delivery, draw: Draw) -> list[Delivery]:
        """Nothing, if the frame is hit."""
        return [] if draw.hit() else [delivery]
