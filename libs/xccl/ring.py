"""Rings of fixed slots between an ordered pair of dies: one lane per AIV core, `slots` slots each.

    sender    acked <= written <= acked + slots       a slot is written again after its ACK only
    receiver  consumed <= taken <= consumed + slots   a slot is given back after its copy only

A chunk has a **position** in its lane, counted from 0 within one `PairEpoch`. Position p lives in
slot p mod slots, and p div slots is the **generation** in which it holds that slot. A write names
its position, and the receiver's memory refuses it unless the slot is open in that generation: a
late or repeated write of an older one never lands on what came after.

A slot begins with a header that says what it holds. The header, not the tail, proves that a chunk
has arrived: when a data write is lost, its tail still comes, and the header is that of an older
position. A slot is believed only under a tail of at least its own attempt, because the fence orders
the data of an attempt before the tail of that attempt and of no earlier one.
"""

from __future__ import annotations

import struct
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum
from typing import Generic, Protocol, TypeVar

from libs.errors import BadInput
from libs.fabric.superpod import AIV_PER_DIE
from libs.xccl.memory import FIELD_BYTES, MetadataField, PairEpoch

# offset in the message, its bytes, crc32 of the chunk, crc32 of the message, bytes here, a spare
_PART = struct.Struct("<QQIIII")
HEADER_BYTES = FIELD_BYTES + _PART.size  # 64: a field that names the chunk, and its part
UNIFIED_BUFFER_BYTES = 192 * 1024  # given (secondary source): per AIV core
HALF_BUFFER_BYTES = UNIFIED_BUFFER_BYTES // 2  # ping-pong: one half loads while the other is stored
BLOCK_BYTES = 32  # what the transfer engines move at once (given: Ascend C)
#: Given-up events remembered per ring; assumed, as many as may be queued on a flow.
ABORTED_REMEMBERED = 64
ATTEMPT_MAX = (1 << 16) - 1


@dataclass(frozen=True, slots=True)
class RingShape:
    """The fixed sizes of a ring: eight slots per lane, each of one buffer half (assumed).

    Eight of an AIV core's pieces (`libs.xccl.cut`) cover its bandwidth times the 4.1 us to an ACK.
    """

    slots: int = 8
    payload_bytes: int = HALF_BUFFER_BYTES
    lanes: int = AIV_PER_DIE

    def __post_init__(self) -> None:
        whole = self.payload_bytes >= BLOCK_BYTES and self.payload_bytes % BLOCK_BYTES == 0
        if self.slots < 2 or not whole or not 1 <= self.lanes <= AIV_PER_DIE:
            raise BadInput(f"not a ring: {self}", field="ring")

    @property
    def slot_bytes(self) -> int:
        """One slot, header included."""
        return HEADER_BYTES + self.payload_bytes

    @property
    def lane_bytes(self) -> int:
        """Managed memory of one lane."""
        return self.slots * self.slot_bytes

    def offset(self, lane: int, position: int) -> int:
        """Where position `position` of a lane lies, counted from the start of the pair's ring."""
        return lane * self.lane_bytes + position % self.slots * self.slot_bytes

    def generation(self, position: int) -> int:
        """How often the slot of `position` has been used before."""
        return position // self.slots


@dataclass(frozen=True, slots=True)
class SlotHeader:
    """What a slot holds: chunk `field.chunk_id` of a lane, `nbytes` at `offset` of a message."""

    field: MetadataField
    offset: int
    message_bytes: int
    nbytes: int
    crc: int
    message_crc: int

    def pack(self) -> bytes:
        """The 64 bytes in front of the payload."""
        part = _PART.pack(
            self.offset, self.message_bytes, self.crc, self.message_crc, self.nbytes, 0
        )
        return self.field.pack() + part

    @classmethod
    def unpack(cls, data: memoryview) -> SlotHeader:
        """Read a slot; what was never written names epoch 0, which nobody uses."""
        field = MetadataField.unpack(data[:FIELD_BYTES])
        offset, message_bytes, crc, message_crc, nbytes, _ = _PART.unpack(
            data[FIELD_BYTES:HEADER_BYTES]
        )
        return cls(field, offset, message_bytes, nbytes, crc, message_crc)


class _Lane(Protocol):
    def validate(self, shape: RingShape) -> None: ...


