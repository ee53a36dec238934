from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from libs.actor import CancelTimer, Compute, Record, Send, SetTimer, Transmit
from libs.errors import TransferFailed
from libs.wire.control import Heartbeat, HeartbeatReply
from libs.wire.expert import A2E, A2ERefused
from libs.wire.request import LegFailed, RequestFinished, Submit
from libs.wire.tokens import CloseStream, TokensCommitted
from services.decode_te.iteration import ITERATION_TIMER, RESENDS_MAX
from services.decode_te.jobs import BeginIteration, ResumeIteration
from services.decode_te.state import Phase, Stage
from tests.support.decode import BLOCKS, DIES, JE, DecodeBench, finished
from tests.support.requests import END_TOKEN, FIRST, make_spec

# ---------------------------------------------------------------- the iteration


def test_rows_go_to_every_die_named_by_the_routing(running: DecodeBench) -> None:
    frames = running.last.all(Transmit, message=A2E)
    assert [frame.target for frame in frames] == list(DIES)
    item = frames[0].message
    assert (item.layer, item.source_die, item.map_version, item.epoch) == (1, 8, 1, 1)
    assert frames[0].charge_bytes == item.repeat * 132
    assert running.last.has(SetTimer, name=ITERATION_TIMER)


def test_the_layer_goes_on_when_the_last_die_has_answered(running: DecodeBench) -> None:
    assert running.answer(DIES[0], at_ns=running.now_ns + 500) == []
    effects = running.answer(DIES[1], at_ns=running.now_ns + 200)
    resume = effects.one(Compute, job=ResumeIteration)
    assert resume.at_ns == running.now_ns + 500, "at the latest stamp, in whatever order they came"
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
