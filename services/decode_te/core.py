"""The master of a decode DP group: admission, KV reception, the iteration loop, commit (P101-P103).

It composes two halves that share one state:
- `Admission` takes a request from its assignment to the running batch (prealloc queue, transfer
queue,
  waiting queue);
- `IterationLoop` feeds the running batch, exchanges rows with the expert dies layer by layer, and
  commits the sampled tokens.

A token leaves this group only after its iteration is committed: emission is part of the commit,
so a failed iteration can be repeated without ever retracting a token.
"""

from __future__ import annotations

from libs.actor import ComputeDone, Effect, Event, Received, Record, TimerFired
from libs.health.kv_report import kv_counts
from libs.health.presence import Presence
from libs.wire.control import KvCounts, MemberState
from libs.wire.expert import E2A, A2ERefused
from libs.wire.request import AssignDecode, Cancel
from libs.wire.tokens import StopMatched
from libs.wire.transfer import TransferComplete, TransferFailure
from services.decode_te.admission import Admission
from services.decode_te.group import DecodeConfig, DecodeGroup
from services.decode_te.iteration import ITERATION_TIMER, IterationLoop
from services.decode_te.state import Stage

__all__ = ["DecodeConfig", "DecodeCore"]


class DecodeCore:
    """One decode DP group."""

    def __init__(self, config: DecodeConfig) -> None:
        self.name = config.name
        self.group = DecodeGroup(config)
        self.loop = IterationLoop(self.group)
        self.admission = Admission(self.group, self.loop)
        self._presence = Presence(config.name, config.te, self._describe)

    def handle(self, event: Event, now_ns: int) -> list[Effect]:
        """One event; the loop is started whenever there is something to run."""
        handled = self._presence.handle(event)
        if handled is not None:
            return handled
        if isinstance(event, Received) and isinstance(event.message, E2A):
            return self.loop.answered(event.message, event.at_ns)
        effects = self.group.receiver.take(event)
        if effects is None:
            effects = self._step(event)
        effects += self.admission.settled()
        # Whatever happened may have freed blocks or made a request ready.
        effects += self.admission.admit(event.at_ns)
        effects += self.loop.start()
        return effects

    def _step(self, event: Event) -> list[Effect]:
        match event:
            case Received(message=AssignDecode() as assign, at_ns=at_ns):
                return self.admission.assign(assign, at_ns)
            case Received(message=TransferComplete() as complete, at_ns=at_ns):
                return self.admission.completed(complete, at_ns)
            case Received(message=TransferFailure() as failure, at_ns=at_ns):
                return self.admission.transfer_failed(failure, at_ns)
            case Received(message=Cancel() as cancel, at_ns=at_ns):
                return self.admission.cancel(cancel.request_id, "cancelled", at_ns)
            case Received(message=StopMatched() as stop, at_ns=at_ns):
                return self.admission.stop(stop, at_ns)
            case Received(message=A2ERefused() as refusal, at_ns=at_ns):
                return self.loop.refused(refusal, at_ns)
            case Received(message=message):
                return [Record("unexpected_message", {"kind": type(message).__name__})]
            case ComputeDone(job_id=job_id, result=result, at_ns=at_ns):
                if job_id in self.admission.imports:
                    return self.admission.imported(job_id, result, at_ns)
                return self.loop.computed(job_id, result, at_ns)
            case TimerFired(name=name, at_ns=at_ns):
                if name == ITERATION_TIMER:
                    return self.loop.overdue(at_ns)
                return self.admission.expire(name, at_ns)
            case _:
                raise AssertionError(f"unexpected {event!r}")

    def _describe(self) -> MemberState:
        group = self.group
        running = len(group.in_stage(Stage.RUNNING))
        return MemberState(
            self.name, "decode_te", 0, group.config.epoch, True, self.loop.phase.value,
            self.loop.iterations, running, len(group.requests) - running, kv_counts(group.pool),
        )  # fmt: skip

    def kv_counts(self) -> KvCounts:
        """Where this group's blocks are."""
        return kv_counts(self.group.pool)

    def validate(self) -> None:
        """Every invariant of the group."""
        self.group.validate()
        self.loop.validate()