LaneT = TypeVar("LaneT", bound=_Lane)


class _Ring(Generic[LaneT]):
    """What both ends keep: whom the ring joins, the session, and one count per lane."""

    def __init__(
        self, source: int, target: int, epoch: PairEpoch, shape: RingShape, lane: type[LaneT]
    ) -> None:
        self.source = source
        self.target = target
        self.shape = shape
        self._lane = lane
        self._tokens = 0
        self._begin(epoch)

    def _begin(self, epoch: PairEpoch) -> None:
        """An empty ring in a new session."""
        self.epoch = epoch
        self.lanes = [self._lane() for _ in range(self.shape.lanes)]

    def token(self) -> int:
        """A number for a request to the host; never used twice, so late answers are recognised."""
        self._tokens += 1
        return self._tokens

    def validate(self) -> None:
        """Every lane's positions are in order."""
        for lane in self.lanes:
            lane.validate(self.shape)


# ---------------------------------------------------------------- the sender's side


@dataclass(slots=True)
class SendLane:
    """Positions of one lane as its sender counts them."""

    acked: int = 0
    written: int = 0

    def validate(self, shape: RingShape) -> None:
        """No slot is used again before its ACK."""
        assert 0 <= self.acked <= self.written <= self.acked + shape.slots, self


class SendRing(_Ring[SendLane]):
    """What one die knows about the ring it writes to at `target`."""

    def __init__(self, source: int, target: int, epoch: PairEpoch, shape: RingShape) -> None:
        super().__init__(source, target, epoch, shape, SendLane)
        self.attempt = 0

    def retry(self) -> bool:
        """Begin another attempt; False when the session has no numbers left for one."""
        if self.attempt == ATTEMPT_MAX:
            return False
        self.attempt += 1
        return True

    @property
    def exhausted(self) -> bool:
        """No session is left with this peer in this life; one of the two must restart."""
        return self.epoch.session == ATTEMPT_MAX

    def renew(self) -> None:
        """Give up what is under way: the next message finds an empty ring in a new session."""
        epoch = self.epoch
        if self.exhausted:
            return
        self._begin(PairEpoch(epoch.sender_life, epoch.receiver_life, epoch.session + 1))
        self.attempt = 0


# ---------------------------------------------------------------- the receiver's side


class Admission(StrEnum):
    """What the memory says to a write into a slot."""

    OPEN = "open"
    STALE = "stale_generation"
    AHEAD = "ahead_of_window"


@dataclass(slots=True)
class ReceiveLane:
    """Positions of one lane as its receiver counts them; `tail` is the newest field seen."""

    consumed: int = 0
    taken: int = 0
    acked: int = 0
    tail: MetadataField | None = None

    @property
    def fresh(self) -> bool:
        """Whether the newest tail speaks of chunks that have not been consumed."""
        return self.tail is not None and self.tail.chunk_id > self.consumed

    def validate(self, shape: RingShape) -> None:
        """Consume before ACK; nothing is taken that the ring could not hold."""
        assert 0 <= self.acked <= self.consumed <= self.taken, self
        assert self.taken <= self.consumed + shape.slots, self


class ReceiveRing(_Ring[ReceiveLane]):
    """What one die knows about the ring that `source` writes to here."""

    def __init__(self, source: int, target: int, epoch: PairEpoch, shape: RingShape) -> None:
        super().__init__(source, target, epoch, shape, ReceiveLane)
        #: Events given up here, newest last; their sender is told so whenever it insists.
        self.aborted: deque[int] = deque(maxlen=ABORTED_REMEMBERED)

    def admits(self, lane: int, position: int) -> Admission:
        """Whether the slot of `position` is open in the generation of that position."""
        consumed = self.lanes[lane].consumed
        if position < consumed:
            return Admission.STALE
        return Admission.OPEN if position < consumed + self.shape.slots else Admission.AHEAD

    def renew(self, epoch: PairEpoch) -> None:
        """The sender has begun a new session: an empty ring again."""
        assert epoch > self.epoch, (epoch, self.epoch)
        self._begin(epoch)

    def used(self) -> Iterator[int]:
        """The lanes that have seen a tail."""
        return (index for index, lane in enumerate(self.lanes) if lane.tail is not None)
