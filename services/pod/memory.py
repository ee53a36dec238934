"""The memory that the processes of one host share, made before they are forked."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from libs.carrier.ring import RingLayout
from libs.carrier.segment import ShmPlan, make_segments
from libs.config.plan import ActorPlan, PodPlan

#: 4 MiB per ordered pair of dies that talk (assumed: a hundred times the frames of the shipped
#: model; what fits no ring goes over the broker). The default would take four times as much.
POD_LAYOUT = RingLayout(slots=32, slot_bytes=128 * 1024)


@contextmanager
def shared_memory(plan: PodPlan, actors: Sequence[ActorPlan]) -> Iterator[ShmPlan | None]:
    """Memory for the dies of `actors`, or None where the topology's carrier is another.

    Enter it before the actors are started and leave it when they have stopped. Raises `BadInput`
    or `CapacityExceeded` when the host has no room for it.
    """
    dies = [actor.dies[0] for actor in actors if actor.dies]
    if plan.topology.fabric.carrier != "shm" or not dies:
        yield None
        return
    with make_segments(dies, layout=POD_LAYOUT) as shm:
        yield shm
