"""The receiver's half of a message: find the tail, copy, fence, acknowledge.

    WAITING --tail--> COPYING --Copied--> consumed --Fenced--> ACK written
       |                 |  all bytes there and the checksum right --> COMPLETE
       |  too many waits, sender gone, wrong size ----------------> DRAINING --> FAILED

A chunk is copied when the tail covers it and its slot says that it holds it (`libs.xccl.ring`).
Its slot is given back when the copy is done and found intact, and only then acknowledged. The last
ACK is held until the whole message has passed its checksum: a sender that is told "complete" has a
receiver that has it all.

A machine that fails first waits for the copies under way: after `Failed` nothing of the message is
written to the application area any more, so the range can be given to somebody else.

A zero-copy message consists of a header alone. The bytes are already in place; the checksum says
whether all of them are. If not, the sender will write them again.
"""

from __future__ import annotations

from typing import assert_never

from libs.errors import LocalProtocolError
from libs.xccl.memory import Area, DieMemory, Kind, MetadataField, field_offset
from libs.xccl.p2p import (
    ABORTED,
    Complete,
    Copied,
    Effect,
    Event,
    Failed,
    Fence,
    Fenced,
    Flow,
    Limits,
    Loaded,
    LocalCopy,
    Receive,
    RemoteWrite,
    Role,
    Step,
    Tag,
    Visible,
    Wait,
    WaitOver,
)
from libs.xccl.ring import HEADER_BYTES, ReceiveLane, ReceiveRing, SlotHeader


