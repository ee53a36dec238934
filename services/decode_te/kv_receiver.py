"""The decode side of KV transfers: a range and a receive per request, from the offer to the import.

    expect   a range of the die's memory, registered for direct writes; an asynchronous receive
    settle   all bytes are there and match the checksum of the whole, or the message has failed
    view     what the executor imports into the blocks
    release  the range is free again

A late or repeated write finds its destination closed and is refused by the memory, whoever has the
range by then (`libs.xccl.memory`).
"""

from __future__ import annotations

import numpy as np

from libs.actor import Effect, Event
from libs.distflow.kv_memory import KV_AIVS, KvMemory
from libs.distflow.port import Ended
from libs.wire.request import TransferManifest
from libs.wire.transfer import KvGoal
from libs.xccl.memory import PEERS_MAX
from libs.xccl.p2p import Flow, Receive, Role, event_id


class KvReceiver:
    """The incoming KV of one decode DP group, by request.

    `namespaces` are the DistFlow instances of the pod: their place is the namespace of their
    events.
    """

    def __init__(self, die: int, life: int, nbytes: int, namespaces: tuple[str, ...]) -> None:
        self.kv = KvMemory(die, life, nbytes)
        self.die = die
        self._namespaces = {name: number for number, name in enumerate(namespaces, start=1)}
        self._events = 0
        self._owners: dict[tuple[int, int], str] = {}
        self._receives: dict[str, tuple[Flow, int]] = {}

    def refusal(self, manifest: TransferManifest) -> str | None:
        """Why the KV of `manifest` can never come, or None when it can."""
        if manifest.distflow not in self._namespaces:
            return f"there is no DistFlow {manifest.distflow!r}"
        if not 0 <= manifest.source_die < PEERS_MAX or manifest.source_die == self.die:
            return f"no KV can come from die {manifest.source_die}"
        return None

    def can_expect(self, manifest: TransferManifest, nbytes: int) -> bool:
        """Whether a range and a place on the flow are free for the KV of `manifest`."""
        flow = Flow(manifest.source_die, Role.RECEIVE)
        return self.kv.arena.can_take(nbytes) and self.kv.port.endpoint.room(flow)

    def expect(
        self, request_id: str, manifest: TransferManifest, nbytes: int, charge_bytes: int,
        at_ns: int,
    ) -> tuple[KvGoal, list[Effect]]:  # fmt: skip
        """Take a range and post the receive; the goal is what the sender has to know."""
        offset = self.kv.arena.take(request_id, nbytes)
        destination = self.kv.memory.register(offset, nbytes)
        self._events += 1
        event = event_id(self._namespaces[manifest.distflow], self._events)
        order = Receive(
            event, manifest.source_die, offset, nbytes, KV_AIVS, destination,
            asynchronous=True, charge_bytes=charge_bytes,
        )  # fmt: skip
        self._owners[manifest.source_die, event] = request_id
        self._receives[request_id] = order.flow, event
        goal = KvGoal(self.die, self.kv.life, event, offset, nbytes, destination.generation)
        return goal, self.kv.port.receive(order, manifest.transfer_id, at_ns)

    def take(self, event: Event) -> list[Effect] | None:
        """Effects when the event belongs to a message, None when it does not."""
        return self.kv.port.take(event)

    def settle(self) -> list[tuple[str, Ended]]:
        """Messages that are over. A range stays until `release`."""
        over = []
        for ended in self.kv.port.drain():
            outcome = ended.outcome
            request_id = self._owners.pop((outcome.flow.peer, outcome.event))
            del self._receives[request_id]
            over.append((request_id, ended))
        return over

    def view(self, request_id: str) -> np.ndarray:
        """The bytes that have come, `[nbytes]` uint8; not a copy."""
        return self.kv.view(request_id)

    def drop(self, request_id: str, reason: str, at_ns: int) -> list[Effect]:
        """Expect nothing more; one that is not expected is fine. `settle` tells the end."""
        found = self._receives.get(request_id)
        if found is None:
            return []
        flow, event = found
        return self.kv.port.cancel(flow, event, reason, at_ns)

    def release(self, request_id: str) -> None:
        """The range is nobody's any more: the message is over, the import too."""
        assert request_id not in self._receives, f"{request_id} may still be written"
        self.kv.arena.give_back(request_id)

    def validate(self) -> None:
        """Every receive has an owner, and the memory adds up."""
        self.kv.validate()
        assert sorted(self._owners.values()) == sorted(self._receives), self._owners
