"""The other die of a KV transfer, for the bench of one DP group.

    peer = KvPeer(0)
    effects = peer.exchange(bench, peer.send(goal, data))

The peer runs the real port; `exchange` carries writes to and fro until both sides are quiet.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from libs.actor import Effect, Received, Transmit
from libs.distflow.kv_memory import KV_AIVS, KvMemory
from libs.distflow.port import Ended
from libs.wire.transfer import KvGoal
from libs.wire.xccl import XcclWrite
from libs.xccl.memory import Destination
from libs.xccl.p2p import Receive, Send
from libs.xccl.paths import Path
from tests.support.bench import Bench, Effects

PEER_BYTES = 1 << 20


class KvPeer:
    """A die that sends or receives one group's KV."""

    def __init__(self, die: int, life: int = 1) -> None:
        self.die = die
        self.kv = KvMemory(die, life, PEER_BYTES)
        self.ended: list[Ended] = []
        self._owners = 0

    def _range(self, nbytes: int) -> tuple[str, int]:
        self._owners += 1
        owner = f"message {self._owners}"
        return owner, self.kv.arena.take(owner, nbytes)

    def send(self, goal: KvGoal, data: np.ndarray, path: Path = Path.URMA) -> list[Effect]:
        """Send `data`, `[nbytes]` uint8, to where a decode DP wants it."""
        owner, offset = self._range(data.nbytes)
        self.kv.store(owner, data)
        into = Destination(goal.offset, data.nbytes, goal.generation)
        order = Send(goal.event, goal.die, offset, data.nbytes, KV_AIVS, path, into, True)
        return [*self.kv.port.peer_life(goal.die, goal.life, 0), *self.kv.port.send(order, "", 0)]

    def expect(self, event: int, source_die: int, nbytes: int) -> tuple[KvGoal, str]:
        """Post a receive; the goal for the pull, and the name of the range."""
        owner, offset = self._range(nbytes)
        destination = self.kv.memory.register(offset, nbytes)
        order = Receive(event, source_die, offset, nbytes, KV_AIVS, destination, True)
        self.kv.port.receive(order, "", 0)
        life = self.kv.life
        return KvGoal(self.die, life, event, offset, nbytes, destination.generation), owner

    def land(self, message: XcclWrite, at_ns: int) -> list[Effect]:
        """A write of the group reaches this die."""
        effects = self.kv.port.take(Received(at_ns, message, "peer", 1, 1))
        assert effects is not None
        self.ended += self.kv.port.drain()
        return effects

    def exchange(self, bench: Bench, effects: Iterable[Effect]) -> Effects:
        """Carry every write to its die until nothing is under way; what the group did."""
        seen, under_way = Effects(), list(effects)
        while under_way:
            effect = under_way.pop(0)
            if not isinstance(effect, Transmit) or not isinstance(effect.message, XcclWrite):
                continue
            if effect.target == self.die:
                under_way += self.land(effect.message, bench.now_ns)
            else:
                answer = bench.take(effect.message, sender="peer")
                seen += answer
                under_way += answer
        return seen
