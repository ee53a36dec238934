from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from libs.actor import Compute, Record, Send, TimerFired, Transmit
from libs.distflow.port import SERVING_LIMITS
from libs.errors import TransferFailed
from libs.kvcache.block_pool import BlockState
from libs.wire.request import Cancel, LegFailed
from libs.wire.tokens import OpenStream, TokensCommitted
from libs.wire.transfer import AbortTransfer, OfferReceive, ReceiveDone
from libs.wire.xccl import XcclWrite
from services.decode_te.jobs import BeginIteration, ImportKv
from services.decode_te.state import Stage
from tests.support.decode import BLOCKS, DIES, JE, OUTPUT, DecodeBench, finished, kv_of
from tests.support.executors import block_bytes
from tests.support.requests import FIRST, assign_decode

# ---------------------------------------------------------------- admission (P101, P103)


def test_admission_reserves_every_block_the_request_may_need(bench: DecodeBench) -> None:
    effects = bench.assign("r1", prompt=20, max_tokens=20)
    offer = effects.one(Send, message=OfferReceive)
    assert offer.subject == "xds.act.distflow.p0.d0"
    assert (offer.message.blocks, offer.message.goal.die, offer.message.goal.nbytes) == (
        3, 8, 2 * block_bytes(16),
    )  # fmt: skip
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


def test_when_the_kv_is_in_it_is_written_and_then_acknowledged(bench: DecodeBench) -> None:
    bench.assign("r1")
    write = bench.receive("r1", value=9).one(Compute, job=ImportKv)
    assert write.job.data.tobytes() == kv_of(2, value=9).tobytes()
    assert bench.stage("r1") is Stage.IMPORTING
    assert bench.peer.ended, "the sender knows, and may use its memory again"
    done = bench.done(write, 384)
    assert done.one(Send, message=ReceiveDone).subject == "xds.act.distflow.p0.d0"
    assert bench.pool.count(BlockState.HELD) == 2


def test_transfers_of_one_source_may_come_in_another_order_than_they_were_offered(
    bench: DecodeBench,
) -> None:
    for request_id in ("r1", "r2"):
        bench.assign(request_id)
    for request_id, value in (("r2", 2), ("r1", 1)):
        write = bench.receive(request_id, value=value).one(Compute, job=ImportKv)
        assert write.job.data.tobytes() == kv_of(2, value).tobytes()


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


def test_kv_for_an_ended_request_cannot_land_in_its_successors_memory(bench: DecodeBench) -> None:
    bench.assign("r1")
    late = [effect.message for effect in bench.peer.send(bench.goals["r1"], kv_of(2, value=1))
            if isinstance(effect, Transmit)]  # fmt: skip
    bench.take(Cancel("r1", "left"))
    bench.assign("r2")
    assert bench.goals["r2"].offset == bench.goals["r1"].offset, "the same memory"
    assert bench.goals["r2"].generation > bench.goals["r1"].generation
    for write in late:
        bench.take(write)
    memory = bench.core.group.receiver.view("r2")
    assert not memory.any(), "nothing has landed"


def test_a_write_by_a_stranger_or_a_damaged_one_is_recorded_and_changes_nothing(
    bench: DecodeBench,
) -> None:
    bench.assign("r1")
    sent = [effect.message for effect in bench.peer.send(bench.goals["r1"], kv_of(2))
            if isinstance(effect, Transmit)]  # fmt: skip
    hurt = sent[0].write.copy()
    hurt[70] ^= 1
    refused = bench.take(XcclWrite(0, hurt)).one(Record, name="xccl_refused")
    assert refused.fields == {"source": 0, "reason": "bad_crc"}
    assert bench.take(XcclWrite(0, hurt[:9])).has(Record, name="xccl_refused")
    assert bench.stage("r1") is Stage.TRANSFER


def test_lost_writes_are_repeated_by_the_sender_until_all_is_there(bench: DecodeBench) -> None:
    bench.assign("r1")
    effects = bench.peer.send(bench.goals["r1"], kv_of(2))
    kept = [effect for effect in effects if isinstance(effect, Transmit)][1:]
    assert not bench.peer.exchange(bench, kept).has(Compute, job=ImportKv)
    repeated = bench.peer.kv.port.take(TimerFired(0, "xccl:8:send"))
    assert repeated is not None
    assert bench.peer.exchange(bench, repeated).has(Compute, job=ImportKv)


def test_a_sender_that_never_comes_fails_the_request_and_its_memory_is_free(
    bench: DecodeBench,
) -> None:
    bench.assign("r1")
    for _ in range(SERVING_LIMITS.receive_waits_max):
        effects = bench.fire("xccl:0:receive")
    failed = effects.one(Send, subject=JE, message=LegFailed).message
    assert (failed.code, failed.definite) == ("transfer_failed", True)
    assert "prefill_te.p0.dp0" in failed.reason
    assert effects.has(Send, message=AbortTransfer)
    assert bench.free == BLOCKS
    bench.assign("r2")
    assert bench.goals["r2"].offset == 0


def test_memory_for_kv_on_its_way_is_back_pressure_too(bench: DecodeBench) -> None:
    """The queue of one flow is bounded, like the blocks."""
    flow = bench.core.group.receiver.kv.port.endpoint
    flow.limits = replace(flow.limits, outstanding_max=0)
    assert not bench.assign("r1").has(Send, message=OfferReceive)
    assert bench.stage("r1") is Stage.PREALLOC


@pytest.mark.parametrize(
    "wrong",
    [
        {"rows": 21},
        {"blocks": 3},
        {"distflow": "distflow.p9.d0"},
        {"source_die": 8},
        {"source_die": -1},
        {"source_die": 1 << 20},
    ],
    ids=str,
)
def test_a_manifest_that_cannot_be_is_refused(bench: DecodeBench, wrong: dict[str, Any]) -> None:
    good = assign_decode("r1")
    effects = bench.take(replace(good, manifest=replace(good.manifest, **wrong)))
    failed = effects.one(Send, subject=JE, message=LegFailed).message
    assert (failed.code, failed.definite) == ("bad_input", True)
    assert bench.free == BLOCKS


def test_kv_that_does_not_come_out_even_fails_the_transfer_and_nothing_is_decoded(
    bench: DecodeBench,
) -> None:
    bench.assign("r1")
    write = bench.receive("r1").one(Compute)
    effects = bench.done(write, TransferFailed("384 bytes are no blocks"))
    assert effects.one(Send, subject=JE, message=LegFailed).message.code == "transfer_failed"
    assert effects.has(Send, message=AbortTransfer)
    assert not effects.has(Send, message=ReceiveDone)
    assert not bench.complete("r1").has(Compute)


@pytest.mark.parametrize("stage", ["transfer", "importing", "written"])
def test_after_a_failed_transfer_nothing_is_decoded(bench: DecodeBench, stage: str) -> None:
    bench.assign("r1")
    if stage != "transfer":
        write = bench.receive("r1").one(Compute)
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
    bench.receive("r1")
    assert bench.complete("r1") == []
    assert bench.stage("r1") is Stage.IMPORTING


def test_a_failure_told_after_completion_is_too_late(running: DecodeBench) -> None:
    assert running.fail_transfer("r1") == []
