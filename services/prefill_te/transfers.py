"""From the leased KV to its end: bind, register, pull, export, send (P098-P103).

The blocks stay leased until DistFlow reports that the decode side has the KV; whatever else ends a
transfer is told to DistFlow and the job executor.
"""

from __future__ import annotations

from libs.actor import Compute, Effect, Send
from libs.errors import OperatingError
from libs.kvcache.block_pool import BlockState
from libs.wire import subjects
from libs.wire.request import BindTransfer
from libs.wire.transfer import AbortTransfer, PullKv, TransferFailure
from libs.xccl.p2p import Failed
from services.prefill_te.group import PrefillGroup
from services.prefill_te.jobs import ExportedKv, ExportKv
from services.prefill_te.state import PrefillRequest, Stage, register_of


class PrefillTransfers:
    """The outgoing half of a prefill DP group."""

    def __init__(self, group: PrefillGroup) -> None:
        self.group = group

    def bind(self, bind: BindTransfer, at_ns: int) -> list[Effect]:
        """The job executor has chosen a decode TE: register with the DistFlow of the pair."""
        group, request = self.group, self.group.requests.get(bind.request_id)
        distflow = subjects.inbox(bind.distflow)
        if request is None or request.stage is not Stage.LEASED:
            reason = "the KV is not here any more"
            abort = AbortTransfer(bind.transfer_id, bind.request_id, "prefill", reason)
            return [Send(distflow, abort, at_ns)]
        # Another decode TE is to take the KV: the first pairing must not wait for its deadline.
        moved = request.distflow not in ("", bind.distflow)
        given_up = group.abort(request, "bound elsewhere", at_ns) if moved else []
        request.distflow = bind.distflow
        return [*given_up, Send(distflow, register_of(group.config, request), at_ns)]

    def pull(self, pull: PullKv, at_ns: int) -> list[Effect]:
        """Both sides are there: the KV may leave as soon as there is room for its copy."""
        group, request = self.group, self.group.by_transfer(pull.transfer_id)
        if request is None or request.stage is not Stage.LEASED:
            return []
        here = len(request.block_ids) * group.config.block_bytes
        if pull.goal.nbytes != here:
            reason = f"{pull.target_dp} takes {pull.goal.nbytes} bytes of KV, {here} are here"
            return self._unsent(request, reason, at_ns)
        request.stage = Stage.SENDING
        group.pool.move(request.spec.request_id, BlockState.IN_TRANSFER)
        group.sender.ask(request.spec.request_id, pull)
        return []

    def export(self, at_ns: int) -> list[Effect]:
        """Export what there is room for; reading KV is the DMA engine's work, not the die's."""
        effects: list[Effect] = []
        while (request_id := self.group.sender.next_export()) is not None:
            job = ExportKv(self.group.requests[request_id].block_ids)
            effects.append(Compute(self.group.new_job(request_id), job, 0, at_ns))
        return effects

    def exported(self, request_id: str, exported: ExportedKv, at_ns: int) -> list[Effect]:
        """The copy is made: send it."""
        request = self.group.requests.get(request_id)
        tokens = 0 if request is None else request.spec.prompt_tokens
        charge_bytes = tokens * self.group.config.profile.kv_token_bytes
        try:
            return self.group.sender.send(request_id, exported.data, charge_bytes, at_ns)
        except OperatingError as error:
            assert request is not None, "nothing is sent for a request that has left"
            return self._unsent(request, error.message, at_ns)

    def settled(self) -> list[Effect]:
        """Messages that are over: one that failed ends its transfer."""
        effects: list[Effect] = []
        for request_id, ended in self.group.sender.settle():
            request = self.group.requests.get(request_id)
            if request is not None and isinstance(ended.outcome, Failed):
                effects += self._unsent(request, ended.outcome.reason, ended.at_ns)
        return effects

    def transferred(self, request_id: str, at_ns: int) -> list[Effect]:
        """The decode side has it: the lease is over, though the last ACK may be on its way."""
        request = self.group.requests.get(request_id)
        return [] if request is None else self.group.forget(request, "transferred", at_ns)

    def failed(self, failure: TransferFailure, sender: str, at_ns: int) -> list[Effect]:
        """DistFlow says no, unless it speaks of a pairing given up for another decode TE."""
        request = self.group.requests.get(failure.request_id)
        if request is None or sender != request.distflow:
            return []
        return self.group.fail(request, "transfer_failed", failure.reason, at_ns)

    def _unsent(self, request: PrefillRequest, reason: str, at_ns: int) -> list[Effect]:
        return [
            *self.group.abort(request, reason, at_ns),
            *self.group.fail(request, "transfer_failed", reason, at_ns),
        ]
