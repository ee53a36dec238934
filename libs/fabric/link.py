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
one hand, and no stamp depends on how many shards there are (`libs.fabric.sharding`). The VPC cards
of servers are shared by dies in several processes; shard 0 keeps all of them, in both directions.
A shard also books what senders have reserved, at the begin they name: it is a part of what their
links carry, the other shards see the rest, and a sender that names one time twice is noticed.

**Bounded in flight.** At most `in_flight_frames_max` frames of one ordered pair are between release
and delivery; further ones wait at the sender, later but never dropped. The limit is per pair, as
if a die's egress fed one queue per target, so that a congested target does not hold up others.
It is applied where deliveries are known, at the destination.

All state is plain data: a copy goes on like the original.
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

from libs.fabric.params import UB, FabricParams
from libs.fabric.planes import (
    Plane,
    PlaneLimits,
    is_shared,
    link_of,
    plane_between,
    plane_limits,
)
from libs.fabric.sharding import ONE_SHARD, Sharding
from libs.fabric.superpod import SuperPod
from libs.fabric.timeline import Timeline
from libs.units import transfer_ns


class Departed(NamedTuple):
    """A frame that has left its egress link (at `begin_ns`) on its way to an ingress link."""

    plane: Plane
    source: int
    target: int
    nbytes: int
    repeat: int
    depart_ns: int
    begin_ns: int


class Stamps(NamedTuple):
    """The whole way of one frame, as the module docstring tells it; `occupied_ns` is what it takes
    of each link.
    """

    frame: Departed
    release_ns: int
    ingress_ns: int
    deliver_ns: int
    occupied_ns: int = 0


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


class Link(Timeline):
    """One directed link: when it is busy, and what it has carried in all."""

    def __init__(self) -> None:
        super().__init__()
        self.frames = 0
        self.nbytes = 0
        self.frames_checked = 0


class Links:
    """The links of one direction, each created when first used."""

    direction = ""

    def __init__(self, pod: SuperPod, params: FabricParams = UB) -> None:
        self.pod = pod
        self.params = params
        self._limits: dict[Plane, PlaneLimits] = plane_limits(params)
        self._links: dict[tuple[Plane, int], Link] = {}

    def __iter__(self) -> Iterator[tuple[tuple[Plane, int], Link]]:
        """Every link that was ever used, by plane and number, in the order of first use."""
        return iter(self._links.items())

    def _reserve(self, plane: Plane, die: int, at_ns: int, nbytes: int, occupied_ns: int) -> int:
        key = plane, link_of(self.pod, plane, die)
        link = self._links.get(key)
        if link is None:
            link = self._links[key] = Link()
        link.frames += 1
        link.nbytes += nbytes
        return link.reserve(at_ns, occupied_ns)

    def use(self, begin_ns: int, end_ns: int) -> tuple[LinkUse, ...]:
        """What each link has carried, with its busy time between two stamps; sorted."""
        return tuple(
            LinkUse(
                str(plane), number, self.direction, link.frames, link.nbytes, link.busy_ns,
                link.busy_between(begin_ns, end_ns),
            )
            for (plane, number), link in sorted(self._links.items(), key=lambda item: item[0])
        )  # fmt: skip

    def validate(self) -> None:
        """The reservations of every link that was used since the last look are disjoint."""
        for link in self._links.values():
            if link.frames_checked != link.frames:
                link.validate()
                link.frames_checked = link.frames


class EgressLinks(Links):
    """What the dies of one sender write to; at a shard, what senders have written to it."""

    direction = "egress"

    def depart(self, plane: Plane, source: int, at_ns: int, nbytes: int) -> int:
        """Reserve the egress of `source` for a frame ready at `at_ns`; returns when it begins."""
        occupied_ns = transfer_ns(nbytes, self._limits[plane].bytes_per_s)
        return self._reserve(plane, source, at_ns, nbytes, occupied_ns)


