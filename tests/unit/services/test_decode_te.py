from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from libs.actor import CancelTimer, Compute, Record, Send, SetTimer, Transmit
from libs.errors import TransferFailed
from libs.kvcache.block_pool import BlockState
from libs.wire.control import Heartbeat, HeartbeatReply
from libs.wire.expert import A2E, A2ERefused
from libs.wire.request import Cancel, LegFailed, RequestFinished, Submit
from libs.wire.tokens import CloseStream, OpenStream, StopMatched, TokensCommitted
from libs.wire.transfer import AbortTransfer, OfferReceive, ReceiveDone
from services.decode_te.iteration import ITERATION_TIMER, RESENDS_MAX
from services.decode_te.jobs import BeginIteration, ImportKv, ResumeIteration
from services.decode_te.state import Phase, Stage
from tests.support.bench import Effects
from tests.support.decode import BLOCKS, DIES, JE, OUTPUT, SHELL, DecodeBench, block
from tests.support.requests import END_TOKEN, FIRST, make_spec


@pytest.fixture
def bench() -> DecodeBench:
    return DecodeBench()


@pytest.fixture
def running(bench: DecodeBench) -> DecodeBench:
    """`r1` runs its first iteration and waits for the expert dies."""
    bench.admit("r1")
    bench.reach_experts()
    return bench


def finished(effects: Effects) -> RequestFinished:
    message: RequestFinished = effects.one(Send, subject=SHELL, message=RequestFinished).message
    return message


# ---------------------------------------------------------------- admission (P101, P103)


def test_admission_reserves_every_block_the_request_may_need(bench: DecodeBench) -> None:
    effects = bench.assign("r1", prompt=20, max_tokens=20)
    offer = effects.one(Send, message=OfferReceive)
    assert offer.subject == "xds.act.distflow.p0.d0"
    assert (offer.message.blocks, offer.message.target_die) == (3, 8)
    assert bench.pool.count(BlockState.IN_TRANSFER) == 3
    assert bench.stage("r1") is Stage.TRANSFER


def test_without_blocks_receiving_is_deferred_and_that_is_the_back_pressure(
    bench: DecodeBench,
) -> None:
    bench.assign("r1", max_tokens=100)
    assert not bench.assign("r2", max_tokens=8).has(Send, message=OfferReceive)
    assert bench.stage("r2") is Stage.PREALLOC
    effects = bench.take(Cancel("r1", "left"))
    assert effects.one(Send, message=OfferReceive).message.request_id == "r2"


def test_a_small_request_does_not_overtake_a_large_one(bench: DecodeBench) -> None:
    bench.assign("r1", max_tokens=60)
    bench.assign("large", max_tokens=100)
    assert not bench.assign("small", prompt=4, max_tokens=1).has(Send, message=OfferReceive)


def test_a_full_queue_refuses_definitely_and_leaves_the_kv_on_lease(bench: DecodeBench) -> None:
    bench.assign("r0", max_tokens=100)
    for index in range(1, 3):
        bench.assign(f"r{index}", max_tokens=100)
    effects = bench.assign("late")
    failed = effects.one(Send, subject=JE).message
    assert (failed.code, failed.definite) == ("backpressure", True)
    assert finished(effects).reason == "refused"
    assert not effects.has(Send, message=AbortTransfer), "another decode TE may still take it"


def test_a_request_that_can_never_fit_is_refused_for_good(bench: DecodeBench) -> None:
    effects = bench.assign("r1", max_tokens=16 * BLOCKS)
    assert effects.one(Send, subject=JE).message.code == "capacity_exceeded"


def test_a_repeated_assignment_is_ignored(bench: DecodeBench) -> None:
    bench.assign("r1")
    assert bench.assign("r1") == []


def test_a_cancellation_that_overtakes_its_request_stops_it(bench: DecodeBench) -> None:
    bench.take(Cancel("r1", "left"))
    effects = bench.assign("r1")
    assert finished(effects).reason == "refused"
    assert effects.has(Send, message=AbortTransfer)
    assert bench.free == BLOCKS


# ---------------------------------------------------------------- receiving


