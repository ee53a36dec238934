"""Stamps against everything that must not matter: arrival order, shards on shared links, copies."""

from __future__ import annotations

import pickle

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from libs.actor import Deliver
from libs.errors import InvariantError
from libs.fabric.checker import LinkModel
from libs.fabric.faults.active import FaultRule, FaultSet
from libs.fabric.faults.catalogue import build_fault
from libs.fabric.faults.delivery import Delivery
from libs.fabric.link import Departed, IngressLinks, SenderPort, Stamps
from libs.fabric.params import UB, FabricParams
from libs.fabric.planes import Plane
from libs.fabric.sharding import Sharding
from libs.fabric.superpod import SuperPod
from libs.wire.fabric import UbFrame
from services.fabric_emulator.core import FabricEmulatorCore
from tests.support.bench import Bench

POD = SuperPod(servers=1)
OVER_VPC = SuperPod(servers=2, outside_910b_servers=2, outside_plane="vpc")
PAYLOAD = np.zeros(8, np.uint8)
#: One millisecond of a VPC card.
CARD_MS = 50_000_000


def departed(source: int, target: int, begin_ns: int, nbytes: int) -> Departed:
    return Departed(Plane.UB, source, target, nbytes, 1, begin_ns, begin_ns)


@st.composite
def apart(draw: st.DrawFn) -> tuple[list[Departed], list[Departed]]:
    """Frames to one die that never meet, as sent and in some other order."""
    frames, at_ns = [], 0
    for gap_ns, nbytes, source in draw(
        st.lists(st.tuples(st.integers(0, 5_000), st.integers(1, 900_000), st.integers(0, 3)))
    ):
        frames.append(departed(source, 9, at_ns + gap_ns, nbytes))
        at_ns += gap_ns + -(-nbytes // 196)
    return frames, draw(st.permutations(frames))


@settings(max_examples=60, deadline=None)
@given(apart())
def test_frames_that_do_not_meet_have_the_same_stamps_in_any_order(
    case: tuple[list[Departed], list[Departed]],
) -> None:
    sent, shuffled = case
    roomy = FabricParams(in_flight_frames_max=len(sent) + 1)
    one, other = IngressLinks(POD, roomy), IngressLinks(POD, roomy)
    expected = {stamps.frame: stamps for stamps in map(one.arrive, sent)}
    assert {stamps.frame: stamps for stamps in map(other.arrive, shuffled)} == expected
    assert one.use(0, 1 << 40) == other.use(0, 1 << 40)


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.tuples(st.integers(0, 3), st.integers(0, 9_000), st.integers(0, 900_000))),
    st.randoms(use_true_random=False),
)
def test_frames_that_do_meet_are_legal_in_any_order(
    sent: list[tuple[int, int, int]], shuffle: object
) -> None:
    """Their stamps may differ, but each order is one that the links allow."""
    shuffle.shuffle(sent)  # type: ignore[attr-defined]
    port, links, model = SenderPort(POD), IngressLinks(POD), LinkModel(POD)
    for source, at_ns, nbytes in sent:
        way = port.dispatch(source, 9, at_ns, nbytes)
        model.check(links.arrive(departed(source, 9, way.begin_ns, nbytes)))
    assert model.checked == len(sent)


@pytest.mark.parametrize("per_die", [False, True])
@pytest.mark.parametrize("shards", [1, 2, 5])
def test_frames_over_a_servers_card_all_go_to_one_shard(shards: int, per_die: bool) -> None:
    port = SenderPort(OVER_VPC, sharding=Sharding(shards, per_die))
    first = OVER_VPC.pod_dies
    ways = {port.dispatch(first + i, target, 70, 1) for i in range(16) for target in range(32)}
    assert {(way.shard, way.begin_ns, way.at_ns) for way in ways} == {("0", -1, 70)}
    assert port.egress.use(0, 1 << 40) == (), "the card is not the sender's to reserve"


@pytest.mark.parametrize(
    ("source", "target", "waits"),
    [(1, 20, True), (8, 1, True), (8, 20, False)],
    ids=["same sending server", "same receiving server", "other servers"],
)
def test_dies_share_the_card_of_their_server(source: int, target: int, waits: bool) -> None:
    pod, first = OVER_VPC, OVER_VPC.pod_dies
    bench = Bench(FabricEmulatorCore("fabric_emulator.0", pod.num_dies, pod=pod, check=True))
    bench.take(UbFrame(first, 0, 0, CARD_MS, 1, PAYLOAD))
    frame = UbFrame(first + source, target, 0, CARD_MS, 1, PAYLOAD)
    at_ns = bench.take(frame).one(Deliver).at_ns
    assert at_ns == (2_000_000 if waits else 1_000_000) + UB.vpc_latency_ns


def test_a_copy_of_the_links_goes_on_like_the_original() -> None:
    links = IngressLinks(POD, FabricParams(in_flight_frames_max=2))
    for begin_ns in (0, 10, 20):
        links.arrive(departed(0, 9, begin_ns, 400_000))
    copy = pickle.loads(pickle.dumps(links))
    later = [departed(source, 9, 15, 300_000) for source in (0, 1, 0)]
    assert [copy.arrive(frame) for frame in later] == [links.arrive(frame) for frame in later]


def test_the_checker_counts_what_is_under_way() -> None:
    model = LinkModel(POD, FabricParams(in_flight_frames_max=1))
    stamps = Stamps(departed(0, 9, 0, 0), 0, 0, UB.ub_latency_ns)
    model.check(stamps)
    with pytest.raises(InvariantError, match="1 frames under way"):
        model.check(stamps._replace(deliver_ns=UB.ub_latency_ns + 5))


@pytest.mark.parametrize(("gb_per_s", "touched"), [(196, 0), (195, 1)])
def test_a_cap_that_slowed_nothing_is_no_witness(gb_per_s: int, touched: int) -> None:
    faults = FaultSet(POD)
    cap = build_fault("bandwidth_cap", (("bytes_per_s", gb_per_s * 1_000_000_000),))
    faults.arm(FaultRule("cap", cap))
    faults.apply(Delivery("ub", 0, 9, 1_000, 3_900, 196_000, PAYLOAD, 1_000))
    (armed,) = faults.armed()
    assert (armed.seen, armed.touched) == (1, touched)
