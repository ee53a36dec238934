"""Dead die: nothing comes from it, and nothing reaches it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from libs import units
from libs.fabric.faults.delivery import Delivery
from libs.fabric.faults.draw import Draw


@dataclass(frozen=True, slots=True)
class DeadDie:
    """A die that is gone from the fabric.

    From its death on nothing leaves it, and nothing that would be delivered is taken, whenever that
    left. What it had sent before is on its way and arrives: the links are not dead.

    Dies are hit for whole slots of time, on all their links at once. With probability 1 the dies in
    scope are dead as long as the rule lasts. The process behind the die is not touched. A rule that
    comes after a frame was stamped cannot take it back: to kill at an instant, arm it before.
    """

    KIND: ClassVar[str] = "dead_die"

    slot_ns: int = units.ms(2)

    def apply(self, delivery: Delivery, draw: Draw) -> list[Delivery]:
        """Nothing, if the source was dead when the frame left, or the target when it came."""
        unsent = draw.is_gone(delivery.source, delivery.begin_ns, self.slot_ns)
        untaken = draw.is_gone(delivery.target, delivery.deliver_ns, self.slot_ns)
        return [] if unsent or untaken else [delivery]