def test_when_the_last_block_is_in_they_are_written_and_then_acknowledged(
    bench: DecodeBench,
) -> None:
    bench.assign("r1")
    assert bench.block("r1", 1) == []
    write = bench.block("r1", 0).one(Compute, job=ImportKv)
    assert [item.index for item in write.job.blocks] == [0, 1], "in order, as they arrived or not"
    assert bench.stage("r1") is Stage.IMPORTING
    done = bench.done(write, 384)
    assert done.one(Send, message=ReceiveDone).subject == "xds.act.distflow.p0.d0"
    assert bench.pool.count(BlockState.HELD) == 2


def test_completion_opens_the_stream_with_the_first_token_and_starts_the_loop(
    bench: DecodeBench,
) -> None:
    effects = bench.admit("r1")
    output = [send.message for send in effects.all(Send, subject=OUTPUT)]
    assert [type(message) for message in output] == [OpenStream, TokensCommitted]
    assert (output[1].rows[0].index, output[1].rows[0].token) == (0, FIRST.token)
    timing = output[0].timing
    assert (timing.decode_dp, timing.expert_dies, timing.kv_bytes) == (bench.core.name, DIES, 384)
    begin = effects.one(Compute, job=BeginIteration).job
    assert (begin.rows[0].token, begin.rows[0].position) == (FIRST.token, 20)


def test_a_block_of_another_generation_is_dropped(bench: DecodeBench) -> None:
    bench.assign("r1")
    effects = bench.block("r1", 0, generation=99)
    assert effects.one(Record).name == "stale_kv_dropped"
    assert bench.block("r1", 1) == [], "it still waits for block 0"


def test_a_block_for_nobody_is_dropped(bench: DecodeBench) -> None:
    assert bench.take(block("r9", 0, 1)).one(Record).name == "stale_kv_dropped"


def test_a_block_of_an_ended_request_cannot_land_in_its_successors_blocks(
    bench: DecodeBench,
) -> None:
    old = bench.assign("r1").one(Send, message=OfferReceive).message
    bench.take(Cancel("r1", "left"))
    new = bench.assign("r2").one(Send, message=OfferReceive).message
    assert new.generation > old.generation
    assert bench.block("r1", 0, generation=old.generation).has(Record, name="stale_kv_dropped")
    assert bench.block("r2", 0, generation=old.generation).has(Record, name="stale_kv_dropped")


def test_a_repeated_block_counts_once(bench: DecodeBench) -> None:
    bench.assign("r1")
    assert bench.block("r1", 0) == []
    assert bench.block("r1", 0) == []
    assert bench.block("r1", 1).has(Compute, job=ImportKv)
    assert bench.block("r1", 1) == []


@pytest.mark.parametrize(("index", "of"), [(2, 2), (-1, 2), (0, 3)])
def test_a_block_outside_the_manifest_fails_the_transfer(
    bench: DecodeBench, index: int, of: int
) -> None:
    bench.assign("r1")
    effects = bench.block("r1", index, of=of)
    assert effects.one(Send, subject=JE, message=LegFailed).message.code == "transfer_failed"
    assert effects.has(Send, message=AbortTransfer)
    assert bench.free == BLOCKS


def test_a_checksum_that_does_not_match_fails_the_transfer_and_nothing_is_decoded(
    bench: DecodeBench,
) -> None:
    bench.assign("r1")
    bench.block("r1", 0)
    write = bench.block("r1", 1).one(Compute)
    effects = bench.done(write, TransferFailed("block 1 does not match its checksum"))
    assert effects.one(Send, subject=JE, message=LegFailed).message.code == "transfer_failed"
    assert effects.has(Send, message=AbortTransfer)
    assert not effects.has(Send, message=ReceiveDone)
    assert not bench.complete("r1").has(Compute)


@pytest.mark.parametrize("stage", ["transfer", "importing", "written"])
def test_after_a_failed_transfer_nothing_is_decoded(bench: DecodeBench, stage: str) -> None:
    bench.assign("r1")
    bench.block("r1", 0)
    if stage != "transfer":
        write = bench.block("r1", 1).one(Compute)
    if stage == "written":
        bench.done(write, 384)
    effects = bench.fail_transfer("r1")
    failed = effects.one(Send, subject=JE, message=LegFailed).message
    assert (failed.code, failed.definite) == ("transfer_failed", True)
    assert bench.free == BLOCKS
    if stage == "importing":
        assert bench.done(write, 384) == []
    assert bench.complete("r1") == []


def test_completion_before_the_blocks_are_written_is_not_believed(bench: DecodeBench) -> None:
    bench.assign("r1")
    assert bench.complete("r1") == []
    assert bench.stage("r1") is Stage.TRANSFER


