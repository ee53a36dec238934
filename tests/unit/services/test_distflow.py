from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from libs.actor import CancelTimer, Record, Send, SetTimer
from libs.wire.request import Cancel
from libs.wire.transfer import (
    AbortTransfer,
    KvGoal,
    OfferReceive,
    PullKv,
    ReceiveDone,
    RegisterTransfer,
    TransferComplete,
    TransferFailure,
)
from services.distflow import core as module
from services.distflow.core import PAIRING_DEADLINE_NS, PULL_DEADLINE_NS, DistFlowCore
from tests.support.bench import Bench, Effects

SOURCE, TARGET = "prefill_te.p0.dp0", "decode_te.d0.dp0"
GOAL = KvGoal(die=8, life=1, event=3, offset=0, nbytes=384, generation=5)


def register(name: str = "t1", blocks: int = 2) -> RegisterTransfer:
    return RegisterTransfer(name, f"r-{name}", SOURCE, source_die=0, rows=20, blocks=blocks)


def offer(name: str = "t1", blocks: int = 3, request_id: str = "") -> OfferReceive:
    return OfferReceive(name, request_id or f"r-{name}", TARGET, blocks, GOAL)


def received(name: str = "t1") -> ReceiveDone:
    return ReceiveDone(name, f"r-{name}", TARGET)


def abort(name: str = "t1", side: str = "decode") -> AbortTransfer:
    return AbortTransfer(name, f"r-{name}", side, "left")


@pytest.fixture
def bench() -> Bench:
    return Bench(DistFlowCore("distflow.p0.d0"))


def told(effects: Effects, kind: type[object]) -> list[str]:
    return [send.subject.removeprefix("xds.act.") for send in effects.all(Send, message=kind)]


# ---------------------------------------------------------------- the usual way


@pytest.mark.parametrize("order", [(register(), offer()), (offer(), register())])
def test_whichever_side_speaks_first_the_source_is_told_to_send_once(
    bench: Bench, order: tuple[object, object]
) -> None:
    first, second = order
    effects = bench.take(first)
    assert effects == [SetTimer("t1", PAIRING_DEADLINE_NS)]
    effects = bench.take(second)
    pull = effects.one(Send, message=PullKv)
    assert pull.subject == f"xds.act.{SOURCE}"
    assert pull.message == PullKv("t1", TARGET, GOAL)
    assert effects.has(SetTimer, name="t1", delay_ns=PULL_DEADLINE_NS)
    assert bench.take_all([first, second]) == [], "repetitions change nothing"


def test_completion_is_told_to_both_sides_and_the_transfer_forgotten(bench: Bench) -> None:
    bench.take_all([register(), offer()])
    effects = bench.take(received())
    assert told(effects, TransferComplete) == [SOURCE, TARGET]
    assert effects.has(CancelTimer, name="t1")
    assert bench.fire("t1") == []


def test_after_completion_repetitions_are_ignored(bench: Bench) -> None:
    bench.take_all([register(), offer(), received()])
    assert bench.take_all([received(), register(), offer(), abort()]) == []


# ---------------------------------------------------------------- failure


@pytest.mark.parametrize(
    ("spoken", "sides"),
    [([register()], [SOURCE]), ([offer()], [TARGET]), ([register(), offer()], [SOURCE, TARGET])],
    ids=["registered", "offered", "pulling"],
)
@pytest.mark.parametrize("how", ["abort", "deadline"])
def test_every_state_can_fail_and_whoever_has_spoken_is_told(
    bench: Bench, spoken: list[object], sides: list[str], how: str
) -> None:
    bench.take_all(spoken)
    effects = bench.take(abort()) if how == "abort" else bench.fire("t1")
    assert told(effects, TransferFailure) == sides
    assert effects.has(Record, name="transfer_failed")
    assert bench.fire("t1") == []


def test_receiving_without_a_pull_is_answered_with_failure(bench: Bench) -> None:
    assert told(bench.take(received()), TransferFailure) == [TARGET]
    bench.take(offer())
    assert told(bench.take(received()), TransferFailure) == [TARGET]


