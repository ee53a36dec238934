"""The sender's half of a message: load, store, fence, tail, and wait for the ACK.

    LOADING --Loaded--> STORING --Fenced--> tail written --ACK of every chunk--> COMPLETE
       ^                                         |  a wait without progress
       +------------ next attempt <--------------+--------- too many --> FAILED

Every lane has two half buffers: while one is being stored over the wire the next chunk loads into
the other, so MTE2 and MTE3 overlap. A lane runs at most `slots` chunks ahead of its ACKs.

The tail says how many chunks of the lane are out. It is written when the fence behind the last of
them holds, and carries the attempt of their headers (`libs.xccl.ring`). After a wait without
progress everything unacknowledged is written again, under the next attempt: the writes are
idempotent, so it does not matter whether data, tail or ACK was lost.

Zero-copy (`Send.into`) stores the chunks straight into the destination that the receiver has
registered. When the fences of all lanes hold, a header without payload goes through lane 0; it
carries the checksum by which the receiver judges what has arrived.

A message that is given up takes the session with it: the next one finds an empty ring, and writes
of the old session are refused wherever they still turn up.
"""

from __future__ import annotations

import zlib
from dataclasses import dataclass, field
from typing import assert_never

from libs.errors import LocalProtocolError
from libs.xccl.cut import PIECE_BYTES, Chunk, cut
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
    Limits,
    Load,
    Loaded,
    RemoteWrite,
    Send,
    Step,
    Tag,
    Visible,
    Wait,
    WaitOver,
)
from libs.xccl.paths import Path
from libs.xccl.ring import SendRing, SlotHeader

#: One DMA descriptor of a zero-copy message; assumed.
DMA_PIECE_BYTES = 4 << 20
_HALVES = 2


@dataclass(slots=True)
class _Lane:
    """The chunks of one AIV core. Chunk i takes position `base + i` of the ring lane."""

    index: int
    base: int
    chunks: tuple[Chunk, ...]
    loading: int = 0
    stored: int = 0
    fenced: int = 0
    #: Chunk held by each half buffer, or -1.
    halves: list[int] = field(default_factory=lambda: [-1] * _HALVES)
    loaded: set[int] = field(default_factory=set)

    def rewind(self, chunk: int) -> None:
        """Start again from `chunk`."""
        self.loading = self.stored = self.fenced = chunk
        self.halves = [-1] * _HALVES
        self.loaded.clear()