def test_a_failure_told_after_completion_is_too_late(running: DecodeBench) -> None:
    assert running.fail_transfer("r1") == []


# ---------------------------------------------------------------- the iteration


def test_rows_go_to_every_die_named_by_the_routing(running: DecodeBench) -> None:
    frames = running.last.all(Transmit, message=A2E)
    assert [frame.target for frame in frames] == list(DIES)
    item = frames[0].message
    assert (item.layer, item.source_die, item.map_version, item.epoch) == (1, 8, 1, 1)
    assert frames[0].charge_bytes == item.repeat * 132
    assert running.last.has(SetTimer, name=ITERATION_TIMER)


def test_the_layer_goes_on_when_the_last_die_has_answered(running: DecodeBench) -> None:
    assert running.answer(DIES[0], at_ns=900) == []
    effects = running.answer(DIES[1], at_ns=running.now_ns + 500)
    resume = effects.one(Compute, job=ResumeIteration)
    assert resume.at_ns == running.now_ns + 500, "at the latest answer"
    assert effects.has(CancelTimer, name=ITERATION_TIMER)
    assert not resume.paced
    running.reach_experts()
    assert running.answer_all().one(Compute).paced, "the last step of the iteration is paced"


def test_a_token_leaves_with_the_commit_of_its_iteration(running: DecodeBench) -> None:
    effects = running.finish_iteration(41)
    rows = effects.one(Send, message=TokensCommitted).message.rows
    assert [(row.index, row.token, row.finish_reason) for row in rows] == [(1, 41, None)]
    begin = effects.one(Compute, job=BeginIteration).job
    assert (begin.rows[0].token, begin.rows[0].position) == (41, 21)
    assert begin.rows[0].output == (FIRST.token, 41)


@pytest.mark.parametrize(
    ("token", "max_tokens", "reason"), [(END_TOKEN, 8, "stop"), (41, 2, "length")]
)
def test_the_last_token_ends_the_request_and_frees_its_blocks(
    bench: DecodeBench, token: int, max_tokens: int, reason: str
) -> None:
    bench.admit("r1", max_tokens=max_tokens)
    bench.reach_experts()
    effects = bench.finish_iteration(token)
    assert effects.one(Send, message=TokensCommitted).message.rows[0].finish_reason == reason
    assert finished(effects) == RequestFinished("r1", bench.core.name, reason, 2)
    assert effects.has(Send, subject=JE, message=RequestFinished)
    assert bench.free == BLOCKS
    assert bench.core.loop.phase is Phase.IDLE


def test_requests_share_iterations_and_new_ones_join_the_next(running: DecodeBench) -> None:
    running.admit("r2")
    begin = running.finish_iteration(41).one(Compute, job=BeginIteration)
    assert [row.token for row in begin.job.rows] == [41, FIRST.token]


def test_a_batch_never_exceeds_its_bound(bench: DecodeBench) -> None:
    for index in range(3):
        bench.admit(f"r{index}", prompt=10, max_tokens=4, blocks=1)
    bench.reach_experts()
    begin = bench.finish_iteration(41).one(Compute, job=BeginIteration)
    assert len(begin.job.rows) == 2
    assert bench.stage("r2") is Stage.WAITING


def test_a_request_from_the_future_waits_for_its_time_while_others_run(
    running: DecodeBench,
) -> None:
    late_ns = running.now_ns * 1_000
    running.admit("r2", at_ns=late_ns)
    begin = running.finish_iteration(41).one(Compute, job=BeginIteration)
    assert len(begin.job.rows) == 1
    assert begin.at_ns < late_ns, "its stamp does not drag the others along"


def test_ended_sequences_are_named_to_the_executor_once(running: DecodeBench) -> None:
    running.admit("r2")
    first = running.finish_iteration(END_TOKEN).one(Compute, job=BeginIteration).job
    assert len(first.ended) == 1
    running.reach_experts()
    assert running.finish_iteration(41).one(Compute, job=BeginIteration).job.ended == ()


# ---------------------------------------------------------------- experts in trouble


def test_late_repeated_and_foreign_answers_change_nothing(running: DecodeBench) -> None:
    assert running.answer(DIES[0], work_id=99) == []
    assert running.answer(77).one(Record).name == "unexpected_answer"
    assert running.answer(DIES[0], epoch=2).one(Record).name == "unexpected_answer"
    running.answer(DIES[0])
    assert running.answer(DIES[0]) == []
    assert running.core.loop.phase is Phase.AWAITING_EXPERTS


