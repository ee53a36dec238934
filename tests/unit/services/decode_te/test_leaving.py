from __future__ import annotations

import pytest

from libs.actor import Send
from libs.wire.expert import A2ERefused
from libs.wire.request import Cancel, LegFailed, RequestFinished
from libs.wire.tokens import CloseStream, StopMatched, TokensCommitted
from libs.wire.transfer import AbortTransfer
from services.decode_te.iteration import ITERATION_TIMER
from services.decode_te.state import Stage
from tests.support.decode import BLOCKS, DIES, JE, DecodeBench, finished


@pytest.mark.parametrize("stage", ["prealloc", "transfer", "importing"])
def test_cancelled_before_it_runs_a_request_frees_its_blocks_and_aborts_its_transfer(
    bench: DecodeBench, stage: str
) -> None:
    if stage == "prealloc":
        bench.assign("r0", max_tokens=100)
    bench.assign("r1")
    if stage == "importing":
        bench.receive("r1")
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
    effects = running.take(A2ERefused(1, 1, DIES[1], "stale_map", "no"))
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