class SendMachine:
    """One message on its way to one die. `outcome` is set when it is over."""

    def __init__(self, order: Send, ring: SendRing, memory: DieMemory, limits: Limits) -> None:
        if not (0 <= order.offset <= order.offset + order.nbytes <= len(memory.application)):
            raise LocalProtocolError("the source is outside the application area")
        if order.into is not None and order.into.nbytes != order.nbytes:
            text = f"{order.nbytes} bytes into a destination of {order.into.nbytes}"
            raise LocalProtocolError(text)
        self.order = order
        self.ring = ring
        self.outcome: Complete | Failed | None = None
        self._memory = memory
        self._limits = limits
        self._crc = memory.checksum(order.offset, order.nbytes)
        self._tokens: dict[int, tuple[_Lane, int]] = {}
        self._descriptor = order.into is None
        self._progress = False
        self._retransmits = 0
        self._wait_number = 0
        plan = cut(order.nbytes, self._lanes_max(), self._piece_bytes_max())
        self._lanes = [
            _Lane(index, ring.lanes[index].written, chunks) for index, chunks in enumerate(plan)
        ]

    def _lanes_max(self) -> int:
        return min(self.order.aivs, self.ring.shape.lanes) if self.order.path is Path.MTE else 1

    def _piece_bytes_max(self) -> int:
        slot = self.ring.shape.payload_bytes
        if self.order.path is Path.MTE:
            return PIECE_BYTES if self._direct() else min(PIECE_BYTES, slot)
        return DMA_PIECE_BYTES if self._direct() else slot

    # ------------------------------------------------------------ events

    def start(self) -> list[Effect]:
        """Begin to load; every wait from here on is bounded."""
        effects: list[Effect] = [self._wait()]
        for lane in self._lanes:
            effects += self._fill(lane)
        return effects

    def handle(self, event: Event) -> list[Effect]:
        """An answer of the host, or news in the local metadata area."""
        if self.outcome is not None:
            return []
        match event:
            case Loaded(number=number):
                return self._loaded(number)
            case Fenced(number=number):
                return self._fenced(number)
            case Visible(lane=lane):
                return self._acked(lane)
            case WaitOver(number=number):
                return self._overdue() if number == self._wait_number else []
            case Copied():
                return []
            case _:
                assert_never(event)

    def abort(self, reason: str, step: Step = Step.OPEN) -> list[Effect]:
        """Give up now, and tell the receiver so if it can still be told."""
        if self.outcome is not None:
            return []
        lane = self.ring.lanes[0]
        goodbye = self._field_write(0, lane.written, ABORTED)
        self.outcome = Failed(self.order.flow, self.order.event, step, reason, not self._all_out())
        self.ring.renew()
        return [goodbye, self.outcome]

    # ------------------------------------------------------------ steps 1 and 2: data

    def _direct(self) -> bool:
        return self.order.into is not None

    def _fill(self, lane: _Lane) -> list[Effect]:
        """Load as far as half buffers and slots allow."""
        effects: list[Effect] = []
        room = self.ring.lanes[lane.index].acked + self.ring.shape.slots - lane.base
        while lane.loading < len(lane.chunks) and (self._direct() or lane.loading < room):
            if -1 not in lane.halves:
                break
            half, number = lane.halves.index(-1), lane.loading
            lane.halves[half] = number
            lane.loading += 1
            if self.order.path is Path.MTE:
                chunk = lane.chunks[number]
                token = self._token(lane, number)
                begin = self.order.offset + chunk.offset
                load = Load(self.order.flow, lane.index, half, begin, chunk.nbytes, token)
                effects.append(load)
            else:
                lane.loaded.add(number)
                effects += self._store(lane)
        return effects

    def _loaded(self, token: int) -> list[Effect]:
        lane, number = self._tokens.pop(token, (None, 0))
        if lane is None:
            return []
        lane.loaded.add(number)
        return self._store(lane)

    def _store(self, lane: _Lane) -> list[Effect]:
        """Store what is loaded, in order, each with a fence behind it."""
        effects: list[Effect] = []
        while lane.stored in lane.loaded:
            number = lane.stored
            lane.loaded.discard(number)
            lane.stored += 1
            effects.append(self._data_write(lane, number))
            fence = Fence(self.order.flow, lane.index, self._token(lane, number))
            effects.append(fence)
        return effects

    def _data_write(self, lane: _Lane, number: int) -> RemoteWrite:
        chunk, order = lane.chunks[number], self.order
        begin = order.offset + chunk.offset
        payload = bytes(self._memory.application[begin : begin + chunk.nbytes])
        if order.into is not None:
            tag = Tag(self.ring.epoch, lane.index, order.into.generation)
            offset = order.into.offset + chunk.offset
            area = Area.APPLICATION
            return RemoteWrite(order.flow, order.peer, area, offset, payload, tag, order.path)
        return self._slot_write(lane, lane.base + number, chunk, payload)

    def _slot_write(self, lane: _Lane, position: int, chunk: Chunk, payload: bytes) -> RemoteWrite:
        order, ring = self.order, self.ring
        ring_lane = ring.lanes[lane.index]
        assert position < ring_lane.acked + ring.shape.slots, "a slot is reused before its ACK"
        ring_lane.written = max(ring_lane.written, position + 1)
        name = MetadataField(order.event, position, chunk.nbytes, ring.epoch, ring.attempt)
        header = SlotHeader(
            name, chunk.offset, order.nbytes, len(payload), zlib.crc32(payload), self._crc
        )
        tag = Tag(ring.epoch, lane.index, position)
        offset = ring.shape.offset(lane.index, position)
        data = header.pack() + payload
        return RemoteWrite(order.flow, order.peer, Area.MANAGED, offset, data, tag, order.path)

    # ------------------------------------------------------------ step 3: tail

    def _fenced(self, token: int) -> list[Effect]:
        lane, number = self._tokens.pop(token, (None, 0))
        if lane is None:
            return []
        lane.fenced = max(lane.fenced, number + 1)
        lane.halves = [-1 if held == number else held for held in lane.halves]
        if not self._direct():
            sent = lane.chunks[number].offset + lane.chunks[number].nbytes
            tail = self._field_write(lane.index, lane.base + lane.fenced, sent)
            return [tail, *self._fill(lane)]
        if number == len(lane.chunks):  # the fence behind the descriptor
            return [self._field_write(0, lane.base + 1, self.order.nbytes)]
        return self._fill(lane) + self._describe()

    def _describe(self) -> list[Effect]:
        """Zero-copy: all data is out, and lane 0 says what it should be."""
        if self._descriptor or any(lane.fenced < len(lane.chunks) for lane in self._lanes):
            return []
        self._descriptor = True
        lane = self._lanes[0]
        write = self._slot_write(lane, lane.base, Chunk(0, 0), b"")
        return [write, Fence(self.order.flow, 0, self._token(lane, len(lane.chunks)))]

    def _field_write(self, lane: int, chunk_id: int, tail: int) -> RemoteWrite:
        order, ring = self.order, self.ring
        news = MetadataField(order.event, chunk_id, tail, ring.epoch, ring.attempt)
        offset = field_offset(self.ring.source, lane, Kind.TAIL)
        tag = Tag(ring.epoch, lane, chunk_id)
        return RemoteWrite(order.flow, order.peer, Area.METADATA, offset, news.pack(), tag)

    # ------------------------------------------------------------ steps 4 and 8: ACK

    def _acked(self, index: int) -> list[Effect]:
        news = self._memory.field(self.order.peer, index, Kind.ACK)
        if news is None or news.epoch != self.ring.epoch or news.event_id != self.order.event:
            return []
        if news.tail == ABORTED:
            return self.abort("the receiver gave the message up", Step.ACK)
        ring_lane = self.ring.lanes[index]
        if not ring_lane.acked < news.chunk_id <= ring_lane.written:
            return []
        ring_lane.acked = news.chunk_id
        self._progress = True
        if self._done():
            self.outcome = Complete(self.order.flow, self.order.event, self.order.nbytes)
            return [self.outcome]
        if self._direct():
            return []
        lane = self._lanes[index]
        behind = ring_lane.acked - lane.base
        if behind > lane.stored:
            self._rewind(lane, behind)  # a late ACK overtook the attempt that was to repeat this
        return self._fill(lane)

    def _positions(self, lane: _Lane) -> int:
        """How many ring positions the lane uses in all."""
        if self._direct():
            return 1 if lane.index == 0 else 0
        return len(lane.chunks)

    def _done(self) -> bool:
        lanes = self.ring.lanes
        return all(lanes[x.index].acked - x.base == self._positions(x) for x in self._lanes)

    def _all_out(self) -> bool:
        """Whether the receiver may have everything, so that a failure is not definite."""
        lanes = self.ring.lanes
        return all(lanes[x.index].written - x.base == self._positions(x) for x in self._lanes)

    # ------------------------------------------------------------ bounded waits

    def _wait(self) -> Wait:
        self._wait_number = self.ring.token()
        self._progress = False
        step = Step.ACK if self._all_out() else Step.DATA
        polling = not self.order.asynchronous
        delay_ns = self._limits.repeat_ns(self._retransmits)
        order = self.order
        return Wait(order.flow, order.event, self._wait_number, delay_ns, step, polling)

    def _overdue(self) -> list[Effect]:
        if self._progress:
            self._retransmits = 0
            return [self._wait()]
        self._retransmits += 1
        if self._retransmits > self._limits.retransmits_max or not self.ring.retry():
            step = Step.ACK if self._all_out() else Step.DATA
            waits = self._retransmits
            return self.abort(f"no progress in {waits} waits of {self._limits.wait_ns} ns", step)
        return self._repeat()

    def _repeat(self) -> list[Effect]:
        """Write everything unacknowledged again, under the next attempt."""
        effects: list[Effect] = [self._wait()]
        self._descriptor = not self._direct()
        for lane in self._lanes:
            done = self.ring.lanes[lane.index].acked - lane.base
            self._rewind(lane, 0 if self._direct() else done)
            effects += self._fill(lane)
        return effects + (self._describe() if self._direct() else [])

    def _rewind(self, lane: _Lane, chunk: int) -> None:
        """Go on from `chunk`; what was asked of the host for the lane before no longer counts."""
        lane.rewind(chunk)
        stale = [token for token, (owner, _) in self._tokens.items() if owner is lane]
        for token in stale:
            del self._tokens[token]

    def _token(self, lane: _Lane, number: int) -> int:
        token = self.ring.token()
        self._tokens[token] = lane, number
        return token
