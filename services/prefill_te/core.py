"""The master of a prefill DP group: queue, prefill, stream the first token, lease the KV.

Rows that an earlier prompt of the same salt has left in the prefix cache are not computed again
(`libs.kvcache.prefix_cache`); a request holds references to them like to blocks of its own.

The KV stays owned here, under a lease, until DistFlow reports that the decode side has it (P098,
P103); a lease that runs out ends the request, it is never read afterwards. The table of stages is
in `services.prefill_te.state`.
"""

from __future__ import annotations

from libs import units
from libs.actor import (
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
from libs.kvcache.block_pool import BlockState
from libs.model.sampling import Sampled
from libs.scheduling.finish import finish_reason
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
)
from libs.wire.tokens import StopMatched
from libs.wire.transfer import PullKv, TransferComplete, TransferFailure
from services.prefill_te.group import PrefillGroup
from services.prefill_te.jobs import ExportedKv, PrefillJob
from services.prefill_te.state import (
    PrefillConfig,
    PrefillRequest,
    Stage,
    first_token_effects,
    manifest_of,
)
from services.prefill_te.transfers import PrefillTransfers

__all__ = ["LEASE_NS", "PrefillConfig", "PrefillCore"]

#: How long finished KV waits for the decode side before it is given up.
LEASE_NS = units.s(120)


