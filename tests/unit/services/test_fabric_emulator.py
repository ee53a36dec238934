from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from libs.actor import Deliver, Record, Reply
from libs.fabric.params import UB
from libs.units import transfer_ns
from libs.wire.fabric import FaultArm, FaultHeal, FaultState, UbFrame
from libs.wire.request import Cancel
from services.fabric_emulator.core import FabricEmulatorCore
from tests.support.bench import Bench

PAYLOAD = np.arange(8, dtype=np.uint8)
#: One microsecond of link time.
KB196 = 196_000


def frame(
    source: int = 0, target: int = 1, depart_ns: int = 0, nbytes: int = KB196, repeat: int = 1
) -> UbFrame:
    return UbFrame(source, target, depart_ns, nbytes, repeat, PAYLOAD)


@pytest.fixture
def bench() -> Bench:
    return Bench(FabricEmulatorCore("fabric_emulator.0", num_dies=4))


def test_an_idle_link_costs_its_latency_and_the_bytes(bench: Bench) -> None:
    deliver = bench.take(frame(depart_ns=500)).one(Deliver)
    assert deliver.subject == "xds.ub.1"
    assert deliver.at_ns == 500 + 1_000 + UB.ub_latency_ns
    assert deliver.message.deliver_ns == deliver.at_ns
    assert deliver.message.payload is PAYLOAD


def test_a_frame_for_many_exchanges_needs_that_many_latencies(bench: Bench) -> None:
    deliver = bench.take(frame(repeat=10)).one(Deliver)
    assert deliver.at_ns == 1_000 + 10 * UB.ub_latency_ns


@pytest.mark.parametrize(
    ("second", "waits"),
    [(frame(0, 2), True), (frame(2, 1), True), (frame(2, 3), False), (frame(1, 0), False)],
    ids=["same egress", "same ingress", "other dies", "other direction"],
)
def test_frames_queue_where_they_share_a_link(bench: Bench, second: UbFrame, waits: bool) -> None:
    bench.take(frame(0, 1))
    deliver = bench.take(second).one(Deliver)
    assert deliver.at_ns == (2_000 if waits else 1_000) + UB.ub_latency_ns


def test_a_frame_stamped_earlier_but_arriving_late_is_not_pushed_behind(bench: Bench) -> None:
    bench.take(frame(depart_ns=50_000))
    assert bench.take(frame(depart_ns=0)).one(Deliver).at_ns == 1_000 + UB.ub_latency_ns


@pytest.mark.parametrize(
    ("bad", "name"),
    [
        (frame(source=4), "unknown_die"),
        (frame(target=-1), "unknown_die"),
        (frame(nbytes=-1), "malformed_frame"),
        (frame(repeat=0), "malformed_frame"),
    ],
)
def test_an_impossible_frame_is_recorded_and_charged_nothing(
    bench: Bench, bad: UbFrame, name: str
) -> None:
    effects = bench.take(bad)
    assert effects.one(Record).name == name
    assert not effects.has(Deliver)
    assert bench.take(frame()).one(Deliver).at_ns == 1_000 + UB.ub_latency_ns


FRAMES = st.lists(
    st.builds(
        frame,
        st.integers(0, 3),
        st.integers(0, 3),
        st.integers(0, 30_000),
        st.integers(0, 3 * KB196),
        st.integers(1, 4),
    ),
    max_size=30,
)


@given(FRAMES)
@settings(max_examples=60, deadline=None)
def test_nothing_is_faster_than_its_links_and_no_link_carries_more_than_its_bandwidth(
    frames: list[UbFrame],
) -> None:
    core = FabricEmulatorCore("fabric_emulator.0", num_dies=4)
    bench = Bench(core)
    last_ns = 0
    ingress: dict[int, int] = {}
    for item in frames:
        deliver_ns = bench.take(item).one(Deliver).at_ns
        occupancy = transfer_ns(item.charge_bytes, UB.ub_bytes_per_s)
        assert deliver_ns >= item.depart_ns + item.repeat * UB.ub_latency_ns + occupancy
        ingress[item.target] = ingress.get(item.target, 0) + occupancy
        last_ns = max(last_ns, deliver_ns)
    assert all(busy <= last_ns for busy in ingress.values())
    assert core.charged_bytes == sum(item.charge_bytes for item in frames)


def test_an_unexpected_message_is_recorded(bench: Bench) -> None:
    assert bench.take(Cancel("r1", "lost")).one(Record).fields == {"kind": "Cancel"}


# ---------------------------------------------------------------- commands


def arm(kind: str = "one_way_loss", **other: object) -> FaultArm:
    return FaultArm("f", kind, 1.0, 0, **other)  # type: ignore[arg-type]


def test_a_fault_is_armed_witnessed_and_healed(bench: Bench) -> None:
    assert bench.take(arm(), reply_to="_INBOX.1").one(Reply).message == FaultState("f", True, 0, 0)
    assert not bench.take(frame()).has(Deliver)
    healed = bench.take(FaultHeal("f"), reply_to="_INBOX.1").one(Reply).message
    assert healed == FaultState("f", False, seen=1, touched=1)
    assert bench.take(frame()).has(Deliver)


def test_a_bad_fault_is_answered_with_the_problem(bench: Bench) -> None:
    state = bench.take(arm("moon"), reply_to="_INBOX.1").one(Reply).message
    assert not state.armed
    assert "unknown fault class" in state.problem
    assert bench.take(frame()).has(Deliver)


def test_a_doubled_frame_is_delivered_twice(bench: Bench) -> None:
    bench.take(arm("duplicate"))
    assert len(bench.take(frame()).all(Deliver)) == 2


def test_an_egress_that_the_sender_reserved_is_not_charged_again() -> None:
    core = FabricEmulatorCore("fabric_emulator.0", num_dies=4, check=True)
    bench = Bench(core)
    begun = UbFrame(0, 1, 0, KB196, 1, PAYLOAD, begin_ns=7_000)
    assert bench.take(begun).one(Deliver).at_ns == 7_000 + 1_000 + UB.ub_latency_ns
    uses = {(use.direction, use.link): use.busy_ns for use in core.link_use(0, 1 << 40)}
    assert uses == {("ingress", 1): 1_000}
