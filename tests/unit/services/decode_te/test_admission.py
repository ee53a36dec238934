from __future__ import annotations

import pytest

from libs.actor import Compute, Record, Send
from libs.errors import TransferFailed
from libs.kvcache.block_pool import BlockState
from libs.wire.request import Cancel, LegFailed
from libs.wire.tokens import OpenStream, TokensCommitted
from libs.wire.transfer import AbortTransfer, OfferReceive, ReceiveDone
from services.decode_te.jobs import BeginIteration, ImportKv
from services.decode_te.state import Stage
from tests.support.decode import BLOCKS, DIES, JE, OUTPUT, DecodeBench, block, finished
from tests.support.requests import FIRST

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
    bench.block("r1", 0)
    bench.block("r1", 1)
    assert bench.complete("r1") == []
    assert bench.stage("r1") is Stage.IMPORTING


def test_a_failure_told_after_completion_is_too_late(running: DecodeBench) -> None:
    assert running.fail_transfer("r1") == []
