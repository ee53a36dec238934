"""Bandwidth cap: a pair's frames queue at a narrow place."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field, replace
from typing import ClassVar

from libs import units
from libs.fabric.faults.delivery import Delivery
from libs.fabric.faults.draw import Draw
from libs.fabric.timeline import Timeline
from libs.units import transfer_ns


@dataclass(frozen=True, slots=True)
class BandwidthCap:
    """A link that lost lanes: every ordered pair in scope has a narrow place of its own.

    Each frame takes as long as its bytes need there, and frames wait for each other, which a longer
    latency would not make them do. The narrow place is per pair, so that it stays with the shard
    which serves the target. Links are hit for whole slots of time; with probability 1 they are
    narrow as long as the rule lasts.
    """

    KIND: ClassVar[str] = "bandwidth_cap"

    #: The default is the smallest share of a die's UB bandwidth that is worth a name (assumed):
    #: about 1/20, as if nearly all of its lanes had failed.
    bytes_per_s: int = 10_000_000_000
    slot_ns: int = units.ms(2)
    lines: defaultdict[tuple[str, int, int], Timeline] = field(
        default_factory=lambda: defaultdict(Timeline), init=False, repr=False, compare=False
    )

    def apply(self, delivery: Delivery, draw: Draw) -> list[Delivery]:
        """The frame, behind those before it and no sooner than the narrow place lets it through."""
        if not draw.link_hit(delivery.begin_ns // self.slot_ns):
            return [delivery]
        occupied_ns = transfer_ns(delivery.nbytes, self.bytes_per_s)
        line = self.lines[delivery.plane, delivery.source, delivery.target]
        first_byte_ns = delivery.deliver_ns - delivery.occupied_ns
        passed_ns = line.reserve(first_byte_ns, occupied_ns) + occupied_ns
        if passed_ns <= delivery.deliver_ns:
            # Nothing was slowed: the same object, so that it is not witnessed as touched.
            return [delivery]
        return [replace(delivery, deliver_ns=passed_ns)]
