"""The gateway's decisions: admission, deadlines, the order of each stream, cancellation.

A stream's token index is the commit point in the client's view. Prefill's output process delivers
index 0 and so does decode's; a migrated request is delivered again from its committed index. The
gateway passes each index on once, in order: what it has seen is dropped, what comes early is held
until the gap closes.

    ClientSubmit -> Submit to any JE -> Accepted -> chunks 0, 1, 2, ... -> finish
    ClientGone   -> Cancel to that JE

Every open request is bounded by its deadline, and by the number of early chunks it may hold.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from libs import units
from libs.actor import (
    CancelTimer,
    Effect,
    Event,
    Present,
    Received,
    Record,
    Send,
    SetTimer,
    Started,
    TimerFired,
    Unreachable,
)
from libs.health.presence import Presence
from libs.wire import subjects
from libs.wire.control import ClusterView, MemberState
from libs.wire.fabric import LinkReport
from libs.wire.request import Accepted, Cancel, RequestFailed, RequestSpec, Submit
from libs.wire.tokens import Chunk, StreamChunks
from services.gateway.links import TIMER as LINKS_TIMER
from services.gateway.links import LinkBook

#: Chunks that may wait for a gap to close, per request.
EARLY_MAX = 64
#: Submissions tried before the request is given up, and how long each waits for its `Accepted`.
SUBMIT_TRIES = 3
ACCEPT_DEADLINE_NS = units.s(5)


@dataclass(frozen=True, slots=True, eq=False)
class ClientSubmit:
    """A client's request, validated and tokenised by the HTTP edge."""

    spec: RequestSpec


@dataclass(frozen=True, slots=True)
class ClientGone:
    """The client closed its connection, streaming or not."""

    request_id: str


@dataclass(frozen=True, slots=True)
class Failure:
    """What a client is told when its request ends without an answer."""

    request_id: str
    code: str
    reason: str
    definite: bool
    stage: str


@dataclass(slots=True)
class OpenRequest:
    """One request of one client."""

    spec: RequestSpec
    tries: int = 1
    job_executor: str = ""
    next_index: int = 0
    early: dict[int, Chunk] = field(default_factory=dict)
    gone: bool = False
    shown_at_ns: int = 0
    first_at_ns: int = 0


@dataclass(frozen=True, slots=True)
class GatewayConfig:
    """Identity and bounds."""

    name: str
    requests_max: int