class ReceiveMachine:
    """One message on its way here. `outcome` is set when it is over."""

    def __init__(
        self, order: Receive, ring: ReceiveRing, memory: DieMemory, limits: Limits
    ) -> None:
        if not (0 <= order.offset <= order.offset + order.nbytes <= len(memory.application)):
            raise LocalProtocolError("the destination is outside the application area")
        self.order = order
        self.ring = ring
        self.outcome: Complete | Failed | None = None
        #: Chunks that were found torn or damaged and left for the sender to repeat.
        self.rejected = 0
        self._memory = memory
        self._limits = limits
        self._copying: dict[tuple[int, int], SlotHeader] = {}
        #: Attempts found torn or damaged; only a later one is believed.
        self._rejected: dict[tuple[int, int], int] = {}
        self._fences: dict[int, tuple[int, int]] = {}
        self._received = 0
        self._failing: tuple[Step, str] | None = None
        self._verified = False
        self._progress = False
        self._idle_waits = 0
        self._wait_number = 0

    @property
    def begun(self) -> bool:
        """Whether anything of the message has been consumed or is being copied."""
        return bool(self._received or self._copying or self._verified or self._rejected)

    @property
    def waiting(self) -> bool:
        """Whether nothing has come for the message yet, and nobody has given it up."""
        return not self.begun and self._failing is None and self.outcome is None

    # ------------------------------------------------------------ events

    def start(self) -> list[Effect]:
        """Look at what is in the metadata area already; the sender may have been first."""
        effects: list[Effect] = [self._wait()]
        for lane in self.ring.used():
            effects += self._scan(lane)
        return effects

    def handle(self, event: Event) -> list[Effect]:
        """An answer of the host, or news in the local metadata area."""
        if self.outcome is not None:
            return []
        match event:
            case Visible(lane=lane):
                return self._scan(lane)
            case Copied():
                return self._copied(event)
            case Fenced(number=number):
                return self._fenced(number)
            case WaitOver(number=number):
                return self._overdue() if number == self._wait_number else []
            case Loaded():
                return []
            case _:
                assert_never(event)

    def abort(self, reason: str, step: Step = Step.OPEN) -> list[Effect]:
        """Give up as soon as no copy is under way, and tell the sender so."""
        if self.outcome is not None or self._failing is not None:
            return []
        self._failing = step, reason
        self.ring.aborted.append(self.order.event)
        return [*self.refuse(self.ring, self.order.event), *self._drained()]

    # ------------------------------------------------------------ steps 5 and 6: tail and copy

    def _scan(self, index: int) -> list[Effect]:
        """Take every chunk of the lane that is published and really there."""
        lane, order = self.ring.lanes[index], self.order
        tail = lane.tail
        if self._failing is not None or tail is None:
            return []
        if tail.event_id != order.event:
            return self._foreign(tail, lane)
        if tail.tail == ABORTED:
            return self.abort("the sender gave the message up", Step.TAIL)
        if lane.taken - lane.consumed != self._under_way(index):
            return []  # something was rejected; go on when the copies behind it have ended
        effects: list[Effect] = []
        while lane.taken < min(tail.chunk_id, lane.consumed + self.ring.shape.slots):
            header = self._believed(index, lane.taken, tail)
            if header is None:
                break
            misfit = self._misfit(header)
            if misfit is not None:
                return effects + self.abort(misfit, Step.DATA)
            self._copying[index, lane.taken] = header
            copy = LocalCopy(order.flow, index, lane.taken, self._goal(header), header.nbytes)
            effects.append(copy)
            lane.taken += 1
        return effects

    def _foreign(self, tail: MetadataField, lane: ReceiveLane) -> list[Effect]:
        """A tail of another event: an old one, one given up here, or a disagreement."""
        if tail.event_id in self.ring.aborted:
            return self.refuse(self.ring, tail.event_id)
        if tail.tail == ABORTED or not lane.fresh or not self.begun:
            return []  # old, or a message that nobody has asked for yet
        return self.abort(f"the sender is at event {tail.event_id:#x}", Step.TAIL)

    def _under_way(self, index: int) -> int:
        return sum(1 for lane, _ in self._copying if lane == index)

    def _misfit(self, header: SlotHeader) -> str | None:
        """Why this chunk cannot belong to what was asked for."""
        order = self.order
        if header.message_bytes != order.nbytes or header.offset + header.nbytes > order.nbytes:
            return f"{order.nbytes} bytes wanted, the sender has {header.message_bytes}"
        if self._describes(header) and order.registered is None:
            return "the sender writes directly, and no destination is registered"
        return None

    def _describes(self, header: SlotHeader) -> bool:
        """Whether a header stands for a zero-copy message instead of carrying bytes."""
        return header.nbytes == 0 and self.order.nbytes > 0

    def _goal(self, header: SlotHeader) -> int:
        return self.order.offset + header.offset

    def _believed(self, index: int, position: int, tail: MetadataField) -> SlotHeader | None:
        """The header of a slot that holds `position` for this event under this tail."""
        memory = self._memory.lane(self.ring.source, index)
        if memory is None:
            return None
        begin = self.ring.shape.offset(0, position)
        header = SlotHeader.unpack(memory[begin : begin + HEADER_BYTES])
        name = header.field
        held = (name.event_id, name.chunk_id, name.epoch)
        if held != (self.order.event, position, self.ring.epoch):
            return None
        if name.attempt <= self._rejected.get((index, position), -1):
            return None
        return header if name.attempt <= tail.attempt else None

    def _copied(self, event: Copied) -> list[Effect]:
        header = self._copying.pop((event.lane, event.position), None)
        if header is None:
            return []
        if self._failing is not None:
            return self._drained()
        lane = self.ring.lanes[event.lane]
        if event.position != lane.consumed:
            return self._scan(event.lane)  # behind a rejected one; taken again when that has come
        if not self._intact(event, header):
            self.rejected += 1
            self._rejected[event.lane, event.position] = header.field.attempt
            lane.taken = lane.consumed
            return self._scan(event.lane)
        lane.consumed += 1
        self._received += header.nbytes
        self._progress = True
        if self._received == self.order.nbytes or self._describes(header):
            return self._verify(header)
        return self._acknowledge(event.lane, lane) + self._scan(event.lane)

    def _intact(self, event: Copied, header: SlotHeader) -> bool:
        """Whether what was copied, or lies in place, is what the header promised."""
        order = self.order
        if self._describes(header):
            checksum = self._memory.checksum(order.offset, order.nbytes)
            return event.intact and checksum == header.message_crc
        checksum = self._memory.checksum(self._goal(header), header.nbytes)
        return event.intact and checksum == header.crc

    # ------------------------------------------------------------ step 7: ACK

    def _verify(self, header: SlotHeader) -> list[Effect]:
        """All bytes are there: the checksum of the whole decides."""
        order = self.order
        if self._memory.checksum(order.offset, order.nbytes) != header.message_crc:
            return self.abort("the message fails its checksum", Step.CHECKSUM)
        if order.registered is not None:
            self._memory.retire(order.registered)
        self._verified = True
        effects: list[Effect] = []
        for index, lane in enumerate(self.ring.lanes):
            if lane.acked < lane.consumed:
                effects.append(self._fence(index, lane.consumed))
        return effects

    def _acknowledge(self, index: int, lane: ReceiveLane) -> list[Effect]:
        """Give slots back half a ring at a time, or at once when nothing else is published."""
        due = lane.consumed - lane.acked >= self.ring.shape.slots // 2
        assert lane.tail is not None
        if not due and lane.consumed < lane.tail.chunk_id:
            return []
        return [self._fence(index, lane.consumed)]

    def _fence(self, index: int, consumed: int) -> Fence:
        number = self.ring.token()
        self._fences[number] = index, consumed
        return Fence(self.order.flow, index, number)

    def _fenced(self, number: int) -> list[Effect]:
        known = self._fences.pop(number, None)
        if known is None or self._failing is not None:
            return []
        index, consumed = known
        lane = self.ring.lanes[index]
        lane.acked = max(lane.acked, consumed)
        effects: list[Effect] = [self.acknowledgement(self.ring, index, self.order.event)]
        if self._verified and all(each.acked == each.consumed for each in self.ring.lanes):
            self.outcome = Complete(self.order.flow, self.order.event, self.order.nbytes)
            effects.append(self.outcome)
        return effects

    @staticmethod
    def acknowledgement(ring: ReceiveRing, index: int, event: int) -> RemoteWrite:
        """The ACK field of a lane as it stands; written again whenever the sender seems not to
        know.
        """
        return _ack_write(ring, index, event, ring.lanes[index].acked, 0)

    @staticmethod
    def refuse(ring: ReceiveRing, event: int) -> list[Effect]:
        """Tell the sender that this event has been given up."""
        return [_ack_write(ring, 0, event, ring.lanes[0].acked, ABORTED)]

    # ------------------------------------------------------------ bounded waits and the end

    def _wait(self) -> Wait:
        self._wait_number = self.ring.token()
        self._progress = False
        polling = not self.order.asynchronous
        order, delay_ns = self.order, self._limits.wait_ns
        return Wait(order.flow, order.event, self._wait_number, delay_ns, Step.TAIL, polling)

    def _overdue(self) -> list[Effect]:
        if self._failing is not None:
            return [self._wait()]
        self._idle_waits = 0 if self._progress else self._idle_waits + 1
        if self._idle_waits >= self._limits.receive_waits_max:
            text = f"nothing new in {self._idle_waits} waits of {self._limits.wait_ns} ns"
            return self.abort(text, Step.TAIL)
        return [self._wait()]

    def _drained(self) -> list[Effect]:
        if self._copying or self._failing is None:
            return []
        step, reason = self._failing
        if self.order.registered is not None:
            self._memory.retire(self.order.registered)
        for lane in self.ring.lanes:
            lane.taken = lane.consumed
        self.outcome = Failed(self.order.flow, self.order.event, step, reason, definite=True)
        return [self.outcome]


def _ack_write(ring: ReceiveRing, index: int, event: int, chunk_id: int, tail: int) -> RemoteWrite:
    news = MetadataField(event, chunk_id, tail, ring.epoch, 0)
    offset = field_offset(ring.target, index, Kind.ACK)
    tag = Tag(ring.epoch, index, chunk_id)
    flow = Flow(ring.source, Role.RECEIVE)
    return RemoteWrite(flow, ring.source, Area.METADATA, offset, news.pack(), tag)