class PrefillCore:
    """One prefill DP group; one prompt is computed at a time."""

    def __init__(self, config: PrefillConfig) -> None:
        self.name = config.name
        self.group = PrefillGroup(config)
        self.transfers = PrefillTransfers(self.group)
        self.prompts = 0
        self._running: str | None = None
        self._next_sequence = 0
        self._free_at_ns = 0
        self._presence = Presence(config.name, config.te, self._describe)

    def handle(self, event: Event, now_ns: int) -> list[Effect]:
        """One event, then the next prompt if the group is free."""
        handled = self._presence.handle(event)
        if handled is not None:
            return handled
        effects = self.group.sender.take(event)
        if effects is None:
            effects = self._step(event)
        effects += self.transfers.settled()
        effects += self.transfers.export(event.at_ns)
        return [*effects, *self._start_next()]

    def _step(self, event: Event) -> list[Effect]:
        match event:
            case Received(message=AssignPrefill() as assign, at_ns=at_ns):
                return self._assign(assign, at_ns)
            case Received(message=BindTransfer() as bind, at_ns=at_ns):
                return self.transfers.bind(bind, at_ns)
            case Received(message=PullKv() as pull, at_ns=at_ns):
                return self.transfers.pull(pull, at_ns)
            case Received(message=TransferComplete(request_id=request_id), at_ns=at_ns):
                return self.transfers.transferred(request_id, at_ns)
            case Received(message=TransferFailure() as failure, sender=sender, at_ns=at_ns):
                return self.transfers.failed(failure, sender, at_ns)
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
        if spec.request_id in self.group.requests:
            return []
        if spec.request_id in self.group.tombstones:
            return [self.group.told_shell(spec.request_id, "cancelled", at_ns)]
        blocks = self.group.pool.blocks_for(spec.prompt_tokens)
        queued = sum(r.stage is Stage.QUEUED for r in self.group.requests.values())
        if blocks > self.group.pool.num_blocks:
            reason = f"{blocks} KV blocks needed, {self.group.pool.num_blocks} exist"
            return self._refuse(assign, "capacity_exceeded", reason, at_ns)
        if queued >= self.group.config.queue_max:
            reason = f"{queued} prompts are queued at {self.name}"
            return self._refuse(assign, "backpressure", reason, at_ns)
        self._next_sequence += 1
        self.group.requests[spec.request_id] = PrefillRequest(
            spec, assign.job_executor, self._next_sequence, at_ns
        )
        return [SetTimer(spec.request_id, spec.budget_ns)]

    def _refuse(self, assign: AssignPrefill, code: str, reason: str, at_ns: int) -> list[Effect]:
        request_id = assign.spec.request_id
        failed = LegFailed(request_id, "prefill", code, reason, definite=True)
        return [
            Send(subjects.inbox(assign.job_executor), failed, at_ns),
            self.group.told_shell(request_id, "refused", at_ns),
        ]

    def _start_next(self) -> list[Effect]:
        if self._running is not None:
            return []
        queued = (r for r in self.group.requests.values() if r.stage is Stage.QUEUED)
        request = next(queued, None)
        if request is None:
            return []
        spec = request.spec
        placed = self.group.cache.place(spec.request_id, spec.cache_salt, spec.prompt_ids)
        if placed is None:
            return []  # first come, first served; a completion frees blocks
        request.block_ids = placed.blocks
        request.cached_tokens = placed.cached * self.group.pool.block_size
        request.stage = Stage.RUNNING
        request.started_at_ns = max(self._free_at_ns, request.ready_at_ns)
        self._running = spec.request_id
        job = PrefillJob(
            request.sequence, placed.blocks, spec.prompt_ids, spec.sampling, spec.choice,
            request.cached_tokens, placed.spills, placed.fills,
        )  # fmt: skip
        cost_ns = self._cost_ns(job)
        job_id = self.group.new_job(spec.request_id)
        return [Compute(job_id, job, cost_ns, request.started_at_ns, paced=True)]

    def _cost_ns(self, job: PrefillJob) -> int:
        """The tokens that are computed, with what they attend to, and the copies before them."""
        profile, size = self.group.config.profile, self.group.pool.block_size
        computed = int(job.prompt_ids.shape[0]) - job.cached_rows
        copied = (len(job.spills) + len(job.fills)) * size
        host_ns = profiles.host_copy_ns(profile, copied)
        return host_ns + profiles.prefill_ns(profile, computed, job.cached_rows)

    # ------------------------------------------------------------ computed

    def _computed(self, job_id: int, result: object, at_ns: int) -> list[Effect]:
        request_id = self.group.jobs.pop(job_id)
        request = self.group.requests.get(request_id)
        match result:
            case Sampled():
                assert request is not None, "a running request never leaves before its end"
                self._running = None
                self._free_at_ns = at_ns
                self.prompts += 1
                # Whatever becomes of the request, its rows are right and may serve the next one.
                self.group.cache.computed(request_id)
                return self._prefilled(request, result, at_ns)
            case ExportedKv():
                return self.transfers.exported(request_id, result, at_ns)
            case OperatingError():
                assert request is not None
                assert request_id == self._running, "copying KV out cannot fail"
                self._running = None
                self._free_at_ns = at_ns
                self.group.cache.abandon(request_id)
                return self.group.fail(request, result.code, result.message, at_ns)
            case _:
                raise AssertionError(f"unexpected result {result!r}")

    def _prefilled(self, request: PrefillRequest, result: Sampled, at_ns: int) -> list[Effect]:
        if request.leaving == "deadline":
            late = "deadline passed in prefill"
            return self.group.fail(request, "deadline_exceeded", late, at_ns)
        if request.leaving is not None:
            return self.group.leave(request, request.leaving, at_ns)
        spec = request.spec
        reason = finish_reason(spec.sampling, result.token, 1, spec.max_tokens)
        first = FirstToken(result.token, result.logprob, result.top)
        timing = PrefillTiming(
            self.group.config.te, self.name, request.started_at_ns, at_ns, request.cached_tokens
        )
        effects = first_token_effects(self.group.config, request, first, timing, reason)
        done = PrefillDone(
            spec.request_id, manifest_of(self.group.config, request), first, timing, reason
        )
        effects.append(Send(subjects.inbox(request.job_executor), done, at_ns))
        fields = {
            "request_id": spec.request_id,
            "prompt_tokens": spec.prompt_tokens,
            "cached_tokens": request.cached_tokens,
        }
        effects.append(Record("prompt_prefilled", fields))
        if reason is not None:
            return [*effects, *self.group.leave(request, reason, at_ns)]
        request.stage = Stage.LEASED
        self.group.pool.move(spec.request_id, BlockState.LEASED)
        return [*effects, SetTimer(spec.request_id, LEASE_NS)]

    # ------------------------------------------------------------ leaving

    def _cancel(self, request_id: str, at_ns: int) -> list[Effect]:
        request = self.group.requests.get(request_id)
        if request is None:
            self.group.tombstones.add(request_id)
            return []
        if request.stage is Stage.RUNNING:
            request.leaving = "cancelled"
            return []
        return [
            *self.group.abort(request, "cancelled", at_ns),
            *self.group.leave(request, "cancelled", at_ns),
        ]

    def _expire(self, request_id: str, at_ns: int) -> list[Effect]:
        request = self.group.requests.get(request_id)
        if request is None:
            return []
        if request.stage is Stage.RUNNING:
            request.leaving = "deadline"
            return []
        reason = f"deadline passed in stage {request.stage.value}"
        aborted = self.group.abort(request, reason, at_ns)
        return [*aborted, *self.group.fail(request, "deadline_exceeded", reason, at_ns)]

    # ------------------------------------------------------------ what it says of itself

    def kv_counts(self) -> KvCounts:
        """Where this group's blocks are."""
        return kv_counts(self.group.pool)

    def _describe(self) -> MemberState:
        queued = sum(r.stage is Stage.QUEUED for r in self.group.requests.values())
        phase = "prefilling" if self._running is not None else "idle"
        return MemberState(
            self.name, "prefill_te", 0, self.group.config.epoch, True, phase, self.prompts,
            len(self.group.requests) - queued, queued, self.kv_counts(),
        )  # fmt: skip

    def validate(self) -> None:
        """Blocks and requests agree; at most one prompt runs."""
        self.group.validate()
        running = [r for r in self.group.requests.values() if r.stage is Stage.RUNNING]
        assert [r.spec.request_id for r in running] == ([self._running] if self._running else [])
