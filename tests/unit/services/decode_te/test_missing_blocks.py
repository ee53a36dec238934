"""KV blocks that do not come are asked for again, by name, and not for ever."""

from __future__ import annotations

from libs.actor import Compute, Send, SetTimer
from libs.kvcache.block_pool import BlockState
from libs.wire.request import LegFailed
from libs.wire.transfer import AbortTransfer, BlocksMissing
from services.decode_te.admission import KV_PATIENCE_NS, KV_TRIES_MAX
from services.decode_te.group import KV_TIMER
from tests.support.decode import DecodeBench

WATCH = KV_TIMER + "r1"


def receiving() -> DecodeBench:
    bench = DecodeBench()
    armed = bench.assign("r1").one(SetTimer, name=WATCH)
    assert armed.delay_ns == KV_PATIENCE_NS
    return bench


def test_only_the_missing_blocks_are_asked_for_with_the_generation_that_may_land() -> None:
    bench = receiving()
    bench.block("r1", 1)
    effects = bench.fire(WATCH)
    asked = effects.one(Send, message=BlocksMissing)
    generation = bench.core.group.requests["r1"].generation
    assert asked.subject == "xds.act.prefill_te.p0.dp0"
    assert asked.message == BlocksMissing("kv-r1", generation, (0,))
    assert effects.has(SetTimer, name=WATCH)


def test_a_resent_block_completes_the_reception() -> None:
    bench = receiving()
    bench.block("r1", 1)
    bench.fire(WATCH)
    effects = bench.block("r1", 0)
    bench.done(effects.one(Compute), 384)
    bench.complete("r1")
    assert bench.fire(WATCH) == [], "nobody asks for what is there"


def test_after_enough_tries_the_request_fails_and_its_blocks_are_free() -> None:
    bench = receiving()
    for _ in range(KV_TRIES_MAX):
        assert bench.fire(WATCH).has(Send, message=BlocksMissing)
    effects = bench.fire(WATCH)
    failed = effects.one(Send, message=LegFailed).message
    assert (failed.code, failed.definite) == ("transfer_failed", True)
    assert effects.has(Send, message=AbortTransfer)
    assert bench.pool.count(BlockState.FREE) == bench.pool.num_blocks