class GatewayCore:
    """Streams of clients."""

    def __init__(self, config: GatewayConfig) -> None:
        self.name = config.name
        self.config = config
        self.view = ClusterView(0, 0, False, (), ())
        #: Whether every planned member has been alive at once since this gateway started.
        self.was_ready = False
        self.duplicates = 0
        #: What the fabric carries, for operators; no decision depends on it.
        self.links = LinkBook()
        self._open: dict[str, OpenRequest] = {}
        self._presence = Presence(config.name, "", self._describe)

    @property
    def open_requests(self) -> int:
        """Requests that have not ended."""
        return len(self._open)

    def can_admit(self, choices: int) -> bool:
        """Whether `choices` more requests fit."""
        return len(self._open) + choices <= self.config.requests_max

    def handle(self, event: Event, now_ns: int) -> list[Effect]:
        """One event."""
        handled = self._presence.handle(event)
        if handled is not None:
            return handled
        match event:
            case Received(message=ClientSubmit(spec=spec), at_ns=at_ns):
                return self._submit(spec, at_ns)
            case Received(message=ClientGone(request_id=request_id), at_ns=at_ns):
                return self._gone(request_id, at_ns)
            case Received(message=Accepted() as accepted, at_ns=at_ns):
                return self._accepted(accepted, at_ns)
            case Received(message=StreamChunks(chunks=chunks)):
                return [effect for chunk in chunks for effect in self._chunk(chunk)]
            case Received(message=RequestFailed() as failed, sender=sender, at_ns=at_ns):
                return self._told_failed(failed, sender, at_ns)
            case Received(message=ClusterView() as view):
                return self._learn(view)
            case Received(message=LinkReport() as report, sender=sender, incarnation=life):
                return self.links.take(sender, life, report)
            case Unreachable(message=Submit(spec=spec), at_ns=at_ns):
                return self._resubmit(spec.request_id, "no job executor listens", at_ns)
            case TimerFired(name=name, at_ns=at_ns):
                return self._expire(name, at_ns)
            case Received(message=message):
                return [Record("unexpected_message", {"kind": type(message).__name__})]
            case Started() | Unreachable():
                return []
            case _:
                raise AssertionError(f"unexpected {event!r}")

    def _learn(self, view: ClusterView) -> list[Effect]:
        self.view = view
        if not view.ready or self.was_ready:
            return []
        self.was_ready = True
        return [Record("requests_admitted")]

    # ------------------------------------------------------------ submit

    def _submit(self, spec: RequestSpec, at_ns: int) -> list[Effect]:
        request_id = spec.request_id
        assert request_id not in self._open, "request ids are made here and never repeat"
        if not self.can_admit(1):
            reason = f"{self.config.requests_max} requests are open"
            failure = Failure(request_id, "backpressure", reason, True, "gateway")
            return [Present(request_id, failure, at_ns)]
        self._open[request_id] = OpenRequest(spec)
        return [
            Send(subjects.SUBMIT, Submit(spec), at_ns, probe=True),
            SetTimer(f"accept:{request_id}", ACCEPT_DEADLINE_NS),
            SetTimer(f"budget:{request_id}", spec.budget_ns),
        ]

    def _resubmit(self, request_id: str, why: str, at_ns: int) -> list[Effect]:
        request = self._open.get(request_id)
        if request is None or request.job_executor:
            return []
        if request.tries >= SUBMIT_TRIES:
            failed = RequestFailed(request_id, "peer_lost", why, False, "dispatch")
            return self._failed(failed, at_ns)
        request.tries += 1
        return [
            Send(subjects.SUBMIT, Submit(request.spec), at_ns, probe=True),
            SetTimer(f"accept:{request_id}", ACCEPT_DEADLINE_NS),
        ]

    def _accepted(self, accepted: Accepted, at_ns: int) -> list[Effect]:
        request = self._open.get(accepted.request_id)
        if request is None:
            cancel = Cancel(accepted.request_id, "superseded")
            return [Send(subjects.inbox(accepted.job_executor), cancel, at_ns)]
        if request.job_executor and request.job_executor != accepted.job_executor:
            # A submission was repeated and both arrived. The legs know the request by its id and
            # run it once, so the second JE may go on: cancelling there would end the shared legs.
            return [Record("accepted_twice", {"request_id": accepted.request_id})]
        request.job_executor = accepted.job_executor
        return [CancelTimer(f"accept:{accepted.request_id}")]

    # ------------------------------------------------------------ stream

    def _chunk(self, chunk: Chunk) -> list[Effect]:
        request = self._open.get(chunk.request_id)
        if request is None:
            return []
        if chunk.index < request.next_index or chunk.index in request.early:
            self.duplicates += 1
            return []
        # The chunk that closes the gap is always taken: it makes room instead of using it.
        if chunk.index > request.next_index and len(request.early) >= EARLY_MAX:
            lost = "tokens were lost"
            failed = RequestFailed(chunk.request_id, "peer_lost", lost, False, "stream")
            cancel = self._cancel(request, lost, chunk.at_ns)
            return [*cancel, *self._failed(failed, chunk.at_ns)]
        request.early[chunk.index] = chunk
        effects: list[Effect] = []
        while request.next_index in request.early:
            effects += self._show(request, request.early.pop(request.next_index))
        return effects

    def _show(self, request: OpenRequest, chunk: Chunk) -> list[Effect]:
        request.next_index = chunk.index + 1
        # A client never sees time run backwards, whatever the stamps of two DP groups say.
        at_ns = max(chunk.at_ns, request.shown_at_ns)
        gap_ns = at_ns - request.shown_at_ns
        request.shown_at_ns = at_ns
        effects: list[Effect] = [Present(chunk.request_id, chunk, at_ns)]
        if chunk.index == 0:
            request.first_at_ns = at_ns
            ttft_ns = at_ns - request.spec.submitted_at_ns
            effects.append(Record("first_token", {"ttft_ns": ttft_ns}))
        else:
            effects.append(Record("token", {"gap_ns": gap_ns}))
        if chunk.finish_reason is not None:
            effects += self._close(request, "ok", chunk.finish_reason, at_ns)
        return effects

    # ------------------------------------------------------------ ends

    def _told_failed(self, failed: RequestFailed, sender: str, at_ns: int) -> list[Effect]:
        request = self._open.get(failed.request_id)
        if request is None:
            return []
        # A job executor ends the legs itself; of anybody else's failure it has to hear.
        told = sender == request.job_executor
        cancel = [] if told else self._cancel(request, failed.reason, at_ns)
        return [*cancel, *self._failed(failed, at_ns)]

    def _failed(self, failed: RequestFailed, at_ns: int) -> list[Effect]:
        request = self._open.get(failed.request_id)
        if request is None:
            return []
        at_ns = max(at_ns, request.shown_at_ns)
        # Once a token is out, something has happened, whatever the failing leg knew.
        definite = failed.definite and request.next_index == 0
        failure = Failure(failed.request_id, failed.code, failed.reason, definite, failed.stage)
        return [
            Present(failed.request_id, failure, at_ns),
            *self._close(request, "failed", failed.code, at_ns),
        ]

    def _gone(self, request_id: str, at_ns: int) -> list[Effect]:
        request = self._open.get(request_id)
        if request is None:
            return []
        closing = self._close(request, "cancelled", "client_gone", at_ns)
        return [*self._cancel(request, "client gone", at_ns), *closing]

    def _cancel(self, request: OpenRequest, reason: str, at_ns: int) -> list[Effect]:
        if not request.job_executor:
            return []  # the coming `Accepted` will be answered with a cancellation
        cancel = Cancel(request.spec.request_id, reason)
        return [Send(subjects.inbox(request.job_executor), cancel, at_ns)]

    def _expire(self, timer: str, at_ns: int) -> list[Effect]:
        kind, request_id = timer.split(":", 1)
        if kind == LINKS_TIMER:
            self.links.silent(request_id)
            return []
        request = self._open.get(request_id)
        if request is None:
            return []
        if kind == "accept":
            return self._resubmit(request_id, "no job executor answered", at_ns)
        reason = "the request did not finish within its time limit"
        failed = RequestFailed(request_id, "deadline_exceeded", reason, False, "gateway")
        return [*self._cancel(request, "deadline", at_ns), *self._failed(failed, at_ns)]

    def _close(self, request: OpenRequest, outcome: str, reason: str, at_ns: int) -> list[Effect]:
        spec = request.spec
        del self._open[spec.request_id]
        fields = {
            "request_id": spec.request_id,
            "outcome": outcome,
            "finish_reason": reason,
            "prompt_tokens": spec.prompt_tokens,
            "output_tokens": request.next_index,
            "duration_ns": at_ns - spec.submitted_at_ns,
        }
        return [
            CancelTimer(f"accept:{spec.request_id}"),
            CancelTimer(f"budget:{spec.request_id}"),
            Record("request_ended", fields),
        ]

    def _describe(self) -> MemberState:
        return MemberState(self.name, "gateway", 0, 1, True, "serving", 0, len(self._open), 0)

    def validate(self) -> None:
        """Streams hold only what lies ahead of them."""
        assert len(self._open) <= self.config.requests_max
        for request in self._open.values():
            assert all(index > request.next_index for index in request.early)
            assert len(request.early) <= EARLY_MAX