def test_rows_are_sent_again_to_the_dies_that_are_missing_only(running: DecodeBench) -> None:
    first = running.last.all(Transmit)
    running.answer(DIES[0])
    effects = running.fire(ITERATION_TIMER)
    again = effects.one(Transmit)
    assert again.target == DIES[1]
    assert again.at_ns == first[1].at_ns, "charged from when it was first sent"
    assert effects.one(Record).fields == {"dies": [DIES[1]], "layer": 1}
    assert running.answer(DIES[1]).has(Compute, job=ResumeIteration)


def test_a_die_that_stays_silent_is_named_when_the_batch_fails(running: DecodeBench) -> None:
    running.answer(DIES[0])
    for _ in range(RESENDS_MAX):
        assert running.fire(ITERATION_TIMER).has(Transmit)
    effects = running.fire(ITERATION_TIMER)
    failed = effects.one(Send, message=LegFailed).message
    assert failed == LegFailed(
        "r1", "decode", "peer_lost", f"expert dies [{DIES[1]}] do not answer", definite=False
    )
    assert effects.has(Send, message=CloseStream)
    assert effects.has(Record, name="iteration_failed")
    assert running.free == BLOCKS
    assert running.fire(ITERATION_TIMER) == []
    assert running.answer(DIES[1]) == [], "too late"


def refusal(code: str, die: int = DIES[1], work_id: int = 1) -> A2ERefused:
    return A2ERefused(work_id, 1, die, code, "no")


def test_a_busy_die_is_waited_for(running: DecodeBench) -> None:
    assert running.take(refusal("backpressure")) == []
    assert running.fire(ITERATION_TIMER).has(Transmit, target=DIES[1])


@pytest.mark.parametrize("code", ["stale_epoch", "stale_map", "malformed"])
def test_any_other_refusal_ends_the_batch_with_the_dies_reason(
    running: DecodeBench, code: str
) -> None:
    failed = running.take(refusal(code)).one(Send, message=LegFailed).message
    assert (failed.code, failed.reason) == (code, f"die {DIES[1]}: no")


def test_a_refusal_of_a_repetition_that_was_already_answered_is_ignored(
    running: DecodeBench,
) -> None:
    running.answer(DIES[0])
    assert running.take(refusal("stale_map", die=DIES[0])) == []
    assert running.take(refusal("stale_map", work_id=99)) == []


def test_an_executor_that_fails_ends_the_batch_and_the_next_one_starts(
    running: DecodeBench,
) -> None:
    running.admit("r2")
    resume = running.answer_all().one(Compute)
    effects = running.done(resume, TransferFailed("die 9 answered with shape (0, 0)"))
    assert effects.one(Send, message=LegFailed).message.request_id == "r1"
    assert effects.one(Compute, job=BeginIteration)


def test_a_result_of_an_iteration_that_was_given_up_is_ignored(running: DecodeBench) -> None:
    resume = running.answer_all().one(Compute)
    running.done(resume, TransferFailed("gone"))
    assert running.done(resume, TransferFailed("gone")) == []


# ---------------------------------------------------------------- leaving, in every stage


@pytest.mark.parametrize("stage", ["prealloc", "transfer", "importing"])
def test_cancelled_before_it_runs_a_request_frees_its_blocks_and_aborts_its_transfer(
    bench: DecodeBench, stage: str
) -> None:
    if stage == "prealloc":
        bench.assign("r0", max_tokens=100)
    bench.assign("r1")
    if stage == "importing":
        bench.block("r1", 0)
        bench.block("r1", 1)
    assert bench.stage("r1").value == stage
    effects = bench.take(Cancel("r1", "left"))
    assert effects.has(Send, subject="xds.act.distflow.p0.d0", message=AbortTransfer)
    assert finished(effects).reason == "cancelled"
    assert bench.pool.get("r1") is None
    assert bench.take(Cancel("r1", "left")) == []


def test_cancelled_while_waiting_it_leaves_at_once(running: DecodeBench) -> None:
    running.admit("r2")
    assert running.stage("r2") is Stage.WAITING
    assert finished(running.take(Cancel("r2", "left"))).request_id == "r2"
    assert running.pool.get("r2") is None


