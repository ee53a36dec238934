"""One die's end of all its point-to-point traffic: rings, queues, and what may land in its memory.

    send(), receive()   a caller's orders; one message at a time per flow, the rest queue in order
    land(source, it)    a remote write of a peer reaches this die: judged, stored, noticed
    handle(event)       the host's answers, for the machine of the event's flow
    peer_restarted()    the membership service says that a peer lives anew

**What lands.** A write names the `PairEpoch` it was made in and its chunk position or destination
generation. The memory refuses, and counts, whatever belongs to an earlier life or session, to a
slot that has moved on, to a destination that is closed, or to nobody. A higher life or session of
the sender is proof that the old one is over.

**Sharing.** All DistFlow instances of the die share its memory and rings. An instance is a
namespace of events; closing it fails its messages and nobody else's.
"""

from __future__ import annotations

from collections import Counter

from libs.errors import (
    Backpressure,
    BadInput,
    CapacityExceeded,
    LocalProtocolError,
    RemoteProtocolError,
)
from libs.xccl.frames import Landing
from libs.xccl.lines import Line, Machine, Order
from libs.xccl.memory import (
    PEERS_MAX,
    Area,
    DieMemory,
    Kind,
    MetadataField,
    PairEpoch,
    field_at,
)
from libs.xccl.p2p import (
    ABORTED,
    Copied,
    Effect,
    Event,
    Flow,
    Limits,
    LocalCopy,
    Receive,
    Role,
    Send,
    Step,
    Visible,
    namespace_of,
)
from libs.xccl.paths import Path
from libs.xccl.receive import ReceiveMachine
from libs.xccl.ring import HEADER_BYTES, Admission, ReceiveRing, RingShape, SendRing, SlotHeader
from libs.xccl.send import SendMachine


