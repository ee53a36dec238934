"""The messages of one flow: the one under way, and those behind it.

Sends go one after the other, in the order in which they were asked for. Receives are matched by
their **event**: whichever message the sender is at is taken first, as long as nothing has come yet
for the one that was waited for. The two ends need not ask in the same order.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

from libs.xccl.memory import DieMemory
from libs.xccl.p2p import Effect, Failed, Receive, Send, Step
from libs.xccl.receive import ReceiveMachine
from libs.xccl.send import SendMachine

Order = Send | Receive
Machine = SendMachine | ReceiveMachine


@dataclass(slots=True)
class Line:
    """One flow's messages."""

    machine: Machine | None = None
    queue: deque[Order] = field(default_factory=deque)

    def events(self) -> list[int]:
        """Every event on the line."""
        running = [] if self.machine is None else [self.machine.order.event]
        return running + [order.event for order in self.queue]

    def weight(self, nbytes: int) -> int:
        """What `nbytes` of the message under way stand for on the emulated timeline."""
        order = None if self.machine is None else self.machine.order
        if order is None or not order.charge_bytes or not order.nbytes:
            return nbytes
        return nbytes * order.charge_bytes // order.nbytes

    def promote(self, event: int) -> bool:
        """Put the receive of `event` before one that nothing has come for; whether that was so."""
        machine = self.machine
        if not isinstance(machine, ReceiveMachine) or not machine.waiting:
            return False
        wanted = next((order for order in self.queue if order.event == event), None)
        if wanted is None:
            return False
        self.queue.remove(wanted)
        self.queue.extendleft((machine.order, wanted))
        self.machine = None
        return True

    def fail(self, events: list[int], reason: str, memory: DieMemory) -> list[Effect]:
        """Fail what waits with one of these events, and abort what is under way with one."""
        effects: list[Effect] = []
        for order in [order for order in self.queue if order.event in events]:
            self.queue.remove(order)
            if isinstance(order, Receive) and order.registered is not None:
                memory.retire(order.registered)
            effects.append(Failed(order.flow, order.event, Step.OPEN, reason, definite=True))
        if self.machine is not None and self.machine.order.event in events:
            effects += self.machine.abort(reason)
        return effects
