r"""The prefill side of KV transfers: from the pull to the end of the message (P101-P103).

    state \ event | room free       exported   message over  dropped
    --------------+-----------------------------------------------------------------
    WAITING       | EXPORTING                                gone
    EXPORTING     |                 SENDING                  gone; range until exported
    SENDING       |                            gone          cancelled, so it is over

A request's KV is copied out of its blocks into one range of the die's memory and sent from there
by one message, straight into the range that the decode side has registered.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

import numpy as np

from libs.actor import Effect, Event
from libs.distflow.kv_memory import KV_AIVS, KvMemory, kv_path
from libs.distflow.port import Ended
from libs.wire.transfer import PullKv
from libs.xccl.memory import Destination
from libs.xccl.p2p import Flow, Role, Send


class Sending(Enum):
    """How far one transfer is."""

    WAITING = "waiting"
    EXPORTING = "exporting"
    SENDING = "sending"


@dataclass(slots=True)
class _Outgoing:
    pull: PullKv
    state: Sending = Sending.WAITING


class KvSender:
    """The outgoing KV of one prefill DP group, by request."""

    def __init__(self, die: int, life: int, nbytes: int) -> None:
        self.kv = KvMemory(die, life, nbytes)
        self._outgoing: dict[str, _Outgoing] = {}
        self._owners: dict[tuple[int, int], str] = {}

    def ask(self, request_id: str, pull: PullKv) -> None:
        """A decode DP is ready for the KV of a request."""
        assert request_id not in self._outgoing, request_id
        self._outgoing[request_id] = _Outgoing(pull)

    def next_export(self) -> str | None:
        """The oldest request that can be exported now; its range is taken."""
        for request_id, outgoing in self._outgoing.items():
            if outgoing.state is Sending.WAITING:
                if not self.kv.arena.can_take(outgoing.pull.goal.nbytes):
                    return None  # first come, first served
                self.kv.arena.take(request_id, outgoing.pull.goal.nbytes)
                outgoing.state = Sending.EXPORTING
                return request_id
        return None

    def send(
        self, request_id: str, data: np.ndarray, charge_bytes: int, at_ns: int
    ) -> list[Effect]:
        """Send what was exported, `[nbytes]` uint8; raises what `XcclPort.send` raises."""
        outgoing = self._outgoing.get(request_id)
        if outgoing is None:  # dropped while it was exported
            self.kv.arena.give_back(request_id)
            return []
        goal, port = outgoing.pull.goal, self.kv.port
        self.kv.store(request_id, data)
        found = self.kv.arena.range_of(request_id)
        assert found is not None
        outgoing.state = Sending.SENDING
        self._owners[goal.die, goal.event] = request_id
        into = Destination(goal.offset, goal.nbytes, goal.generation)
        order = Send(
            goal.event, goal.die, found[0], goal.nbytes, KV_AIVS, kv_path(charge_bytes), into,
            asynchronous=True, charge_bytes=charge_bytes,
        )  # fmt: skip
        known = port.peer_life(goal.die, goal.life, at_ns)
        return [*known, *port.send(order, outgoing.pull.transfer_id, at_ns)]

    def drop(self, request_id: str, reason: str, at_ns: int) -> list[Effect]:
        """Send nothing more for a request; one that is not being sent is fine."""
        outgoing = self._outgoing.get(request_id)
        if outgoing is None:
            return []
        if outgoing.state is not Sending.SENDING:
            del self._outgoing[request_id]
            return []
        goal = outgoing.pull.goal
        return self.kv.port.cancel(Flow(goal.die, Role.SEND), goal.event, reason, at_ns)

    def take(self, event: Event) -> list[Effect] | None:
        """Effects when the event belongs to a message, None when it does not."""
        return self.kv.port.take(event)

    def settle(self) -> list[tuple[str, Ended]]:
        """Messages that are over; their ranges are free again."""
        over = []
        for ended in self.kv.port.drain():
            outcome = ended.outcome
            request_id = self._owners.pop((outcome.flow.peer, outcome.event))
            del self._outgoing[request_id]
            self.kv.arena.give_back(request_id)
            over.append((request_id, ended))
        return over

    def validate(self) -> None:
        """What is being sent has a message, and the memory adds up."""
        self.kv.validate()
        sending = [r for r, o in self._outgoing.items() if o.state is Sending.SENDING]
        assert sorted(sending) == sorted(self._owners.values()), (sending, self._owners)
