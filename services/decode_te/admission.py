"""From assignment to the running batch: prealloc queue, transfer queue, waiting queue (P101, P103).

A request is admitted only when the pool can hold its prompt and every token it may ever produce,
so an iteration never runs out of blocks. Until then its RECV is deferred; that is the
back-pressure.
"""

from __future__ import annotations

from libs.actor import Compute, Effect, Send, SetTimer
from libs.errors import OperatingError
from libs.kvcache.block_pool import BlockState
from libs.wire import subjects
from libs.wire.request import AssignDecode, LegFailed, RequestFinished
from libs.wire.tokens import (
    CloseStream,
    OpenStream,
    RequestTiming,
    StopMatched,
    TokenRow,
    TokensCommitted,
)
from libs.wire.transfer import (
    AbortTransfer,
    OfferReceive,
    ReceiveDone,
    TransferComplete,
    TransferFailure,
)
from libs.xccl.p2p import Failed
from services.decode_te.group import DecodeGroup
from services.decode_te.iteration import IterationLoop
from services.decode_te.jobs import ImportKv
from services.decode_te.state import DecodeRequest, Stage


class Admission:
    """Brings requests to the loop, and takes them out of it early."""

    def __init__(self, group: DecodeGroup, loop: IterationLoop) -> None:
        self.group = group
        self.loop = loop
        #: Import jobs under way: job id -> request id.
        self.imports: dict[int, str] = {}

    # ------------------------------------------------------------ coming in

    def assign(self, assign: AssignDecode, at_ns: int) -> list[Effect]:
        """A request arrives from the TE-shell."""
        group, spec = self.group, assign.spec
        if spec.request_id in group.requests:
            return []  # a resend
        request = DecodeRequest(
            spec, assign.job_executor, assign.manifest, assign.first, assign.timing,
            group.new_sequence(),
        )  # fmt: skip
        if spec.request_id in group.tombstones:
            return [
                self._abort_message(request, "not admitted", at_ns),
                self._told_shell(request, at_ns),
            ]
        refusal = self._refusal(request)
        if refusal is not None:
            code, reason = refusal
            failed = LegFailed(spec.request_id, "decode", code, reason, definite=True)
            inbox = subjects.inbox(assign.job_executor)
            # No abort: the KV stays leased, and the job executor may find it another decode TE.
            return [Send(inbox, failed, at_ns), self._told_shell(request, at_ns)]
        group.requests[spec.request_id] = request
        return [SetTimer(spec.request_id, spec.budget_ns)]

    def _refusal(self, request: DecodeRequest) -> tuple[str, str] | None:
        group = self.group
        blocks = group.pool.blocks_for(request.spec.max_total_tokens)
        manifest, rows = request.manifest, request.spec.prompt_tokens
        if manifest.rows != rows or manifest.blocks != group.pool.blocks_for(rows):
            return "bad_input", f"the manifest's KV is not that of a prompt of {rows} tokens"
        impossible = group.receiver.refusal(manifest)
        if impossible is not None:
            return "bad_input", impossible
        if blocks > group.pool.num_blocks:
            return "capacity_exceeded", f"{blocks} KV blocks needed, {group.pool.num_blocks} exist"
        if len(group.in_stage(Stage.PREALLOC)) >= group.config.queue_max:
            return "backpressure", f"{group.config.queue_max} requests wait for KV blocks"
        return None

    def _told_shell(self, request: DecodeRequest, at_ns: int) -> Send:
        """Never admitted: the shell must not count the request against this group."""
        finished = RequestFinished(request.request_id, self.group.config.name, "refused", 0)
        return Send(subjects.inbox(f"te_shell.{self.group.config.te}"), finished, at_ns)

    def admit(self, at_ns: int) -> list[Effect]:
        """Reserve blocks for as many waiting requests as fit, oldest first."""
        group = self.group
        effects: list[Effect] = []
        for request in group.in_stage(Stage.PREALLOC):
            blocks = group.pool.blocks_for(request.spec.max_total_tokens)
            manifest = request.manifest
            kv_bytes = manifest.blocks * group.config.block_bytes
            if not group.pool.can_allocate(blocks) or not group.receiver.can_expect(
                manifest, kv_bytes
            ):
                break  # first come, first served: a small request must not starve a large one
            owner = request.request_id
            allocation = group.pool.allocate(owner, blocks, BlockState.IN_TRANSFER)
            request.generation, request.block_ids = allocation.generation, allocation.blocks
            request.transfer_started_at_ns = at_ns
            request.advance(Stage.TRANSFER)
            charge_bytes = manifest.rows * group.config.profile.kv_token_bytes
            goal, posted = group.receiver.expect(owner, manifest, kv_bytes, charge_bytes, at_ns)
            offer = OfferReceive(manifest.transfer_id, owner, group.config.name, blocks, goal)
            effects += [*posted, Send(subjects.inbox(manifest.distflow), offer, at_ns)]
        return effects

    # ------------------------------------------------------------ receiving

    def settled(self) -> list[Effect]:
        """KV that has come, and receives that have failed."""
        effects: list[Effect] = []
        for request_id, ended in self.group.receiver.settle():
            request = self.group.requests.get(request_id)
            if request is None or request.stage is not Stage.TRANSFER:
                self.group.receiver.release(request_id)  # it has left; so has its KV
            elif isinstance(ended.outcome, Failed):
                self.group.receiver.release(request_id)
                reason = f"KV from {request.manifest.source_dp}: {ended.outcome.reason}"
                effects += self._abort(request, "transfer_failed", reason, ended.at_ns)
            else:
                effects.append(self._import(request, ended.at_ns))
        return effects

    def _import(self, request: DecodeRequest, at_ns: int) -> Compute:
        request.advance(Stage.IMPORTING)
        request.transfer_finished_at_ns = at_ns
        job_id = self.group.new_job()
        self.imports[job_id] = request.request_id
        data = self.group.receiver.view(request.request_id)
        job = ImportKv(request.sequence, request.block_ids, data)
        return Compute(job_id, job, 0, at_ns)

    def imported(self, job_id: int, result: int | OperatingError, at_ns: int) -> list[Effect]:
        """The blocks are written (or did not match): tell DistFlow."""
        request_id = self.imports.pop(job_id)
        self.group.receiver.release(request_id)
        request = self.group.requests.get(request_id)
        if request is None:
            return []  # it was cancelled meanwhile
        if isinstance(result, OperatingError):
            return self._abort(request, result.code, result.message, at_ns)
        request.written = True
        request.kv_bytes = result
        self.group.pool.move(request.request_id, BlockState.HELD)
        done = ReceiveDone(request.manifest.transfer_id, request.request_id, self.group.config.name)
        return [Send(subjects.inbox(request.manifest.distflow), done, at_ns)]

    def completed(self, complete: TransferComplete, at_ns: int) -> list[Effect]:
        """DistFlow confirms: the KV is ours, the request may run."""
        request = self._by_transfer(complete.transfer_id)
        if request is None or request.stage is not Stage.IMPORTING or not request.written:
            return []
        request.advance(Stage.WAITING)
        request.ready_at_ns = at_ns
        request.output.append(request.first.token)
        spec, first = request.spec, request.first
        opened = OpenStream(
            spec.request_id,
            self.group.config.name,
            spec.gateway,
            spec.output,
            self._timing_of(request),
            spec.budget_ns,
        )
        row = TokenRow(
            spec.request_id, 0, first.token, request.timing.finished_at_ns, None, first.logprob,
            first.top,
        )  # fmt: skip
        committed = TokensCommitted(self.group.config.name, self.loop.iterations, (row,))
        return [
            Send(self.group.output, opened, at_ns),
            Send(self.group.output, committed, at_ns),
        ]

    def _timing_of(self, request: DecodeRequest) -> RequestTiming:
        config = self.group.config
        return RequestTiming(
            request.timing, config.te, config.name, config.placement.dies, request.kv_bytes,
            request.transfer_started_at_ns, request.transfer_finished_at_ns,
        )  # fmt: skip

    # ------------------------------------------------------------ going early

    def transfer_failed(self, failure: TransferFailure, at_ns: int) -> list[Effect]:
        """DistFlow says no: never decode from what may have arrived."""
        request = self._by_transfer(failure.transfer_id)
        if request is None or request.stage in (Stage.WAITING, Stage.RUNNING):
            return []
        return self.group.fail(request, "transfer_failed", failure.reason, at_ns)

    def cancel(self, request_id: str, reason: str, at_ns: int) -> list[Effect]:
        """Stop the request: at once, or at the end of the iteration that reads its KV."""
        request = self.group.requests.get(request_id)
        if request is None:
            self.group.tombstones.add(request_id)
            return []
        effects: list[Effect] = [Send(self.group.output, CloseStream(request_id), at_ns)]
        if self.loop.reads(request):
            request.leaving = reason
            return effects
        if request.stage in (Stage.PREALLOC, Stage.TRANSFER, Stage.IMPORTING):
            effects.append(self._abort_message(request, reason, at_ns))
        return [*effects, *self.group.leave(request, reason, at_ns)]

    def stop(self, stop: StopMatched, at_ns: int) -> list[Effect]:
        """A stop string ended the text at `index`: what was generated beyond it does not count."""
        request = self.group.requests.get(stop.request_id)
        if request is None or not 0 <= stop.index < len(request.output):
            return []  # a token that this group has not committed
        del request.output[stop.index + 1 :]
        if self.loop.reads(request):
            request.leaving = "stop"
            return []
        return self.group.leave(request, "stop", at_ns)

    def expire(self, request_id: str, at_ns: int) -> list[Effect]:
        """The request's time budget is used up."""
        request = self.group.requests.get(request_id)
        if request is None:
            return []
        reason = f"not finished within its budget (stage {request.stage.value})"
        failed = LegFailed(request_id, "decode", "deadline_exceeded", reason, definite=False)
        inbox = subjects.inbox(request.job_executor)
        return [Send(inbox, failed, at_ns), *self.cancel(request_id, "deadline", at_ns)]

    def _abort(self, request: DecodeRequest, code: str, reason: str, at_ns: int) -> list[Effect]:
        return [
            self._abort_message(request, reason, at_ns),
            *self.group.fail(request, code, reason, at_ns),
        ]

    def _abort_message(self, request: DecodeRequest, reason: str, at_ns: int) -> Send:
        manifest = request.manifest
        abort = AbortTransfer(manifest.transfer_id, request.request_id, "decode", reason)
        return Send(subjects.inbox(manifest.distflow), abort, at_ns)

    def _by_transfer(self, transfer_id: str) -> DecodeRequest | None:
        for request in self.group.requests.values():
            if request.manifest.transfer_id == transfer_id:
                return request
        return None
