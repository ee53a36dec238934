"""What the two halves of a decode DP group share: configuration, blocks, requests, and leaving."""

from __future__ import annotations

from dataclasses import dataclass

from libs.actor import CancelTimer, Effect, Send
from libs.config.plan import ExpertPlacement, output_of
from libs.fabric.params import UB, FabricParams
from libs.fabric.profiles import ModelProfile
from libs.kvcache.block_pool import BlockPool, BlockState
from libs.scheduling.tombstones import Tombstones
from libs.wire import subjects
from libs.wire.request import LegFailed, RequestFinished
from libs.wire.tokens import CloseStream
from services.decode_te.kv_receiver import KvReceiver
from services.decode_te.state import DecodeRequest, Stage


@dataclass(frozen=True, slots=True)
class DecodeConfig:
    """Identity, limits and tables of one decode DP group.

    `repeats[layer]` is how many layers of the profiled model each real layer stands for;
    `num_dense` layers come first. `block_bytes` is a KV block, all layers; `distflows` are the
    DistFlow instances of the pod, in its order.
    """

    name: str
    te: str
    die: int
    placement: ExpertPlacement
    profile: ModelProfile
    repeats: tuple[int, ...]
    num_dense: int
    num_blocks: int
    block_size: int
    block_bytes: int
    batch_max: int
    queue_max: int
    distflows: tuple[str, ...]
    epoch: int = 1
    life: int = 1
    params: FabricParams = UB


class DecodeGroup:
    """Requests and their blocks."""

    def __init__(self, config: DecodeConfig) -> None:
        self.config = config
        self.pool = BlockPool(config.num_blocks, config.block_size)
        self.receiver = KvReceiver(
            config.die, config.life, config.num_blocks * config.block_bytes, config.distflows
        )
        #: Every request here, in order of arrival; the order is the queue order of each stage.
        self.requests: dict[str, DecodeRequest] = {}
        self.tombstones = Tombstones()
        #: Sequences that ended since the last iteration began.
        self.ended: list[int] = []
        self._next_sequence = 0
        self._next_job = 0

    @property
    def output(self) -> str:
        """Inbox of this group's output process."""
        return subjects.inbox(output_of(self.config.name))

    def new_sequence(self) -> int:
        """A sequence number never used before in this life of the group."""
        self._next_sequence += 1
        return self._next_sequence

    def new_job(self) -> int:
        """A job number never used before in this life of the group."""
        self._next_job += 1
        return self._next_job

    def in_stage(self, stage: Stage) -> list[DecodeRequest]:
        """Requests in `stage`, oldest first."""
        return [request for request in self.requests.values() if request.stage is stage]

    def leave(self, request: DecodeRequest, reason: str, at_ns: int) -> list[Effect]:
        """The request is over here: free its blocks, tell the job executor and the TE-shell."""
        del self.requests[request.request_id]
        self.tombstones.add(request.request_id)
        self.pool.release(request.request_id)
        dropped = self.receiver.drop(request.request_id, reason, at_ns)
        if request.stage not in (Stage.PREALLOC, Stage.TRANSFER):
            self.ended.append(request.sequence)  # its block table is bound
        finished = RequestFinished(
            request.request_id, self.config.name, reason, len(request.output)
        )
        return [
            CancelTimer(request.request_id),
            *dropped,
            Send(subjects.inbox(request.job_executor), finished, at_ns),
            Send(subjects.inbox(f"te_shell.{self.config.te}"), finished, at_ns),
        ]

    def fail(self, request: DecodeRequest, code: str, reason: str, at_ns: int) -> list[Effect]:
        """The request cannot go on here; nothing of it will be emitted any more."""
        # Once a token may have reached the client, the request has partly happened.
        failed = LegFailed(
            request.request_id, "decode", code, reason, definite=len(request.output) == 0
        )
        return [
            Send(subjects.inbox(request.job_executor), failed, at_ns),
            Send(self.output, CloseStream(request.request_id), at_ns),
            *self.leave(request, "failed", at_ns),
        ]

    def validate(self) -> None:
        """Blocks, memory and requests agree."""
        self.pool.validate()
        self.receiver.validate()
        for request_id, request in self.requests.items():
            allocation = self.pool.get(request_id)
            assert request_id == request.request_id
            assert (allocation is None) == (request.stage is Stage.PREALLOC), request.stage
            if request.stage in (Stage.WAITING, Stage.RUNNING):
                assert allocation is not None
                assert allocation.state is BlockState.HELD
                assert request.rows < len(allocation.blocks) * self.pool.block_size