def test_the_last_block_arriving_after_an_abort_is_not_a_completion(bench: Bench) -> None:
    bench.take_all([register(), offer(), abort(side="prefill")])
    effects = bench.take(received())
    assert told(effects, TransferFailure) == [TARGET]
    assert not effects.has(Send, message=TransferComplete)


def test_an_abort_that_overtakes_its_transfer_stops_it(bench: Bench) -> None:
    assert bench.take(abort()) == []
    assert told(bench.take(register()), TransferFailure) == [SOURCE]
    assert told(bench.take(offer()), TransferFailure) == [TARGET]


@pytest.mark.parametrize(
    "wrong", [offer(request_id="another"), offer(blocks=1)], ids=["request", "too few blocks"]
)
def test_sides_that_disagree_both_fail(bench: Bench, wrong: OfferReceive) -> None:
    bench.take(register())
    assert told(bench.take(wrong), TransferFailure) == [SOURCE, TARGET]


def test_transfers_beyond_the_bound_fail_at_once(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "TRANSFERS_MAX", 1)
    bench.take(register("t1"))
    assert told(bench.take(register("t2")), TransferFailure) == [SOURCE]
    assert bench.take(offer("t1")).has(Send, message=PullKv), "known ones go on"


def test_an_unexpected_message_is_recorded(bench: Bench) -> None:
    assert bench.take(Cancel("r1", "lost")).one(Record).fields == {"kind": "Cancel"}


# ---------------------------------------------------------------- any order

NAMES = st.sampled_from(["t1", "t2", "t3"])


class DistFlowMachine(RuleBasedStateMachine):
    """Any order of anything: one outcome per transfer, told to everyone who spoke, nothing left."""

    def __init__(self) -> None:
        super().__init__()
        self.core = DistFlowCore("distflow.p0.d0")
        self.bench = Bench(self.core)
        self.spoke: set[tuple[str, str]] = set()
        self.heard: Counter[tuple[str, str, str]] = Counter()
        self.pulls: Counter[str] = Counter()

    def _note(self, effects: Effects) -> None:
        for send in effects.all(Send):
            side = send.subject.removeprefix("xds.act.")
            if isinstance(send.message, PullKv):
                self.pulls[send.message.transfer_id] += 1
            else:
                outcome = type(send.message).__name__
                self.heard[(send.message.transfer_id, side, outcome)] += 1

    @rule(name=NAMES)
    def register(self, name: str) -> None:
        self.spoke.add((name, SOURCE))
        self._note(self.bench.take(register(name)))

    @rule(name=NAMES)
    def offer(self, name: str) -> None:
        self.spoke.add((name, TARGET))
        self._note(self.bench.take(offer(name)))

    @rule(name=NAMES)
    def receive(self, name: str) -> None:
        if self.pulls[name]:
            self._note(self.bench.take(received(name)))

    @rule(name=NAMES, side=st.sampled_from(["prefill", "decode"]))
    def abort(self, name: str, side: str) -> None:
        self._note(self.bench.take(abort(name, side)))

    @rule(name=NAMES)
    def deadline(self, name: str) -> None:
        self._note(self.bench.fire(name))

    @invariant()
    def one_outcome_each(self) -> None:
        for name in ("t1", "t2", "t3"):
            assert self.pulls[name] <= 1
            completed = [self.heard[(name, side, "TransferComplete")] for side in (SOURCE, TARGET)]
            failed = [self.heard[(name, side, "TransferFailure")] for side in (SOURCE, TARGET)]
            assert completed in ([0, 0], [1, 1])
            assert not (any(completed) and any(failed)), "both outcomes were told"

    def teardown(self) -> None:
        for name in ("t1", "t2", "t3"):
            self._note(self.bench.fire(name))
        self.one_outcome_each()
        for name, side in self.spoke:
            outcomes = ("TransferComplete", "TransferFailure")
            assert any(self.heard[(name, side, outcome)] for outcome in outcomes)
        assert not self.core._transfers


TestAnyOrder = DistFlowMachine.TestCase
TestAnyOrder.settings = settings(max_examples=60, stateful_step_count=20, deadline=None)
