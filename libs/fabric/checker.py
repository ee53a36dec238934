"""The checker: nothing is ever delivered faster than its links allow.

`LinkModel` knows nothing of how stamps are made. It is shown each frame's stamps after the fact
and raises `InvariantError` when they cannot be true: a stamp before its cause, two frames on one
link at once, or more frames of a pair under way than may be. One model may watch many shards.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right, insort
from collections import defaultdict

from libs.errors import InvariantError
from libs.fabric.link import Stamps
from libs.fabric.params import UB, FabricParams
from libs.fabric.planes import Plane, link_of, plane_limits
from libs.fabric.superpod import SuperPod
from libs.units import transfer_ns

#: Intervals remembered per link and per pair; far more than a `Timeline` can still change.
REMEMBERED_MAX = 4096


class LinkModel:
    """What the links of a machine can carry, held against what is said to have been carried."""

    def __init__(self, pod: SuperPod, params: FabricParams = UB) -> None:
        self._pod = pod
        self._limits = plane_limits(params)
        self._in_flight_max = params.in_flight_frames_max
        self._links: defaultdict[tuple[str, Plane, int], list[tuple[int, int]]] = defaultdict(list)
        self._pairs: defaultdict[tuple[Plane, int, int], list[tuple[int, int]]] = defaultdict(list)
        self.checked = 0

    def check(self, stamps: Stamps) -> None:
        """Raise `InvariantError` unless the links allow these stamps, given those before."""
        frame, limits = stamps.frame, self._limits[stamps.frame.plane]
        occupied = transfer_ns(frame.nbytes, limits.bytes_per_s)
        order = (frame.depart_ns, frame.begin_ns, stamps.release_ns, stamps.ingress_ns)
        self._require(tuple(sorted(order)) == order, "stamps are out of order", stamps)
        least = stamps.ingress_ns + frame.repeat * limits.latency_ns + occupied
        self._require(stamps.deliver_ns >= least, f"delivered {least} at the earliest", stamps)
        source = link_of(self._pod, frame.plane, frame.source)
        target = link_of(self._pod, frame.plane, frame.target)
        if occupied:
            self._occupy(("egress", frame.plane, source), frame.begin_ns, occupied, stamps)
            self._occupy(("ingress", frame.plane, target), stamps.ingress_ns, occupied, stamps)
        self._fly(stamps)
        self.checked += 1

    def _occupy(
        self, link: tuple[str, Plane, int], begin_ns: int, occupied: int, stamps: Stamps
    ) -> None:
        busy = self._links[link]
        index = bisect_right(busy, (begin_ns, begin_ns))
        free = (index == 0 or busy[index - 1][1] <= begin_ns) and (
            index == len(busy) or begin_ns + occupied <= busy[index][0]
        )
        self._require(free, f"two frames at once on the {link[0]} of {link[1]} {link[2]}", stamps)
        insort(busy, (begin_ns, begin_ns + occupied))
        del busy[:-REMEMBERED_MAX]

    def _fly(self, stamps: Stamps) -> None:
        frame, at_ns = stamps.frame, stamps.release_ns
        pair = self._pairs[frame.plane, frame.source, frame.target]
        later = pair[bisect_left(pair, (at_ns + 1,)) :]
        under_way = sum(1 for end, released in later if released <= at_ns < end)
        self._require(under_way < self._in_flight_max, f"{under_way} frames under way", stamps)
        insort(pair, (stamps.deliver_ns, at_ns))
        del pair[:-REMEMBERED_MAX]

    def _require(self, holds: bool, what: str, stamps: Stamps) -> None:
        if not holds:
            raise InvariantError(f"the fabric was faster than its links: {what}: {stamps}")
