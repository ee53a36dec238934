from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from libs.actor import Deliver, Record, Reply
from libs.errors import InvariantError
from libs.fabric.link import EgressLinks
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


def begun(begin_ns: int, source: int = 0, target: int = 1, nbytes: int = KB196) -> UbFrame:
    """A frame whose sender has reserved its egress."""
    return UbFrame(source, target, 0, nbytes, 1, PAYLOAD, begin_ns)


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
        (frame(repeat=1 << 62), "malformed_frame"),
        (frame(nbytes=1 << 62), "malformed_frame"),
        (frame(depart_ns=1 << 62), "malformed_frame"),
        (begun(1 << 62), "malformed_frame"),
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


@pytest.mark.parametrize("reply_to", ["", "_INBOX.1"])
def test_what_became_of_a_command_is_recorded_whoever_waits(bench: Bench, reply_to: str) -> None:
    refused = bench.take(arm("moon"), reply_to=reply_to)
    assert refused.has(Reply) is bool(reply_to)
    fields = refused.one(Record, name="fault_refused").fields
    assert (fields["fault_id"], fields["kind"]) == ("f", "moon")
    assert "unknown fault class" in fields["problem"]
    assert bench.take(FaultHeal("f"), reply_to=reply_to).has(Record, name="fault_unknown")
    armed = bench.take(arm(), reply_to=reply_to).one(Record)
    assert (armed.name, armed.fields) == ("fault_armed", {"fault_id": "f", "kind": "one_way_loss"})
    healed = bench.take(FaultHeal("f"), reply_to=reply_to).one(Record)
    assert healed.fields == {"fault_id": "f", "seen": 0, "touched": 0}


def test_a_doubled_frame_is_delivered_twice(bench: Bench) -> None:
    bench.take(arm("duplicate"))
    assert len(bench.take(frame()).all(Deliver)) == 2


def test_an_egress_that_the_sender_reserved_is_not_charged_again() -> None:
    core = FabricEmulatorCore("fabric_emulator.0", num_dies=4, check=True)
    bench = Bench(core)
    effects = bench.take(begun(7_000))
    assert effects.one(Deliver).at_ns == 7_000 + 1_000 + UB.ub_latency_ns
    assert not effects.has(Record)
    uses = {(use.direction, use.link): use.busy_ns for use in core.link_use(0, 1 << 40)}
    assert uses == {("ingress", 1): 1_000, ("egress", 0): 1_000}


# ---------------------------------------------------------------- what peers get wrong


def checked() -> tuple[FabricEmulatorCore, Bench]:
    core = FabricEmulatorCore("fabric_emulator.0", num_dies=4, check=True)
    return core, Bench(core)


def test_a_restarted_sender_that_knows_of_no_earlier_frame_is_recorded_and_waits() -> None:
    core, bench = checked()
    bench.take(begun(7_000, target=1))
    effects = bench.take(begun(7_400, target=2))
    record = effects.one(Record, name="egress_double_booked")
    assert record.fields == {"source": 0, "target": 2, "claimed_ns": 7_400, "begin_ns": 8_000}
    assert effects.one(Deliver).at_ns == 8_000 + 1_000 + UB.ub_latency_ns
    assert core.double_booked == 1
    assert not bench.take(begun(9_000, target=3)).has(Record), "the next one is fine again"


def test_a_sender_without_links_does_not_get_time_that_another_frame_was_given() -> None:
    _, bench = checked()
    bench.take(begun(0, target=1))
    effects = bench.take(frame(0, 2))
    assert effects.one(Deliver).at_ns == 1_000 + 1_000 + UB.ub_latency_ns
    assert not effects.has(Record), "it claimed nothing"


@given(
    st.lists(
        st.builds(
            begun,
            st.integers(-1, 20_000),
            st.integers(0, 3),
            st.integers(0, 3),
            st.integers(0, 2 * KB196),
        ),
        max_size=40,
    )
)
@settings(max_examples=60, deadline=None)
def test_no_claim_of_a_sender_makes_the_fabric_faster_or_stops_it(frames: list[UbFrame]) -> None:
    """With the checker on, which raises when a stamp cannot be true."""
    core, bench = checked()
    for item in frames:
        assert len(bench.take(item).all(Deliver)) == 1
    assert core.frames == len(frames)


def test_stamps_that_are_too_fast_by_our_own_doing_still_end_the_shard(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    _, bench = checked()
    monkeypatch.setattr(EgressLinks, "depart", lambda *_: 0)
    bench.take(begun(0, target=1))
    with pytest.raises(InvariantError, match="two frames at once"):
        bench.take(begun(0, target=2))