class IngressLinks(Links):
    """What arrives at the dies of one shard."""

    direction = "ingress"

    def __init__(self, pod: SuperPod, params: FabricParams = UB) -> None:
        super().__init__(pod, params)
        self._under_way: dict[tuple[Plane, int, int], _UnderWay] = {}

    def arrive(self, frame: Departed) -> Stamps:
        """Reserve the ingress of the target and say when the frame is delivered."""
        pair = frame.plane, frame.source, frame.target
        under_way = self._under_way.get(pair)
        if under_way is None:
            under_way = self._under_way[pair] = _UnderWay(self.params.in_flight_frames_max)
        limits = self._limits[frame.plane]
        occupied_ns = transfer_ns(frame.nbytes, limits.bytes_per_s)
        release_ns = under_way.release(frame.begin_ns)
        ingress_ns = self._reserve(frame.plane, frame.target, release_ns, frame.nbytes, occupied_ns)
        deliver_ns = ingress_ns + frame.repeat * limits.latency_ns + occupied_ns
        under_way.add(release_ns, deliver_ns)
        return Stamps(frame, release_ns, ingress_ns, deliver_ns, occupied_ns)


class _UnderWay:
    """The frames of one ordered pair between release and delivery, sorted by delivery."""

    #: Remembered multiples of the limit, so that frames which come out of order are judged fairly.
    HISTORY = 8

    __slots__ = ("_floor_ns", "_frames", "_frames_max")

    def __init__(self, frames_max: int) -> None:
        assert frames_max >= 1, frames_max
        self._frames_max = frames_max
        self._frames: list[tuple[int, int]] = []
        self._floor_ns = 0

    def release(self, begin_ns: int) -> int:
        """The first stamp at or after `begin_ns` at which fewer than the limit are under way."""
        at_ns = max(begin_ns, self._floor_ns)
        most = self._frames_max
        if len(self._frames) < most or self._frames[-most][0] <= at_ns:
            return at_ns
        while True:
            ends = [end for end, released in self._frames if released <= at_ns < end]
            if len(ends) < most:
                return at_ns
            at_ns = ends[len(ends) - most]

    def add(self, release_ns: int, deliver_ns: int) -> None:
        insort(self._frames, (deliver_ns, release_ns))
        if len(self._frames) > self.HISTORY * self._frames_max:
            self._floor_ns = max(self._floor_ns, self._frames.pop(0)[0])


# ---------------------------------------------------------------- the sender's side


@dataclass(frozen=True, slots=True)
class Dispatch:
    """Where a frame goes next, and when its egress begins.

    `begin_ns` is -1 when the link is not the sender's to reserve; `at_ns` is when the frame may be
    handed to the shard, the begin or else the departure.
    """

    shard: str
    begin_ns: int
    at_ns: int


class SenderPort:
    """The egress of one host's dies; `dispatch` is all that carrying out a `Transmit` needs."""

    def __init__(
        self, pod: SuperPod, params: FabricParams = UB, sharding: Sharding = ONE_SHARD
    ) -> None:
        self.pod = pod
        self.sharding = sharding
        self.egress = EgressLinks(pod, params)

    def dispatch(
        self, source: int, target: int, at_ns: int, nbytes: int, plane: str = ""
    ) -> Dispatch:
        """Reserve the egress of a frame ready at `at_ns`.

        A frame that no link can carry is passed on unreserved, for the emulator to refuse.
        """
        pod = self.pod
        fallback = Dispatch(self.sharding.any_keeper(target), -1, at_ns)
        if not (pod.has_die(source) and pod.has_die(target)) or nbytes < 0:
            return fallback
        over = plane_between(pod, source, target, plane)
        if over is None:
            return fallback
        keeper = self.sharding.keeper(pod, over, target)
        if is_shared(over):
            return Dispatch(keeper, -1, at_ns)
        begin_ns = self.egress.depart(over, source, at_ns, nbytes)
        return Dispatch(keeper, begin_ns, begin_ns)
