"""XCCL's send and receive for a core: messages between dies as events and effects.

    core --send, receive, cancel--> XcclPort --Transmit(XcclWrite)--> fabric --> the peer's port
    core <--------drain()---------- XcclPort <--Received(XcclWrite), TimerFired-- host

The port joins the protocol machines of one die (`libs.xccl.endpoint`) and its engines
(`libs.xccl.engines`) with the contract of `libs.actor`. All messages are asynchronous: a core asks,
goes on, and finds what has ended in `drain()` after every event that `take` has handled.

Every wait is bounded on both sides (`SERVING_LIMITS`): a sender repeats what is not acknowledged
and gives up at last; a receiver waits for its sender, who may not have begun, as long as a
transfer may take.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from libs import units
from libs.actor import (
    CancelTimer,
    Effect,
    Event,
    Received,
    Record,
    SetTimer,
    TimerFired,
    Transmit,
)
from libs.errors import RemoteProtocolError
from libs.fabric.superpod import AIV_PER_DIE
from libs.wire.xccl import XcclWrite
from libs.xccl import p2p, p2p_cost
from libs.xccl.endpoint import Endpoint
from libs.xccl.engines import Carried, Engines
from libs.xccl.frames import pack_write, unpack_write
from libs.xccl.memory import DieMemory
from libs.xccl.p2p import Complete, Failed, Flow, Limits, RemoteWrite, Wait

#: Timers of the port begin with this; a core passes them on without looking.
TIMER = "xccl:"
#: A real machine under load needs tens of milliseconds for what takes microseconds here, so waits
#: are as long as not to repeat for nothing: at worst a sender gives up after 10 s, a receiver after
#: the minute that DistFlow allows a transfer.
SERVING_LIMITS = Limits(wait_ns=units.ms(250), retransmits_max=40, receive_waits_max=240)


@dataclass(frozen=True, slots=True)
class Ended:
    """A message that is over, and when."""

    at_ns: int
    outcome: Complete | Failed


class XcclPort:
    """One die's messages; `life` is the incarnation of its process."""

    def __init__(
        self, die: int, life: int, memory: DieMemory, limits: Limits = SERVING_LIMITS
    ) -> None:
        self.die = die
        self.endpoint = Endpoint(die, life, memory, limits=limits)
        self._engines = Engines(self.endpoint, copiers=AIV_PER_DIE)
        self._waits: dict[str, p2p.WaitOver] = {}
        self._ended: list[Ended] = []
        #: For traces: whose messages are on the flows, and which is under way on each.
        self._names: dict[tuple[Flow, int], str] = {}
        self._current: dict[Flow, str] = {}

    # ------------------------------------------------------------ orders

    def send(self, order: p2p.Send, transfer_id: str, at_ns: int) -> list[Effect]:
        """Begin or queue a send; raises the typed error of one that cannot be taken."""
        start = p2p_cost.KERNEL_START_NS + p2p_cost.EXTRA_START_NS[order.path]
        effects = self.endpoint.send(order)
        self._names[order.flow, order.event] = transfer_id
        return self._carry(effects, at_ns + start)

    def receive(self, order: p2p.Receive, transfer_id: str, at_ns: int) -> list[Effect]:
        """Begin or queue a receive; raises like `send`."""
        effects = self.endpoint.receive(order)
        self._names[order.flow, order.event] = transfer_id
        return self._carry(effects, at_ns + p2p_cost.KERNEL_START_NS)

    def cancel(self, flow: Flow, event: int, reason: str, at_ns: int) -> list[Effect]:
        """Give one message up; its end comes out of `drain` like any other."""
        return self._carry(self.endpoint.cancel(flow, event, reason), at_ns)

    def peer_life(self, peer: int, life: int, at_ns: int) -> list[Effect]:
        """Learn which life a peer is in, before the first message to it."""
        return self._carry(self.endpoint.peer_restarted(peer, life), at_ns)

    # ------------------------------------------------------------ events

    def take(self, event: Event) -> list[Effect] | None:
        """Effects when the event is the port's, None when it is somebody else's business."""
        match event:
            case Received(message=XcclWrite() as message, at_ns=at_ns):
                return self._landed(message, at_ns)
            case TimerFired(name=name, at_ns=at_ns) if name.startswith(TIMER):
                over = self._waits.pop(name, None)
                return [] if over is None else self._waited(over, at_ns)
            case _:
                return None

    def drain(self) -> list[Ended]:
        """What has ended since the last call, in order."""
        ended, self._ended = self._ended, []
        return ended

    def _landed(self, message: XcclWrite, at_ns: int) -> list[Effect]:
        try:
            landing = unpack_write(message.write.data)
        except RemoteProtocolError as error:
            return [_refused(message.source, error.reason)]
        before = self.endpoint.refused.copy()
        effects = self._carry(self.endpoint.land(message.source, landing), at_ns + p2p_cost.WAKE_NS)
        refused = self.endpoint.refused - before
        return [*(_refused(message.source, reason) for reason in refused), *effects]

    def _waited(self, over: p2p.WaitOver, at_ns: int) -> list[Effect]:
        effects = self._carry(self.endpoint.handle(over), at_ns)
        if not any(isinstance(effect, Transmit) for effect in effects):
            return effects
        fields = {"peer": over.flow.peer, "role": str(over.flow.role)}
        return [Record("xccl_repeated", fields), *effects]

    # ------------------------------------------------------------ effects

    def _carry(self, effects: list[p2p.Effect], at_ns: int) -> list[Effect]:
        carried: list[Effect] = []
        for item in self._engines.run(effects, at_ns):
            match item.effect:
                case RemoteWrite():
                    carried.append(self._transmit(item, item.effect))
                case Wait() as wait:
                    self._current[wait.flow] = self._names.get((wait.flow, wait.event), "")
                    name = _timer(wait.flow)
                    self._waits[name] = p2p.WaitOver(wait.flow, wait.number)
                    carried.append(SetTimer(name, wait.delay_ns))
                case Complete() | Failed() as outcome:
                    if self.endpoint.idle(outcome.flow):  # the next message sets its own
                        name = _timer(outcome.flow)
                        self._waits.pop(name, None)
                        carried.append(CancelTimer(name))
                    self._names.pop((outcome.flow, outcome.event), None)
                    self._ended.append(Ended(item.at_ns, outcome))
                case _:
                    raise AssertionError(f"unknown effect {item!r}")
        return carried

    def _transmit(self, item: Carried, write: RemoteWrite) -> Transmit:
        payload = np.frombuffer(pack_write(write), np.uint8)
        message = XcclWrite(self.die, payload, self._current.get(write.flow, ""))
        return Transmit(self.die, write.target, message, item.nbytes, at_ns=item.at_ns)

    def validate(self) -> None:
        """Every ring and every account adds up; what waits has a timer."""
        self.endpoint.validate()


def _timer(flow: Flow) -> str:
    return f"{TIMER}{flow.peer}:{flow.role}"


def _refused(source: int, reason: str) -> Record:
    return Record("xccl_refused", {"source": source, "reason": reason})
