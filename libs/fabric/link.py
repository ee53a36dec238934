"""Links as resources: what leaves a die, what arrives at one, and the proof that none was too fast.

    depart          the sender wants to write
    begin           its egress link has room            EgressLinks, kept by the sender
    release         the pair has room under way         IngressLinks, kept at the destination
    ingress         the ingress link has room           IngressLinks
    deliver         ingress + repeat x latency + bytes / bandwidth

Each stamp is at or after the one before. A frame occupies both links for bytes / bandwidth each; a
frame that stands for `repeat` exchanges pays that many latencies.

**Who keeps which link.** An egress link belongs to whoever sends, and is reserved there, before the
frame leaves: all frames of a die pass through one host. An ingress link belongs to the emulator
shard that serves its destination: all frames to a die pass through one shard. So each link is in
one hand and no stamp depends on the number of shards. The VPC card of a server is shared by dies in
several processes; the shard of the server keeps it in both directions.

**Bounded in flight.** At most `in_flight_frames_max` frames of one ordered pair are between release
and delivery; further ones wait at the sender, later but never dropped. The limit is per pair, as
if a die's egress fed one queue per target, so that a congested target does not hold up others.
It is applied where deliveries are known, at the destination.

All state is plain data: a copy goes on like the original.
"""

from __future__ import annotations

from bisect import insort
from collections import defaultdict
from dataclasses import dataclass

from libs.fabric.params import UB, FabricParams
from libs.fabric.planes import (
    Plane,
    PlaneLimits,
    is_shared,
    link_of,
    plane_between,
    plane_limits,
    shard_of_link,
)
from libs.fabric.superpod import SuperPod
from libs.fabric.timeline import Timeline
from libs.units import transfer_ns


@dataclass(frozen=True, slots=True)
class Departed:
    """A frame that has left its egress link (at `begin_ns`) on its way to an ingress link."""

    plane: Plane
    source: int
    target: int
    nbytes: int
    repeat: int
    depart_ns: int
    begin_ns: int


@dataclass(frozen=True, slots=True)
class Stamps:
    """The whole way of one frame, as the module docstring tells it."""

    frame: Departed
    release_ns: int
    ingress_ns: int
    deliver_ns: int


@dataclass(frozen=True, slots=True)
class LinkUse:
    """What one link has carried: in all, and how long it was busy within the asked window."""

    plane: str
    link: int
    direction: str
    frames: int
    nbytes: int
    busy_ns: int
    window_busy_ns: int


class _Links:
    """The links of one direction: a `Timeline` each, created when first used."""

    def __init__(self, pod: SuperPod, params: FabricParams) -> None:
        self.pod = pod
        self.limits: dict[Plane, PlaneLimits] = plane_limits(params)
        self._lines: defaultdict[tuple[Plane, int], Timeline] = defaultdict(Timeline)
        self._carried: defaultdict[tuple[Plane, int], list[int]] = defaultdict(lambda: [0, 0])

    def _reserve(self, plane: Plane, die: int, at_ns: int, nbytes: int) -> int:
        key = plane, (self.pod.server_of(die) if plane is Plane.VPC else die)
        carried = self._carried[key]
        carried[0] += 1
        carried[1] += nbytes
        return self._lines[key].reserve(at_ns, transfer_ns(nbytes, self.limits[plane].bytes_per_s))
