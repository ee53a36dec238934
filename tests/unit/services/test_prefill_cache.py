"""The prefix cache of a prefill DP group: what jobs get, what they cost, how endings leave it.

The executor is a scripted one whose blocks are digests of the prompt up to their end, so that a
wrong block is a wrong byte in what is exported.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from libs.actor import Compute, Record, Send
from libs.errors import TransferFailed
from libs.fabric import profiles
from libs.fabric.profiles import XDS_TINY
from libs.kvcache.block_pool import BlockState
from libs.model.sampling import Sampled
from libs.wire.request import BindTransfer, Cancel, PrefillDone
from libs.wire.tokens import OpenStream
from libs.wire.transfer import PullKv, TransferComplete, TransferFailure
from services.prefill_te.core import PrefillConfig, PrefillCore
from services.prefill_te.jobs import ExportedKv, ExportKv, PrefillJob
from tests.support.bench import Bench, Effects
from tests.support.executors import ScriptedPrefill, block_bytes, kv_rows
from tests.support.kv_peer import KvPeer
from tests.support.requests import END_TOKEN, assign_prefill

DISTFLOW = "distflow.p0.d0"
SIZE = 16
PROMPT = np.arange(2, 42, dtype=np.int32)  # 40 tokens: two whole blocks and a half


class CacheBench(Bench):
    """One group whose jobs are really run, on digests."""

    def __init__(self, blocks: int = 8, **config: Any) -> None:
        self.core = PrefillCore(
            PrefillConfig(
                "prefill_te.p0.dp0", "p0", 0, XDS_TINY, num_layers=3, num_blocks=blocks,
                block_size=SIZE, block_bytes=block_bytes(SIZE), queue_max=8, **config,
            )
        )  # fmt: skip
        self.executor = ScriptedPrefill(lambda _prompt: (40,), SIZE)
        self.peer = KvPeer(8)
        self.pulls = 0
        super().__init__(self.core)

    @property
    def free(self) -> int:
        return self.core.group.pool.free_blocks

    def begin(self, request_id: str, prompt: np.ndarray = PROMPT, **other: Any) -> Compute:
        effects = self.take(assign_prefill(request_id, prompt_ids=prompt, **other))
        compute: Compute = effects.one(Compute, job=PrefillJob)
        return compute

    def finish(self, compute: Compute) -> Effects:
        result = self.executor.run(compute.job)
        return self.done(compute, result)

    def prefill(self, request_id: str, prompt: np.ndarray = PROMPT, **other: Any) -> Compute:
        """A prompt up to its lease."""
        compute = self.begin(request_id, prompt, **other)
        self.finish(compute)
        return compute

    def once(self, request_id: str, prompt: np.ndarray = PROMPT, **other: Any) -> Compute:
        """A prompt up to its end, which its first token is."""
        return self.prefill(request_id, prompt, max_tokens=1, **other)

    def export(self, request_id: str, blocks: int) -> Compute:
        """The decode side pulls the KV."""
        self.take(BindTransfer(request_id, f"kv-{request_id}", DISTFLOW))
        self.pulls += 1
        goal, _ = self.peer.expect(self.pulls, 0, blocks * block_bytes(SIZE))
        pull = PullKv(f"kv-{request_id}", "decode_te.d0.dp0", goal)
        compute: Compute = self.take(pull, sender=DISTFLOW).one(Compute, job=ExportKv)
        return compute


def kv_of(prompt: np.ndarray) -> bytes:
    blocks = range(-(-len(prompt) // SIZE))
    return b"".join(kv_rows(prompt, block, SIZE).tobytes() for block in blocks)


@pytest.fixture
def bench() -> CacheBench:
    return CacheBench()


# ---------------------------------------------------------------- what is taken from the cache


def test_only_what_is_not_cached_is_computed_and_charged(bench: CacheBench) -> None:
    first = bench.once("r1")
    second = bench.begin("r2")
    assert (first.job.cached_rows, second.job.cached_rows) == (0, 32)
    assert second.job.block_ids[:2] == first.job.block_ids[:2]
    assert second.cost_ns == profiles.prefill_ns(XDS_TINY, 8, 32) < first.cost_ns


def test_what_leaves_is_the_prompts_own_kv_whoever_computed_it(bench: CacheBench) -> None:
    other = PROMPT.copy()
    other[35] = 7
    bench.once("r1", other)
    bench.prefill("r2")
    exported = bench.executor.run(bench.export("r2", 3).job)
    assert isinstance(exported, ExportedKv)
    assert exported.data.tobytes() == kv_of(PROMPT)


def test_the_cached_tokens_travel_with_the_timing(bench: CacheBench) -> None:
    bench.once("r1")
    effects = bench.finish(bench.begin("r2"))
    done: PrefillDone = effects.one(Send, message=PrefillDone).message
    opened: OpenStream = effects.one(Send, message=OpenStream).message
    assert done.timing.cached_tokens == opened.timing.prefill.cached_tokens == 32
    assert effects.one(Record, name="prompt_prefilled").fields["cached_tokens"] == 32


def test_another_salt_finds_nothing(bench: CacheBench) -> None:
    bench.once("r1", cache_salt="a")
    assert bench.once("r2", cache_salt="b").job.cached_rows == 0
    assert bench.once("r3", cache_salt="b").job.cached_rows == 32


def test_switched_off_every_prompt_is_computed() -> None:
    bench = CacheBench(prefix_cache=False)
    bench.once("r1")
    assert bench.once("r2").job.cached_rows == 0
    assert bench.core.group.pool.cached_blocks() == []


def test_a_prompt_waits_until_its_new_blocks_are_there_and_finds_the_same_then() -> None:
    bench = CacheBench(blocks=4)
    bench.prefill("r1")
    long = np.concatenate([PROMPT[:32], np.arange(100, 132, dtype=np.int32)])
    assert not bench.take(assign_prefill("r2", prompt_ids=long)).has(Compute)
    effects = bench.take(Cancel("r1", "left"))
    assert effects.one(Compute, job=PrefillJob).job.cached_rows == 32


# ---------------------------------------------------------------- every ending


def end_cancelled(bench: CacheBench) -> None:
    bench.take(Cancel("r2", "left"))


def end_expired(bench: CacheBench) -> None:
    bench.fire("r2")


def end_transferred(bench: CacheBench) -> None:
    bench.take(TransferComplete("kv-r2", "r2"), sender=DISTFLOW)


def end_failed(bench: CacheBench) -> None:
    bench.take(TransferFailure("kv-r2", "r2", "lost"), sender=DISTFLOW)


@pytest.mark.parametrize("end", [end_cancelled, end_expired, end_transferred, end_failed])
@pytest.mark.parametrize("stage", ["leased", "bound", "exporting", "sending"])
def test_however_a_request_ends_shared_blocks_outlive_it_and_nothing_leaks(
    bench: CacheBench, stage: str, end: Any
) -> None:
    bench.prefill("r1")
    bench.prefill("r2")
    if stage == "bound":
        bench.take(BindTransfer("r2", "kv-r2", DISTFLOW))
    if stage in ("exporting", "sending"):
        export = bench.export("r2", 3)
        if stage == "sending":
            bench.done(export, bench.executor.run(export.job))
    assert bench.free == 8 - 4
    end(bench)
    if end is end_failed and stage == "leased":
        bench.take(Cancel("r2", "left"))  # nobody believes a DistFlow that was never bound
    assert bench.free == 8 - 3, "two shared blocks and the tail of r1"
    exported = bench.executor.run(bench.export("r1", 3).job)
    assert exported.data.tobytes() == kv_of(PROMPT)
    assert bench.core.group.pool.count(BlockState.IN_TRANSFER) == 3


@pytest.mark.parametrize("how", ["cancelled", "deadline"])
def test_what_a_request_that_left_had_computed_serves_the_next_one(
    bench: CacheBench, how: str
) -> None:
    running = bench.begin("r1")
    bench.take(Cancel("r1", "left")) if how == "cancelled" else bench.fire("r1")
    bench.finish(running)
    assert bench.free == 8
    assert bench.begin("r2").job.cached_rows == 32


def test_cancelled_in_the_queue_it_touches_nothing(bench: CacheBench) -> None:
    running = bench.begin("r1")
    bench.take(assign_prefill("r2", prompt_ids=PROMPT))
    bench.take(Cancel("r2", "left"))
    bench.finish(running)
    assert bench.free == 8 - 3


def test_a_failed_prompt_leaves_nothing_to_find(bench: CacheBench) -> None:
    bench.done(bench.begin("r1"), TransferFailed("disk"))
    assert bench.free == 8
    assert bench.begin("r2").job.cached_rows == 0


def test_a_failed_prompt_gives_back_what_it_only_borrowed(bench: CacheBench) -> None:
    bench.once("r1")
    bench.done(bench.begin("r2"), TransferFailed("disk"))
    assert bench.begin("r3").job.cached_rows == 32


def test_a_first_token_that_ends_the_request_leaves_its_prompt_cached(bench: CacheBench) -> None:
    bench.done(bench.begin("r1"), Sampled(END_TOKEN))
    assert bench.free == 8
    assert bench.begin("r2").job.cached_rows == 32


# ---------------------------------------------------------------- host memory

OTHER = np.arange(500, 548, dtype=np.int32)  # three whole blocks


def test_evicted_blocks_come_back_from_the_host_for_the_cost_of_the_copies() -> None:
    bench = CacheBench(blocks=3, host_blocks=4)
    bench.once("r1")
    evicting = bench.once("r2", OTHER)
    assert len(evicting.job.spills) == 2
    back = bench.begin("r3")
    assert back.job.cached_rows == 32
    assert len(back.job.fills) == 2
    copied = (len(back.job.fills) + len(back.job.spills)) * SIZE
    assert back.cost_ns == profiles.prefill_ns(XDS_TINY, 8, 32) + profiles.host_copy_ns(
        XDS_TINY, copied
    )
    bench.finish(back)
    exported = bench.executor.run(bench.export("r3", 3).job)
    assert exported.data.tobytes() == kv_of(PROMPT)


def test_a_job_that_failed_has_copied_nothing() -> None:
    bench = CacheBench(blocks=3, host_blocks=4)
    bench.once("r1")
    bench.once("r2", OTHER)
    bench.done(bench.begin("r3"), TransferFailed("disk"))
    assert bench.free == 3
    assert bench.begin("r4").job.cached_rows == 0
