"""DistFlow: one isolated instance per (prefill TE, decode TE) pair (P102).

KV blocks carry no meaning of their own; this core makes sure that the right prefill DP sends to
the right decode DP, once, and that both learn how it ended.

    state \\ event | register      offer         receive_done   abort / deadline
    --------------+-------------------------------------------------------------
    (unknown)     | REGISTERED    OFFERED       -              (tombstone)
    REGISTERED    | same          PULLING       -              failed
    OFFERED       | PULLING       same          -              failed
    PULLING       | same          same          complete       failed

`complete` and `failed` are told to both sides and forgotten; a transfer has one outcome, so
whatever is repeated after `complete` is ignored, and whoever speaks (again) after `failed` is told
so. The prefill DP owns the KV until it hears `complete`; a decode DP never decodes after `failed`.
Either side's silence ends in `failed` by deadline.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from libs import units
from libs.actor import CancelTimer, Effect, Event, Received, Record, Send, SetTimer, TimerFired
from libs.health.presence import Presence, describe_simple
from libs.scheduling.tombstones import Tombstones
from libs.wire import subjects
from libs.wire.control import MemberState
from libs.wire.transfer import (
    AbortTransfer,
    OfferReceive,
    PullKv,
    ReceiveDone,
    RegisterTransfer,
    TransferComplete,
    TransferFailure,
)

#: Transfers known at once; more are refused with a failure, which frees both sides.
TRANSFERS_MAX = 4096
#: How long a transfer may be one-sided, and how long a paired one may take.
PAIRING_DEADLINE_NS = units.s(60)
PULL_DEADLINE_NS = units.s(60)


class TransferState(Enum):
    """How far the pairing is."""

    REGISTERED = "registered"
    OFFERED = "offered"
    PULLING = "pulling"


@dataclass(slots=True)
class Transfer:
    """One transfer; the side that has not spoken yet is None."""

    transfer_id: str
    request_id: str
    state: TransferState
    source: RegisterTransfer | None = None
    offer: OfferReceive | None = None


class DistFlowCore:
    """Pairs, orders, completes."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.completed = 0
        self.failed = 0
        self._transfers: dict[str, Transfer] = {}
        self._completed = Tombstones()
        self._ended = Tombstones()
        self._presence = Presence(name, "", self._describe)

    def handle(self, event: Event, now_ns: int) -> list[Effect]:
        """One step of one transfer."""
        handled = self._presence.handle(event)
        if handled is not None:
            return handled
        match event:
            case Received(message=RegisterTransfer() as register):
                return self._register(register)
            case Received(message=OfferReceive() as offer):
                return self._offer(offer)
            case Received(message=ReceiveDone() as done):
                return self._complete(done)
            case Received(message=AbortTransfer() as abort):
                return self._abort(abort)
            case TimerFired(name=name):
                return self._expire(name)
            case Received(message=message):
                return [Record("unexpected_message", {"kind": type(message).__name__})]
            case _:
                raise AssertionError(f"unexpected {event!r}")

    def _register(self, register: RegisterTransfer) -> list[Effect]:
        refused = self._refuse(register.transfer_id, register.request_id, register.source_dp)
        if refused is not None:
            return refused
        transfer = self._transfers.get(register.transfer_id)
        if transfer is None:
            state = TransferState.REGISTERED
            self._transfers[register.transfer_id] = Transfer(
                register.transfer_id, register.request_id, state, source=register
            )
            return [SetTimer(register.transfer_id, PAIRING_DEADLINE_NS)]
        if transfer.source is not None:
            return []  # a resend of what is known
        transfer.source = register
        return self._pull(transfer)

    def _offer(self, offer: OfferReceive) -> list[Effect]:
        refused = self._refuse(offer.transfer_id, offer.request_id, offer.target_dp)
        if refused is not None:
            return refused
        transfer = self._transfers.get(offer.transfer_id)
        if transfer is None:
            self._transfers[offer.transfer_id] = Transfer(
                offer.transfer_id, offer.request_id, TransferState.OFFERED, offer=offer
            )
            return [SetTimer(offer.transfer_id, PAIRING_DEADLINE_NS)]
        if transfer.offer is not None:
            return []
        transfer.offer = offer
        return self._pull(transfer)

    def _pull(self, transfer: Transfer) -> list[Effect]:
        source, offer = transfer.source, transfer.offer
        assert source is not None
        assert offer is not None
        if source.request_id != offer.request_id or source.blocks > offer.blocks:
            return self._fail(transfer, "the two sides disagree about the transfer")
        transfer.state = TransferState.PULLING
        pull = PullKv(transfer.transfer_id, offer.target_dp, offer.goal)
        return [
            Send(subjects.inbox(source.source_dp), pull),
            SetTimer(transfer.transfer_id, PULL_DEADLINE_NS),
        ]

    def _complete(self, done: ReceiveDone) -> list[Effect]:
        if done.transfer_id in self._completed:
            return []
        transfer = self._transfers.get(done.transfer_id)
        if transfer is None or transfer.state is not TransferState.PULLING:
            # It was aborted while the last block was on its way: the receiver must not decode
            # from it.
            failure = TransferFailure(done.transfer_id, done.request_id, "the transfer had ended")
            return [Send(subjects.inbox(done.target_dp), failure)]
        del self._transfers[transfer.transfer_id]
        self._completed.add(transfer.transfer_id)
        self.completed += 1
        complete = TransferComplete(transfer.transfer_id, transfer.request_id)
        sides = self._sides(transfer)
        return [CancelTimer(transfer.transfer_id), *(Send(side, complete) for side in sides)]

    def _abort(self, abort: AbortTransfer) -> list[Effect]:
        transfer = self._transfers.get(abort.transfer_id)
        if transfer is None:
            self._ended.add(abort.transfer_id)
            return []
        return self._fail(transfer, f"{abort.side} gave up: {abort.reason}")

    def _expire(self, transfer_id: str) -> list[Effect]:
        transfer = self._transfers.get(transfer_id)
        if transfer is None:
            return []
        return self._fail(transfer, f"deadline passed in state {transfer.state.value}")

    def _fail(self, transfer: Transfer, reason: str) -> list[Effect]:
        del self._transfers[transfer.transfer_id]
        self._ended.add(transfer.transfer_id)
        self.failed += 1
        failure = TransferFailure(transfer.transfer_id, transfer.request_id, reason)
        sides = self._sides(transfer)
        return [
            CancelTimer(transfer.transfer_id),
            *(Send(side, failure) for side in sides),
            Record("transfer_failed", {"request_id": transfer.request_id, "reason": reason}),
        ]

    def _refuse(self, transfer_id: str, request_id: str, dp: str) -> list[Effect] | None:
        if transfer_id in self._completed:
            return []
        if transfer_id in self._ended:
            reason = "the transfer had ended"
        elif transfer_id not in self._transfers and len(self._transfers) >= TRANSFERS_MAX:
            reason = f"{TRANSFERS_MAX} transfers are open"
        else:
            return None
        return [Send(subjects.inbox(dp), TransferFailure(transfer_id, request_id, reason))]

    def _sides(self, transfer: Transfer) -> list[str]:
        sides = []
        if transfer.source is not None:
            sides.append(subjects.inbox(transfer.source.source_dp))
        if transfer.offer is not None:
            sides.append(subjects.inbox(transfer.offer.target_dp))
        return sides

    def _describe(self) -> MemberState:
        return describe_simple(self.name, "pulling" if self._transfers else "idle")

    def validate(self) -> None:
        """Each transfer's state agrees with the sides that have spoken."""
        assert len(self._transfers) <= TRANSFERS_MAX
        for transfer in self._transfers.values():
            both = transfer.source is not None and transfer.offer is not None
            assert both == (transfer.state is TransferState.PULLING), transfer