@pytest.mark.parametrize("phase", ["computing", "awaiting"])
def test_cancelled_while_running_it_is_gone_within_the_iteration(
    bench: DecodeBench, phase: str
) -> None:
    bench.admit("r1")
    if phase == "awaiting":
        bench.reach_experts()
    effects = bench.take(Cancel("r1", "left"))
    assert effects.has(Send, message=CloseStream)
    assert bench.free < BLOCKS, "the iteration still reads its KV"
    if phase == "computing":
        bench.reach_experts()
    effects = bench.finish_iteration(41)
    assert not effects.has(Send, message=TokensCommitted), "nobody wants the token"
    assert finished(effects).reason == "cancelled"
    assert bench.free == BLOCKS


def test_a_stop_string_ends_the_request_and_drops_what_came_after(running: DecodeBench) -> None:
    running.finish_iteration(41)
    running.reach_experts()
    assert running.take(StopMatched("r1", 0)) == []
    effects = running.finish_iteration(42)
    assert not effects.has(Send, message=TokensCommitted)
    assert finished(effects) == RequestFinished("r1", running.core.name, "stop", 1)
    assert running.free == BLOCKS


def test_a_stop_string_in_the_first_token_ends_a_waiting_request(running: DecodeBench) -> None:
    running.admit("r2")
    assert finished(running.take(StopMatched("r2", 0))).reason == "stop"
    assert running.pool.get("r2") is None


@pytest.mark.parametrize("index", [-1, 1, 5])
def test_a_stop_beyond_what_was_committed_is_not_believed(running: DecodeBench, index: int) -> None:
    assert running.take(StopMatched("r1", index)) == []
    assert running.finish_iteration(41).has(Send, message=TokensCommitted)


def test_a_stop_before_the_kv_is_here_is_not_believed(bench: DecodeBench) -> None:
    bench.assign("r1")
    assert bench.take(StopMatched("r1", 0)) == []
    assert bench.stage("r1") is Stage.TRANSFER


def test_a_stopped_request_is_not_failed_by_a_die_it_no_longer_needs(
    running: DecodeBench,
) -> None:
    running.take(StopMatched("r1", 0))
    effects = running.take(refusal("stale_map"))
    assert not effects.has(Send, message=LegFailed)
    assert finished(effects).reason == "stop"


@pytest.mark.parametrize("stage", ["prealloc", "transfer", "waiting", "running"])
def test_a_deadline_ends_the_request_in_every_stage_and_names_it(
    bench: DecodeBench, stage: str
) -> None:
    if stage == "prealloc":
        bench.assign("r0", max_tokens=100)
    if stage == "waiting":
        bench.admit("r0")
    if stage in ("waiting", "running"):
        bench.admit("r1")
    else:
        bench.assign("r1")
    assert bench.stage("r1").value == stage
    effects = bench.fire("r1")
    failed = effects.one(Send, subject=JE, message=LegFailed).message
    assert (failed.code, failed.definite) == ("deadline_exceeded", False)
    assert stage in failed.reason
    if stage == "running":
        bench.reach_experts()
        bench.finish_iteration(41)
    assert bench.pool.get("r1") is None


def test_timers_of_requests_that_are_gone_do_nothing(bench: DecodeBench) -> None:
    assert bench.fire("r9") == []
    assert bench.fire(ITERATION_TIMER) == []


# ---------------------------------------------------------------- company


def test_a_beat_is_answered_in_the_middle_of_an_iteration(running: DecodeBench) -> None:
    reply = running.take(Heartbeat(3), sender="te_shell.d0").one(Send, message=HeartbeatReply)
    state = reply.message.state
    assert (state.phase, state.running, state.waiting) == ("awaiting_experts", 1, 0)
    assert state.kv.total == state.kv.free + state.kv.held


def test_an_unexpected_message_is_recorded(bench: DecodeBench) -> None:
    message: Any = Submit(make_spec())
    assert bench.take(message).one(Record).fields == {"kind": "Submit"}


def test_answers_of_one_iteration_reach_the_executor_by_die(running: DecodeBench) -> None:
    running.answer(DIES[1], value=2.0)
    resume = running.answer(DIES[0], value=1.0).one(Compute).job
    partials = {die: float(np.max(partial)) for die, partial in resume.partials}
    assert partials == {DIES[0]: 1.0, DIES[1]: 2.0}
