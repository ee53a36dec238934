"""A bench for a decode DP group: admission and iterations in one call each."""

from __future__ import annotations

from typing import Any

import numpy as np

from libs.actor import Compute, Send
from libs.config.plan import ExpertPlacement
from libs.fabric.profiles import XDS_TINY
from libs.kvcache.block_pool import BlockPool
from libs.model.sampling import Sampled
from libs.wire.expert import A2E, E2A
from libs.wire.request import RequestFinished
from libs.wire.transfer import KvGoal, OfferReceive, TransferComplete, TransferFailure
from services.decode_te.core import DecodeConfig, DecodeCore
from services.decode_te.jobs import (
    BeginIteration,
    ImportKv,
    IterationDone,
    ResumeIteration,
    Routed,
)
from services.decode_te.state import Stage
from tests.support.bench import Bench, Effects
from tests.support.executors import HIDDEN, NUM_DENSE, NUM_LAYERS, block_bytes, die_rows
from tests.support.kv_peer import KvPeer
from tests.support.requests import assign_decode

DIES = (9, 10)
BLOCKS = 8
SHELL, JE = "xds.act.te_shell.d0", "xds.act.job_executor.0"
OUTPUT = "xds.act.output.d0.dp0"


def kv_of(blocks: int, value: int = 7) -> np.ndarray:
    """KV of so many blocks, `[nbytes]` uint8."""
    return np.full(blocks * block_bytes(16), value, np.uint8)


class DecodeBench(Bench):
    """One decode DP group: 8 blocks of 16 rows, batches of 2, queues of 2, expert dies 9 and 10."""

    def __init__(self) -> None:
        config = DecodeConfig(
            name="decode_te.d0.dp0",
            te="d0",
            die=8,
            placement=ExpertPlacement(1, DIES, (*DIES, DIES[-1])),
            profile=XDS_TINY,
            repeats=(1, 3, 2),
            num_dense=NUM_DENSE,
            num_blocks=BLOCKS,
            block_size=16,
            block_bytes=block_bytes(16),
            batch_max=2,
            queue_max=2,
            distflows=("distflow.p0.d0", "distflow.p1.d0"),
        )
        self.core = DecodeCore(config)
        self.peer = KvPeer(0)
        self.goals: dict[str, KvGoal] = {}
        self.last = Effects()
        self._compute: Compute | None = None
        self._work_id = 0
        super().__init__(self.core)

    def step(self, event: Any) -> Effects:
        """One event; remembers the iteration's latest job and work id."""
        self.last = super().step(event)
        for kind in (BeginIteration, ResumeIteration):
            for compute in self.last.all(Compute, job=kind):
                self._compute = compute
        for effect in self.last:
            item = getattr(effect, "message", None)
            if isinstance(item, A2E):
                self._work_id = item.work_id
            if isinstance(item, OfferReceive):
                self.goals[item.request_id] = item.goal
        return self.last

    @property
    def pool(self) -> BlockPool:
        """The group's blocks."""
        return self.core.group.pool

    @property
    def free(self) -> int:
        """Free blocks."""
        return self.pool.free_blocks

    def stage(self, request_id: str) -> Stage:
        """Where a request is."""
        return self.core.group.requests[request_id].stage

    # ------------------------------------------------------------ admission

    def assign(self, request_id: str, prompt: int = 20, **other: Any) -> Effects:
        """The TE-shell assigns a request."""
        return self.take(assign_decode(request_id, prompt, **other))

    def receive(self, request_id: str, blocks: int = 2, value: int = 7) -> Effects:
        """The KV of a request comes from the prefill die, whole."""
        data = kv_of(blocks, value)
        return self.peer.exchange(self, self.peer.send(self.goals[request_id], data))

    def complete(self, request_id: str, at_ns: int | None = None) -> Effects:
        """DistFlow confirms a transfer."""
        message = TransferComplete(f"kv-{request_id}", request_id)
        return self.take(message, at_ns=self.now_ns if at_ns is None else at_ns)

    def fail_transfer(self, request_id: str) -> Effects:
        """DistFlow says no."""
        return self.take(TransferFailure(f"kv-{request_id}", request_id, "lost"))

    def admit(
        self, request_id: str, *, blocks: int = 2, at_ns: int | None = None, **other: Any
    ) -> Effects:
        """From assignment to WAITING (and to RUNNING when the group is idle)."""
        self.assign(request_id, **other)
        write = self.receive(request_id, blocks).one(Compute, job=ImportKv)
        self.done(write, 384)
        return self.complete(request_id, at_ns)

    # ------------------------------------------------------------ iterations

    def reach_experts(self) -> Effects:
        """The executor reaches the next exchange with the expert dies."""
        compute = self._compute
        assert compute is not None, "no iteration is computing"
        job = compute.job
        layer = job.layer + 1 if isinstance(job, ResumeIteration) else NUM_DENSE
        rows = tuple(die_rows(die) for die in DIES)
        return self.done(compute, Routed(layer, rows))

    def answer(
        self,
        die: int,
        *,
        work_id: int | None = None,
        epoch: int = 1,
        value: float = 0.0,
        at_ns: int | None = None,
    ) -> Effects:
        """One die answers."""
        work = self._work_id if work_id is None else work_id
        item = E2A(work, 1, epoch, die, np.full((1, HIDDEN), value, np.float32))
        return self.take(item, at_ns=self.now_ns if at_ns is None else at_ns)

    def answer_all(self) -> Effects:
        """Every die answers."""
        for die in DIES:
            effects = self.answer(die)
        return effects

    def finish_iteration(self, token: int) -> Effects:
        """From the first exchange to the commit; every request samples `token`."""
        while True:
            compute = self.answer_all().one(Compute, job=ResumeIteration)
            if compute.job.layer + 1 == NUM_LAYERS:
                break
            self.reach_experts()
        batch = self.core.loop._iteration
        assert batch is not None
        return self.done(compute, IterationDone((Sampled(token),) * len(batch.batch)))


def finished(effects: Effects) -> RequestFinished:
    """What the TE-shell is told when a request has left the group."""
    message: RequestFinished = effects.one(Send, subject=SHELL, message=RequestFinished).message
    return message
