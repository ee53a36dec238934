"""Dead die: nothing comes from it, and nothing reaches it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from libs import units
from libs.fabric.faults.delivery import Delivery
from libs.fabric.faults.draw import Draw


@dataclass(frozen=True, slots=True)
class DeadDie:
    """A die that is gone from the fabric, with everything it had under way.

    Dies are hit for whole slots of time, on all their links at once. With probability 1 the dies in
    scope are dead as long as the rule lasts. The process behind the die is not touched.
    """

    KIND: ClassVar[str] = "dead_die"

    slot_ns: int = units.ms(2)

    def apply(self, delivery: Delivery, draw: Draw) -> list[Delivery]:
        """Nothing, if a die in scope was dead when the frame left or when it should arrive."""
        slots = {delivery.begin_ns // self.slot_ns, delivery.deliver_ns // self.slot_ns}
        return [] if any(draw.end_hit(slot) for slot in sorted(slots)) else [delivery]
