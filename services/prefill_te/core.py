"""The master of a prefill DP group: queue, prefill, register, send on demand, free on completion.

The KV stays owned here, under a lease, until DistFlow reports that the decode side has it (P098,
P103); a lease that runs out ends the request, it is never read afterwards. The table of stages is
in `services.prefill_te.state`.
"""

from __future__ import annotations

from collections.abc import Iterable

from libs import units
from libs.actor import (
    CancelTimer,
    Compute,
    ComputeDone,
    Effect,
    Event,
    Received,
    Record,
    Send,
    SetTimer,
    TimerFired,
)
from libs.errors import OperatingError
from libs.fabric import profiles
from libs.health.kv_report import kv_counts
from libs.health.presence import Presence
from libs.kvcache.block_pool import BlockPool, BlockState
from libs.model.sampling import Sampled
from libs.scheduling.finish import finish_reason
from libs.scheduling.tombstones import Tombstones
from libs.wire import subjects
from libs.wire.control import KvCounts, MemberState
from libs.wire.request import (
    AssignPrefill,
    BindTransfer,
    Cancel,
    FirstToken,
    LegFailed,
    PrefillDone,
    PrefillTiming,
    RequestFinished,
)
from libs.wire.tokens import (
    StopMatched,
)
from libs.wire.transfer import (
    AbortTransfer,
    BlocksMissing,
    PullKv,
    TransferComplete,
    TransferFailure,
)
from services.prefill_te.jobs import ExportKv, PrefillJob
from services.prefill_te.state import (
    PrefillConfig,
    PrefillRequest,
    Stage,
    first_token_effects,
    kv_frames,
    manifest_of,
    register_of,
)

__all__ = ["LEASE_NS", "PrefillConfig", "PrefillCore"]

#: How long finished KV waits for the decode side before it is given up.
LEASE_NS = units.s(120)


