"""What the two halves of a prefill DP group share: settings, blocks, requests, and leaving."""

from __future__ import annotations

from libs.actor import CancelTimer, Effect, Send
from libs.kvcache.prefix_cache import PrefixCache
from libs.scheduling.tombstones import Tombstones
from libs.wire import subjects
from libs.wire.request import LegFailed, RequestFinished
from libs.wire.transfer import AbortTransfer
from services.prefill_te.kv_sender import KvSender
from services.prefill_te.state import PrefillConfig, PrefillRequest, Stage


class PrefillGroup:
    """Requests with their blocks, and the KV that is on its way out."""

    def __init__(self, config: PrefillConfig) -> None:
        self.config = config
        self.cache = PrefixCache(
            config.num_blocks,
            config.block_size,
            enabled=config.prefix_cache,
            host_blocks=config.host_blocks,
        )
        self.pool = self.cache.pool
        self.sender = KvSender(config.die, config.life, config.num_blocks * config.block_bytes)
        #: Every request here, in order of arrival.
        self.requests: dict[str, PrefillRequest] = {}
        self.tombstones = Tombstones()
        #: Jobs under way: job id -> request id.
        self.jobs: dict[int, str] = {}
        self._next_job = 0

    def new_job(self, request_id: str) -> int:
        """A job number never used before in this life of the group."""
        self._next_job += 1
        self.jobs[self._next_job] = request_id
        return self._next_job

    def by_transfer(self, transfer_id: str) -> PrefillRequest | None:
        """The request whose KV is called so, if it is here."""
        return next((r for r in self.requests.values() if r.transfer_id == transfer_id), None)

    # ------------------------------------------------------------ leaving

    def abort(self, request: PrefillRequest, reason: str, at_ns: int) -> list[Effect]:
        """Tell DistFlow, if it knows the transfer, that nothing will come."""
        if not request.distflow:
            return []
        abort = AbortTransfer(request.transfer_id, request.spec.request_id, "prefill", reason)
        return [Send(subjects.inbox(request.distflow), abort, at_ns)]

    def fail(self, request: PrefillRequest, code: str, reason: str, at_ns: int) -> list[Effect]:
        """The request cannot go on here."""
        request_id = request.spec.request_id
        definite = request.stage is Stage.QUEUED
        failed = LegFailed(request_id, "prefill", code, reason, definite)
        told = Send(subjects.inbox(request.job_executor), failed, at_ns)
        return [told, *self.leave(request, "failed", at_ns)]

    def leave(self, request: PrefillRequest, reason: str, at_ns: int) -> list[Effect]:
        """The request is over here: stop its KV, let go of its blocks, tell the TE-shell."""
        dropped = self.sender.drop(request.spec.request_id, reason, at_ns)
        return [*dropped, *self.forget(request, reason, at_ns)]

    def forget(self, request: PrefillRequest, reason: str, at_ns: int) -> list[Effect]:
        """Leave, and let a message go on to its end: it is sent from a copy of the blocks."""
        request_id = request.spec.request_id
        del self.requests[request_id]
        self.tombstones.add(request_id)
        self.cache.release(request_id)
        return [CancelTimer(request_id), self.told_shell(request_id, reason, at_ns)]

    def told_shell(self, request_id: str, reason: str, at_ns: int) -> Send:
        """What the TE-shell counts by."""
        finished = RequestFinished(request_id, self.config.name, reason, 0)
        return Send(subjects.inbox(f"te_shell.{self.config.te}"), finished, at_ns)

    def validate(self) -> None:
        """Blocks, memory and requests agree."""
        self.cache.validate()
        self.sender.validate()
        for request_id, request in self.requests.items():
            owns = self.pool.get(request_id) is not None
            assert owns == (request.stage is not Stage.QUEUED), request.stage