class Endpoint:
    """Sends and receives of one die. `refused` counts writes that did not land, by reason."""

    def __init__(
        self,
        die: int,
        life: int,
        memory: DieMemory,
        shape: RingShape | None = None,
        limits: Limits | None = None,
    ) -> None:
        if not 0 <= die < PEERS_MAX or life < 1:
            raise BadInput(f"die {die} in life {life}", field="die")
        self.die = die
        self.life = life
        self.memory = memory
        self.shape = shape or RingShape()
        self.limits = limits or Limits()
        self.refused: Counter[str] = Counter()
        self._lines: dict[Flow, Line] = {}
        self._lives: dict[int, int] = {}
        self._outgoing: dict[int, SendRing] = {}
        self._incoming: dict[int, ReceiveRing] = {}

    # ------------------------------------------------------------ orders

    def send(self, order: Send) -> list[Effect]:
        """Begin or queue a send; raises a typed error for an order that cannot be taken."""
        if order.path is not Path.DMA and order.aivs < 1:
            raise BadInput(f"{order.path} needs at least one AIV core", field="aivs")
        if self._send_ring(order.peer).exhausted:
            raise CapacityExceeded(f"no sessions left with die {order.peer}; restart one end")
        return self._enqueue(order)

    def receive(self, order: Receive) -> list[Effect]:
        """Begin or queue a receive."""
        return [*self._enqueue(order), *self._receiving(order)]

    def _enqueue(self, order: Order) -> list[Effect]:
        if not 0 <= order.peer < PEERS_MAX or order.peer == self.die:
            raise BadInput(f"die {self.die} has no flow with die {order.peer}", field="peer")
        if not 0 <= order.offset <= order.offset + order.nbytes <= len(self.memory.application):
            raise BadInput("the range is outside the application area", field="offset")
        line = self._lines.setdefault(order.flow, Line())
        if order.event in line.events():
            raise LocalProtocolError(f"event {order.event:#x} is already on {order.flow}")
        if len(line.queue) >= self.limits.outstanding_max:
            raise Backpressure(f"{len(line.queue)} messages are waiting on {order.flow}")
        line.queue.append(order)
        return self._advance(line)

    def _receiving(self, order: Receive) -> list[Effect]:
        """The sender may be at this message already, and another be waited for."""
        line, ring = self._lines[order.flow], self._receive_ring(order.peer)
        lanes = [ring.lanes[index] for index in ring.used()]
        come = any(x.tail and x.tail.event_id == order.event and x.fresh for x in lanes)
        return self._advance(line) if come and line.promote(order.event) else []

    def weight(self, flow: Flow, nbytes: int) -> int:
        """What `nbytes` of the message under way on `flow` stand for on the emulated timeline."""
        line = self._lines.get(flow)
        return nbytes if line is None else line.weight(nbytes)

    def idle(self, flow: Flow) -> bool:
        """Whether no message is under way on `flow`."""
        line = self._lines.get(flow)
        return line is None or line.machine is None

    def room(self, flow: Flow) -> bool:
        """Whether one more message may be asked for on `flow`."""
        line = self._lines.get(flow)
        return (0 if line is None else len(line.queue)) < self.limits.outstanding_max

    def cancel(self, flow: Flow, event: int, reason: str) -> list[Effect]:
        """Fail one message, wherever it is; one that is over or was never there is fine."""
        line = self._lines.get(flow)
        if line is None or event not in line.events():
            return []
        return line.fail([event], reason, self.memory) + self._advance(line)

    def _advance(self, line: Line) -> list[Effect]:
        """Start what is next when nothing is under way any more."""
        effects: list[Effect] = []
        while line.machine is None or line.machine.outcome is not None:
            line.machine = None
            if not line.queue:
                break
            line.machine = self._machine(line.queue.popleft())
            effects += line.machine.start()
        return effects

    def _machine(self, order: Order) -> Machine:
        if isinstance(order, Send):
            return SendMachine(order, self._send_ring(order.peer), self.memory, self.limits)
        return ReceiveMachine(order, self._receive_ring(order.peer), self.memory, self.limits)

    def _send_ring(self, peer: int) -> SendRing:
        ring = self._outgoing.get(peer)
        if ring is None:
            epoch = PairEpoch(self.life, self._life_of(peer))
            ring = self._outgoing[peer] = SendRing(self.die, peer, epoch, self.shape)
        return ring

    def _receive_ring(self, peer: int) -> ReceiveRing:
        ring = self._incoming.get(peer)
        if ring is None:
            epoch = PairEpoch(self._life_of(peer), self.life)
            ring = self._incoming[peer] = ReceiveRing(peer, self.die, epoch, self.shape)
        return ring

    def _life_of(self, peer: int) -> int:
        return self._lives.get(peer, 1)

    # ------------------------------------------------------------ the host's answers

    def handle(self, event: Event) -> list[Effect]:
        """An answer of the host; one for a flow that nobody uses any more is ignored."""
        line = self._lines.get(event.flow)
        if line is None or line.machine is None:
            return []
        return line.machine.handle(event) + self._advance(line)

    def copy(self, effect: LocalCopy) -> Copied:
        """Carry out a `LocalCopy`; call it when the copy ends on the emulated timeline."""
        memory = self.memory.lane(effect.flow.peer, effect.lane)
        if memory is None:
            return Copied(effect.flow, effect.lane, effect.position, intact=False)
        begin = self.shape.offset(0, effect.position) + HEADER_BYTES
        payload = memory[begin : begin + effect.nbytes]
        self.memory.application[effect.offset : effect.offset + effect.nbytes] = payload
        return Copied(effect.flow, effect.lane, effect.position)

    # ------------------------------------------------------------ what lands

    def land(self, source: int, landing: Landing) -> list[Effect]:
        """A remote write of `source` reaches this die."""
        try:
            match landing.area:
                case Area.METADATA:
                    return self._land_field(source, landing)
                case Area.MANAGED:
                    return self._land_chunk(source, landing)
                case Area.APPLICATION:
                    return self._land_direct(source, landing)
                case _:
                    raise AssertionError(f"unknown area {landing.area!r}")
        except RemoteProtocolError as error:
            return self._refuse(error.reason)

    def _refuse(self, reason: str) -> list[Effect]:
        self.refused[reason] += 1
        return []

    def _land_field(self, source: int, landing: Landing) -> list[Effect]:
        peer, lane, kind = field_at(landing.offset)
        news = MetadataField.unpack(landing.data)
        if peer != source or lane >= self.shape.lanes:
            raise RemoteProtocolError(f"die {source} writes for die {peer}", reason="foreign_field")
        if kind is Kind.ACK:
            return self._land_ack(source, lane, landing, news)
        effects = self._adopt(source, news.epoch)
        ring = self._receive_ring(source)
        if news.epoch != ring.epoch:
            return effects + self._refuse("stale_epoch")
        known = ring.lanes[lane]
        if news.newer_than(known.tail):
            known.tail = news
            self.memory.store_field(landing.offset, landing.data)
        flow = Flow(source, Role.RECEIVE)
        line = self._lines.get(flow)
        if news.tail != ABORTED and news.chunk_id <= known.acked:
            # The sender repeats what has long been consumed: its ACK was lost.
            effects.append(ReceiveMachine.acknowledgement(ring, lane, news.event_id))
        if line is not None and line.machine is not None:
            if line.promote(news.event_id):
                effects += self._advance(line)
            return effects + self.handle(Visible(flow, lane))
        if news.event_id in ring.aborted and news.tail != ABORTED:
            effects += ReceiveMachine.refuse(ring, news.event_id)
        return effects

    def _land_ack(
        self, source: int, lane: int, landing: Landing, news: MetadataField
    ) -> list[Effect]:
        ring = self._outgoing.get(source)
        if ring is None or news.epoch != ring.epoch:
            return self._refuse("stale_epoch")
        known = self.memory.field(source, lane, Kind.ACK)
        if known is not None and known.newer_than(news):
            return self._refuse("stale_field")
        self.memory.store_field(landing.offset, landing.data)
        return self.handle(Visible(Flow(source, Role.SEND), lane))

    def _land_chunk(self, source: int, landing: Landing) -> list[Effect]:
        tag, shape = landing.tag, self.shape
        effects = self._adopt(source, tag.epoch)
        ring = self._receive_ring(source)
        if tag.epoch != ring.epoch:
            return effects + self._refuse("stale_epoch")
        placed = tag.lane < shape.lanes and landing.offset == shape.offset(tag.lane, tag.number)
        if not placed or not HEADER_BYTES <= len(landing.data) <= shape.slot_bytes:
            raise RemoteProtocolError("a chunk that fits no slot", reason="bad_offset")
        admission = ring.admits(tag.lane, tag.number)
        if admission is not Admission.OPEN:
            return effects + self._refuse(admission.value)
        header = SlotHeader.unpack(memoryview(landing.data))
        try:
            namespace = namespace_of(header.field.event_id)
            slots = self.memory.open_lane(source, tag.lane, shape.lane_bytes, namespace)
        except Backpressure:
            return effects + self._refuse("no_room")
        begin = shape.offset(0, tag.number)
        slots[begin : begin + len(landing.data)] = landing.data
        lane = ring.lanes[tag.lane]
        if lane.tail is not None and lane.taken == tag.number < lane.tail.chunk_id:
            # The tail was faster, which a fence should prevent; the slot is looked at again.
            effects += self.handle(Visible(Flow(source, Role.RECEIVE), tag.lane))
        return effects

    def _land_direct(self, source: int, landing: Landing) -> list[Effect]:
        effects = self._adopt(source, landing.tag.epoch)
        if landing.tag.epoch != self._receive_ring(source).epoch:
            return effects + self._refuse("stale_epoch")
        begin, end = landing.offset, landing.offset + len(landing.data)
        if not self.memory.allows(landing.tag.number, begin, end - begin):
            return effects + self._refuse("closed_destination")
        self.memory.application[begin:end] = landing.data
        return effects

    # ------------------------------------------------------------ lives and sessions

    def _adopt(self, source: int, epoch: PairEpoch) -> list[Effect]:
        """Believe a sender that is in a later life or session than was known."""
        effects: list[Effect] = []
        if epoch.receiver_life != self.life:
            return effects
        if epoch.sender_life > self._life_of(source):
            effects += self.peer_restarted(source, epoch.sender_life)
        ring = self._receive_ring(source)
        if epoch <= ring.epoch:
            return effects
        line = self._lines.get(Flow(source, Role.RECEIVE))
        machine = None if line is None else line.machine
        if isinstance(machine, ReceiveMachine) and machine.begun:
            effects += machine.abort("the sender gave the message up", Step.TAIL)
        ring.renew(epoch)
        if line is not None:
            effects += self._advance(line)
        return effects

    def peer_restarted(self, peer: int, life: int) -> list[Effect]:
        """`peer` has a new incarnation: what was under way with the old one fails on this side."""
        if life <= self._life_of(peer):
            return []
        effects: list[Effect] = []
        for role in Role:
            line = self._lines.get(Flow(peer, role))
            if line is not None:
                effects += line.fail(line.events(), f"die {peer} restarted", self.memory)
        self._lives[peer] = life
        self._outgoing.pop(peer, None)
        self._incoming.pop(peer, None)
        self.memory.close_rings(peer)
        for line in [self._lines[flow] for flow in list(self._lines) if flow.peer == peer]:
            effects += self._advance(line)
        return effects

    def close_namespace(self, namespace: int) -> list[Effect]:
        """Fail every message of one DistFlow instance; those of others go on."""
        effects: list[Effect] = []
        for line in list(self._lines.values()):
            mine = [event for event in line.events() if namespace_of(event) == namespace]
            effects += line.fail(mine, f"namespace {namespace} was closed", self.memory)
            effects += self._advance(line)
        return effects

    def validate(self) -> None:
        """Every ring and every account adds up."""
        self.memory.validate()
        for outgoing in self._outgoing.values():
            outgoing.validate()
        for incoming in self._incoming.values():
            incoming.validate()
        for line in self._lines.values():
            assert len(line.queue) <= self.limits.outstanding_max, len(line.queue)