class PrefillCore:
    """One prefill DP group; one prompt is computed at a time."""

    def __init__(self, config: PrefillConfig) -> None:
        self.name = config.name
        self.config = config
        self.pool = BlockPool(config.num_blocks, config.block_size)
        self.prompts = 0
        self._requests: dict[str, PrefillRequest] = {}
        self._jobs: dict[int, str] = {}
        self._running: str | None = None
        self._next_sequence = 0
        self._next_job = 0
        self._free_at_ns = 0
        self._tombstones = Tombstones()
        self._presence = Presence(config.name, config.te, self._describe)

    def handle(self, event: Event, now_ns: int) -> list[Effect]:
        """One event, then the next prompt if the group is free."""
        handled = self._presence.handle(event)
        if handled is not None:
            return handled
        return [*self._step(event), *self._start_next()]

    def _step(self, event: Event) -> list[Effect]:
        match event:
            case Received(message=AssignPrefill() as assign, at_ns=at_ns):
                return self._assign(assign, at_ns)
            case Received(message=BindTransfer() as bind, at_ns=at_ns):
                return self._bind(bind, at_ns)
            case Received(message=PullKv() as pull, at_ns=at_ns):
                return self._pull(pull, at_ns)
            case Received(message=BlocksMissing() as missing, at_ns=at_ns):
                return self._missing(missing, at_ns)
            case Received(message=TransferComplete(request_id=request_id), at_ns=at_ns):
                return self._transferred(request_id, at_ns)
            case Received(message=TransferFailure() as failure, sender=sender, at_ns=at_ns):
                return self._transfer_failed(failure, sender, at_ns)
            case Received(message=Cancel(request_id=request_id), at_ns=at_ns):
                return self._cancel(request_id, at_ns)
            case Received(message=StopMatched()):
                return []  # decode's own output process sees the same token and ends the request
            case Received(message=message):
                return [Record("unexpected_message", {"kind": type(message).__name__})]
            case ComputeDone(job_id=job_id, result=result, at_ns=at_ns):
                return self._computed(job_id, result, at_ns)
            case TimerFired(name=request_id, at_ns=at_ns):
                return self._expire(request_id, at_ns)
            case _:
                raise AssertionError(f"unexpected {event!r}")

    # ------------------------------------------------------------ queue

    def _assign(self, assign: AssignPrefill, at_ns: int) -> list[Effect]:
        spec = assign.spec
        if spec.request_id in self._requests:
            return []
        if spec.request_id in self._tombstones:
            return [self._told_shell(spec.request_id, "cancelled", at_ns)]
        blocks = self.pool.blocks_for(spec.prompt_tokens)
        queued = sum(r.stage is Stage.QUEUED for r in self._requests.values())
        if blocks > self.pool.num_blocks:
            reason = f"{blocks} KV blocks needed, {self.pool.num_blocks} exist"
            return self._refuse(assign, "capacity_exceeded", reason, at_ns)
        if queued >= self.config.queue_max:
            reason = f"{queued} prompts are queued at {self.name}"
            return self._refuse(assign, "backpressure", reason, at_ns)
        self._next_sequence += 1
        self._requests[spec.request_id] = PrefillRequest(
            spec, assign.job_executor, self._next_sequence, at_ns
        )
        return [SetTimer(spec.request_id, spec.budget_ns)]

    def _refuse(self, assign: AssignPrefill, code: str, reason: str, at_ns: int) -> list[Effect]:
        request_id = assign.spec.request_id
        failed = LegFailed(request_id, "prefill", code, reason, definite=True)
        return [
            Send(subjects.inbox(assign.job_executor), failed, at_ns),
            self._told_shell(request_id, "refused", at_ns),
        ]

    def _start_next(self) -> list[Effect]:
        if self._running is not None:
            return []
        queued = (r for r in self._requests.values() if r.stage is Stage.QUEUED)
        request = next(queued, None)
        if request is None:
            return []
        spec = request.spec
        blocks = self.pool.blocks_for(spec.prompt_tokens)
        if not self.pool.can_allocate(blocks):
            return []  # first come, first served; a completion frees blocks
        allocation = self.pool.allocate(spec.request_id, blocks, BlockState.HELD)
        request.block_ids = allocation.blocks
        request.stage = Stage.RUNNING
        request.started_at_ns = max(self._free_at_ns, request.ready_at_ns)
        self._running = spec.request_id
        job = PrefillJob(
            request.sequence, allocation.blocks, spec.prompt_ids, spec.sampling, spec.choice,
        )  # fmt: skip
        cost_ns = profiles.prefill_ns(self.config.profile, spec.prompt_tokens)
        job_id = self._new_job(spec.request_id)
        return [Compute(job_id, job, cost_ns, request.started_at_ns, paced=True)]

    # ------------------------------------------------------------ computed

    def _computed(self, job_id: int, result: object, at_ns: int) -> list[Effect]:
        request_id = self._jobs.pop(job_id)
        request = self._requests.get(request_id)
        match result:
            case Sampled():
                assert request is not None, "a running request never leaves before its end"
                self._running = None
                self._free_at_ns = at_ns
                self.prompts += 1
                return self._prefilled(request, result, at_ns)
            case tuple():
                return [] if request is None else kv_frames(self.config, request, result, at_ns)
            case OperatingError():
                assert request is not None
                self._running = None
                self._free_at_ns = at_ns
                return self._fail(request, result.code, result.message, at_ns)
            case _:
                raise AssertionError(f"unexpected result {result!r}")

    def _prefilled(self, request: PrefillRequest, result: Sampled, at_ns: int) -> list[Effect]:
        if request.leaving == "deadline":
            return self._fail(request, "deadline_exceeded", "deadline passed in prefill", at_ns)
        if request.leaving is not None:
            return self._leave(request, request.leaving, at_ns)
        spec = request.spec
        reason = finish_reason(spec.sampling, result.token, 1, spec.max_tokens)
        first = FirstToken(result.token, result.logprob, result.top)
        timing = PrefillTiming(self.config.te, self.name, request.started_at_ns, at_ns)
        effects = first_token_effects(self.config, request, first, timing, reason)
        done = PrefillDone(
            spec.request_id, manifest_of(self.config, request), first, timing, reason
        )
        effects.append(Send(subjects.inbox(request.job_executor), done, at_ns))
        fields = {"request_id": spec.request_id, "prompt_tokens": spec.prompt_tokens}
        effects.append(Record("prompt_prefilled", fields))
        if reason is not None:
            return [*effects, *self._leave(request, reason, at_ns)]
        request.stage = Stage.LEASED
        self.pool.move(spec.request_id, BlockState.LEASED)
        return [*effects, SetTimer(spec.request_id, LEASE_NS)]

    # ------------------------------------------------------------ transfer

    def _bind(self, bind: BindTransfer, at_ns: int) -> list[Effect]:
        request = self._requests.get(bind.request_id)
        distflow = subjects.inbox(bind.distflow)
        if request is None or request.stage is not Stage.LEASED:
            reason = "the KV is not here any more"
            abort = AbortTransfer(bind.transfer_id, bind.request_id, "prefill", reason)
            return [Send(distflow, abort, at_ns)]
        # Another decode TE is to take the KV: the first pairing must not wait for its deadline.
        moved = request.distflow not in ("", bind.distflow)
        given_up = self._abort(request, "bound elsewhere", at_ns) if moved else []
        request.distflow = bind.distflow
        return [*given_up, Send(distflow, register_of(self.config, request), at_ns)]

    def _pull(self, pull: PullKv, at_ns: int) -> list[Effect]:
        request = self._by_transfer(pull.transfer_id)
        if request is None or request.stage is not Stage.LEASED:
            return []
        request.stage = Stage.SENDING
        request.pull = pull
        self.pool.move(request.spec.request_id, BlockState.IN_TRANSFER)
        return [self._export(request, range(len(request.block_ids)), at_ns)]

    def _missing(self, missing: BlocksMissing, at_ns: int) -> list[Effect]:
        request = self._by_transfer(missing.transfer_id)
        if request is None or request.pull is None:
            return []  # not pulled yet, or over
        if missing.generation != request.pull.generation:
            return []
        known = [index for index in missing.indices if 0 <= index < len(request.block_ids)]
        return [self._export(request, known, at_ns)] if known else []

    def _export(self, request: PrefillRequest, indices: Iterable[int], at_ns: int) -> Compute:
        job = ExportKv(tuple((index, request.block_ids[index]) for index in indices))
        # Reading KV is the DMA engine's work: it costs the die no compute time.
        return Compute(self._new_job(request.spec.request_id), job, 0, at_ns)

    def _transferred(self, request_id: str, at_ns: int) -> list[Effect]:
        request = self._requests.get(request_id)
        return [] if request is None else self._leave(request, "transferred", at_ns)

    def _transfer_failed(self, failure: TransferFailure, sender: str, at_ns: int) -> list[Effect]:
        request = self._requests.get(failure.request_id)
        if request is None or sender != request.distflow:
            return []  # a pairing that was given up for another decode TE
        return self._fail(request, "transfer_failed", failure.reason, at_ns)

    # ------------------------------------------------------------ leaving

    def _cancel(self, request_id: str, at_ns: int) -> list[Effect]:
        request = self._requests.get(request_id)
        if request is None:
            self._tombstones.add(request_id)
            return []
        if request.stage is Stage.RUNNING:
            request.leaving = "cancelled"
            return []
        return [
            *self._abort(request, "cancelled", at_ns),
            *self._leave(request, "cancelled", at_ns),
        ]

    def _expire(self, request_id: str, at_ns: int) -> list[Effect]:
        request = self._requests.get(request_id)
        if request is None:
            return []
        if request.stage is Stage.RUNNING:
            request.leaving = "deadline"
            return []
        reason = f"deadline passed in stage {request.stage.value}"
        aborted = self._abort(request, reason, at_ns)
        return [*aborted, *self._fail(request, "deadline_exceeded", reason, at_ns)]

    def _abort(self, request: PrefillRequest, reason: str, at_ns: int) -> list[Effect]:
        if not request.distflow:
            return []
        abort = AbortTransfer(request.transfer_id, request.spec.request_id, "prefill", reason)
        return [Send(subjects.inbox(request.distflow), abort, at_ns)]

    def _fail(self, request: PrefillRequest, code: str, reason: str, at_ns: int) -> list[Effect]:
        request_id = request.spec.request_id
        definite = request.stage is Stage.QUEUED
        failed = LegFailed(request_id, "prefill", code, reason, definite)
        told = Send(subjects.inbox(request.job_executor), failed, at_ns)
        return [told, *self._leave(request, "failed", at_ns)]

    def _leave(self, request: PrefillRequest, reason: str, at_ns: int) -> list[Effect]:
        request_id = request.spec.request_id
        del self._requests[request_id]
        self._tombstones.add(request_id)
        self.pool.release(request_id)
        return [CancelTimer(request_id), self._told_shell(request_id, reason, at_ns)]

    def _told_shell(self, request_id: str, reason: str, at_ns: int) -> Send:
        finished = RequestFinished(request_id, self.name, reason, 0)
        return Send(subjects.inbox(f"te_shell.{self.config.te}"), finished, at_ns)

    # ------------------------------------------------------------ small things

    def _new_job(self, request_id: str) -> int:
        self._next_job += 1
        self._jobs[self._next_job] = request_id
        return self._next_job

    def _by_transfer(self, transfer_id: str) -> PrefillRequest | None:
        return next((r for r in self._requests.values() if r.transfer_id == transfer_id), None)

    def kv_counts(self) -> KvCounts:
        """Where this group's blocks are."""
        return kv_counts(self.pool)

    def _describe(self) -> MemberState:
        queued = sum(r.stage is Stage.QUEUED for r in self._requests.values())
        phase = "prefilling" if self._running is not None else "idle"
        return MemberState(
            self.name, "prefill_te", 0, self.config.epoch, True, phase, self.prompts,
            len(self._requests) - queued, queued, self.kv_counts(),
        )  # fmt: skip

    def validate(self) -> None:
        """Blocks and requests agree; at most one prompt runs."""
        self.pool.validate()
        running = [r for r in self._requests.values() if r.stage is Stage.RUNNING]
        assert [r.spec.request_id for r in running] == ([self._running] if self._running else [])
        for request_id, request in self._requests.items():
            owns = self.pool.get(request_id) is not None
            assert owns == (request.stage is not Stage.QUEUED), request.stage
