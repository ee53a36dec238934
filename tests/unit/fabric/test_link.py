"""Links as resources: nothing is faster than its links, however the emulator is sharded."""

from __future__ import annotations

from collections import defaultdict

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from libs.errors import InvariantError
from libs.fabric.checker import LinkModel
from libs.fabric.link import Departed, IngressLinks, SenderPort, Stamps
from libs.fabric.params import UB, FabricParams
from libs.fabric.planes import Plane, plane_between
from libs.fabric.sharding import ONE_SHARD, Sharding
from libs.fabric.superpod import SuperPod
from libs.units import transfer_ns

POD = SuperPod(servers=1, chips_per_server=2, outside_910b_servers=1)
TINY = FabricParams(in_flight_frames_max=2)
#: (source, target, ready at, bytes)
Sent = tuple[int, int, int, int]

FRAMES = st.lists(
    st.tuples(
        st.integers(0, 5), st.integers(0, 5), st.integers(0, 20_000), st.integers(0, 4_000_000)
    ),
    min_size=1,
    max_size=40,
)


def carry(
    frames: list[Sent], sharding: Sharding = ONE_SHARD, params: FabricParams = UB
) -> list[Stamps]:
    """Every frame through its sender's port and the shard it is handed to."""
    ports = {source: SenderPort(POD, params, sharding) for source, *_ in frames}
    ingress = defaultdict[str, IngressLinks](lambda: IngressLinks(POD, params))
    stamps = []
    for source, target, at_ns, nbytes in frames:
        way = ports[source].dispatch(source, target, at_ns, nbytes)
        plane = plane_between(POD, source, target)
        assert plane is not None
        begin = way.begin_ns
        frame = Departed(plane, source, target, nbytes, 1, at_ns, begin)
        stamps.append(ingress[way.shard].arrive(frame))
    return stamps


@settings(max_examples=60, deadline=None)
@given(FRAMES, st.sampled_from([UB, TINY]))
def test_no_frame_is_ever_faster_than_its_links(frames: list[Sent], params: FabricParams) -> None:
    model = LinkModel(POD, params)
    for stamps in carry(frames, params=params):
        model.check(stamps)
    assert model.checked == len(frames)


@settings(max_examples=60, deadline=None)
@given(FRAMES, st.integers(2, 4))
def test_stamps_do_not_depend_on_who_keeps_the_links(frames: list[Sent], shards: int) -> None:
    assert carry(frames) == carry(frames, Sharding(shards))
    assert carry(frames) == carry(frames, Sharding(shards, per_die=True))


def test_a_lone_frame_costs_latency_and_bytes() -> None:
    (stamps,) = carry([(0, 1, 100, 196_000)])
    assert stamps.deliver_ns == 100 + 1_000 + UB.ub_latency_ns


def test_a_frame_to_a_910b_die_goes_over_roce() -> None:
    outside = POD.pod_dies
    (stamps,) = carry([(0, outside, 0, 25_000)])
    assert stamps.frame.plane is Plane.ROCE
    assert stamps.deliver_ns == 1_000 + UB.roce_latency_ns


def test_beyond_the_bound_frames_wait_and_none_is_dropped() -> None:
    long = FabricParams(in_flight_frames_max=1, ub_latency_ns=10_000)
    stamps = carry([(0, 1, 0, 0), (0, 1, 0, 0), (0, 2, 0, 0)], params=long)
    assert [s.deliver_ns for s in stamps] == [10_000, 20_000, 10_000], "other pairs do not wait"


def test_the_use_of_a_link_is_counted() -> None:
    port = SenderPort(POD)
    port.dispatch(0, 1, 0, 196_000)
    port.dispatch(0, 1, 5_000, 196_000)
    (use,) = port.egress.use(0, 10_000)
    assert (use.plane, use.link, use.frames, use.nbytes) == ("ub", 0, 2, 392_000)
    assert (use.busy_ns, use.window_busy_ns) == (2_000, 2_000)
    assert port.egress.use(0, 500)[0].window_busy_ns == 500


@pytest.mark.parametrize(
    "cheat",
    [
        lambda s: s._replace(deliver_ns=s.deliver_ns - 1),
        lambda s: s._replace(ingress_ns=s.release_ns - 1),
        lambda s: s._replace(frame=s.frame._replace(begin_ns=s.frame.depart_ns - 1)),
    ],
)
def test_the_checker_sees_a_cheat(cheat: object) -> None:
    (stamps,) = carry([(0, 1, 1_000, 196_000)])
    LinkModel(POD).check(stamps)
    with pytest.raises(InvariantError, match="faster than its links"):
        LinkModel(POD).check(cheat(stamps))  # type: ignore[operator]


def test_the_checker_sees_two_frames_on_one_link_at_once() -> None:
    model = LinkModel(POD)
    (stamps,) = carry([(0, 1, 0, 196_000)])
    model.check(stamps)
    with pytest.raises(InvariantError, match="two frames at once"):
        model.check(stamps)


def test_the_links_take_as_long_as_the_bytes_need() -> None:
    first, second = carry([(0, 1, 0, 1_000_000), (0, 2, 0, 1_000_000)])
    occupied = transfer_ns(1_000_000, UB.ub_bytes_per_s)
    assert second.frame.begin_ns - first.frame.begin_ns == occupied
