"""One single-producer single-consumer ring in memory that two processes see. Sans-IO.

    page 0        identity; `tail` (the writer's), `head` (the reader's), `waiting` (the writer's),
                  each on a cache line of its own
    descriptors   one line of eight words per slot, used in turn
    payload       `slots` fixed slots; a frame takes as many neighbouring ones as it needs

A frame is cut into pieces of at most one slot and published piece by piece, so that the reader
works on the first while the writer copies the next. For each piece the writer stores

    number | payload and the other words | number again | tail

and the reader believes a piece when `tail` covers it and both numbers are the one expected. On x86
`tail` alone would do, since stores become visible in program order; the two numbers cover machines
where they do not. A writer killed between any two stores leaves an unpublished piece, which does
not exist, or an unfinished frame, which the reader never hands over.

Everything shared is a native 8-byte aligned word, which is stored and loaded in one instruction; a
byte-order conversion would go byte by byte and tear.

Slots are given out from the front whenever nothing is under way, so a quiet pair touches one slot
of its ring only, however long it lives: memory and caches see the depth that is really used.
"""

from __future__ import annotations

import zlib
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import count
from typing import NamedTuple, Protocol

from libs.carrier.api import Buffer
from libs.errors import RemoteProtocolError

WORD = 8
PAGE = 4096
LINE_WORDS = 8  # one cache line, 64 bytes on every machine this runs on

MAGIC = int.from_bytes(b"xdsring1", "little")
_MAGIC, _SOURCE, _TARGET, _GENERATION, _LIFE, _SLOTS, _SLOT_BYTES = range(7)
_TAIL, _HEAD, _WAITING = 8, 16, 24
_FIRST_DESCRIPTOR = PAGE // WORD
# Words of a descriptor.
_BEFORE, _FRAME, _TOTAL, _OFFSET, _EXTENT, _EPOCH, _CRC, _AFTER = range(8)
_CRC_PRESENT = 1 << 32
_EXTENT_SHIFT = 32


class Words(Protocol):
    """Shared 8-byte words: `memoryview.cast("Q")`."""

    def __getitem__(self, index: int, /) -> int: ...
    def __setitem__(self, index: int, value: int, /) -> None: ...


class Payload(Protocol):
    """Shared bytes: a `memoryview`."""

    def __getitem__(self, index: slice, /) -> memoryview: ...
    def __setitem__(self, index: slice, value: Buffer, /) -> None: ...


@dataclass(frozen=True, slots=True)
class RingLayout:
    """`slots` of `slot_bytes`; the largest frame fills all of them."""

    slots: int
    slot_bytes: int

    def __post_init__(self) -> None:
        assert 0 < self.slots < 1 << 20, self.slots
        assert 0 < self.slot_bytes < 1 << 31, self.slot_bytes
        assert self.slot_bytes % WORD == 0, self.slot_bytes

    @property
    def frame_bytes_max(self) -> int:
        """The largest frame."""
        return self.slots * self.slot_bytes

    @property
    def payload_at(self) -> int:
        """Offset of the first slot, on a page."""
        descriptors = self.slots * LINE_WORDS * WORD
        return PAGE + -(-descriptors // PAGE) * PAGE

    @property
    def total_bytes(self) -> int:
        """Size of the whole ring."""
        return self.payload_at + self.frame_bytes_max

    def slots_for(self, nbytes: int) -> int:
        """Slots that a frame takes; an empty one takes one."""
        return max(1, -(-nbytes // self.slot_bytes))


@dataclass(frozen=True, slots=True)
class RingIdentity:
    """Whose ring this is: opened by `source` as its `generation`-th towards `target`, for the
    `life` of the target.
    """

    source: int
    target: int
    generation: int
    life: int


def write_identity(words: Words, identity: RingIdentity, layout: RingLayout) -> None:
    """Fill page 0 of a new ring; the magic word last."""
    words[_SOURCE] = identity.source
    words[_TARGET] = identity.target
    words[_GENERATION] = identity.generation
    words[_LIFE] = identity.life
    words[_SLOTS] = layout.slots
    words[_SLOT_BYTES] = layout.slot_bytes
    words[_MAGIC] = MAGIC


def read_identity(words: Words, total_bytes: int) -> tuple[RingIdentity, RingLayout]:
    """Whose ring this is and how it is laid out; raises `RemoteProtocolError` for a foreign one."""
    slots, slot_bytes = words[_SLOTS], words[_SLOT_BYTES]
    sane = words[_MAGIC] == MAGIC and 0 < slots < 1 << 20 and 0 < slot_bytes < 1 << 31
    sane = sane and slot_bytes % WORD == 0
    if not sane or RingLayout(slots, slot_bytes).total_bytes != total_bytes:
        raise RemoteProtocolError("not a ring, or of another layout", reason="foreign_ring")
    identity = RingIdentity(words[_SOURCE], words[_TARGET], words[_GENERATION], words[_LIFE])
    return identity, RingLayout(slots, slot_bytes)


class RingWriter:
    """The sending end. `published` is called after each piece: it rings the reader's doorbell.

    `reserve(slot, nbytes)` is called before the first `nbytes` of a slot are written for the first
    time, and may refuse by raising; nothing has been published then.
    """

    def __init__(
        self,
        words: Words,
        payload: Payload,
        layout: RingLayout,
        *,
        published: Callable[[], None] = lambda: None,
        reserve: Callable[[int, int], None] = lambda _slot, _nbytes: None,
        checksum: bool = False,
    ) -> None:
        self._words = words
        self._payload = payload
        self._layout = layout
        self._published = published
        self._reserve = reserve
        self._checksum = checksum
        self._tail = 0
        self._frames = 0
        #: (number of the last piece, first slot, slot after the last) of frames not yet taken
        self._under_way: deque[tuple[int, int, int]] = deque()
        self._reserved = [0] * layout.slots

    def offer(self, parts: Sequence[Buffer], nbytes: int, epoch: int) -> bool:
        """Publish one frame, the parts in order; False when it does not fit at the moment."""
        assert nbytes <= self._layout.frame_bytes_max, nbytes
        needed = self._layout.slots_for(nbytes)
        first = self._place(needed)
        if first is None:
            return False
        self._reserve_slots(first, nbytes)
        self._frames += 1
        source = _Gather(parts)
        for index in range(needed):
            offset = index * self._layout.slot_bytes
            size = min(self._layout.slot_bytes, nbytes - offset)
            self._publish(source, (nbytes, offset, size), first + index, epoch)
        self._under_way.append((self._tail, first, first + needed))
        return True

    def _place(self, needed: int) -> int | None:
        """First of `needed` neighbouring free slots."""
        head = self._words[_HEAD]
        while self._under_way and self._under_way[0][0] <= head:
            self._under_way.popleft()
        if not self._under_way:
            return 0
        oldest = self._under_way[0][1]
        _, newest, end = self._under_way[-1]
        if newest < oldest:  # the free part is between the two
            return end if end + needed <= oldest else None
        if end + needed <= self._layout.slots:
            return end
        return 0 if needed <= oldest else None

    def _reserve_slots(self, first: int, nbytes: int) -> None:
        for slot in count(first):
            size = min(nbytes, self._layout.slot_bytes)
            if size > self._reserved[slot]:
                self._reserve(slot, size)
                self._reserved[slot] = size
            nbytes -= size
            if nbytes <= 0:
                return

    def _publish(self, source: _Gather, piece: tuple[int, int, int], slot: int, epoch: int) -> None:
        total, offset, size = piece
        words, number = self._words, self._tail + 1
        line = _descriptor(self._tail, self._layout)
        words[line + _BEFORE] = number
        at = slot * self._layout.slot_bytes
        crc = source.copy(self._payload, at, size, self._checksum)
        words[line + _FRAME] = self._frames
        words[line + _TOTAL] = total
        words[line + _OFFSET] = offset
        words[line + _EXTENT] = slot << _EXTENT_SHIFT | size
        words[line + _EPOCH] = epoch
        words[line + _CRC] = crc
        words[line + _AFTER] = number
        self._tail = number
        words[_TAIL] = number
        self._published()

    def want_space(self, wanted: bool) -> None:
        """Ask the reader to ring back when it has taken something."""
        self._words[_WAITING] = int(wanted)


class _Gather:
    """Reads a sequence of buffers as one."""

    def __init__(self, parts: Sequence[Buffer]) -> None:
        self._parts = iter(parts)
        self._rest = memoryview(b"")

    def copy(self, payload: Payload, at: int, size: int, checksum: bool) -> int:
        """Copy the next `size` bytes to `at`; returns the word for their checksum, or 0."""
        crc = 0
        while size:
            while not self._rest.nbytes:
                self._rest = memoryview(next(self._parts)).cast("B")
            piece = self._rest[:size]
            payload[at : at + piece.nbytes] = piece
            if checksum:
                crc = zlib.crc32(piece, crc)
            at += piece.nbytes
            size -= piece.nbytes
            self._rest = self._rest[piece.nbytes :]
        return crc | _CRC_PRESENT if checksum else 0


class Piece(NamedTuple):
    """A published piece: bytes `[offset, offset + size)` of a frame of `total`, at `slot`.

    A tuple, since a frozen dataclass of eight fields takes three times as long to make, and one is
    made for each look at a descriptor.
    """

    number: int
    frame: int
    total: int
    offset: int
    slot: int
    size: int
    epoch: int
    crc: int


class RingReader:
    """The receiving end: `peek` at the next piece, `take` what was read."""

    def __init__(self, words: Words, payload: Payload, layout: RingLayout) -> None:
        self._words = words
        self._payload = payload
        self.layout = layout
        self._head = 0

    @property
    def published(self) -> int:
        """Pieces that were published and not yet taken."""
        return self._words[_TAIL] - self._head

    @property
    def writer_waits(self) -> bool:
        """Whether the writer asked to be told when there is space."""
        return self._words[_WAITING] != 0

    def peek(self, ahead: int = 0) -> Piece | None:
        """The piece after the next `ahead` ones.

        None when it is not there, or when `published` covers it and its words are not all visible
        yet: look again. Raises `RemoteProtocolError` when the words contradict each other.
        """
        if self.published <= ahead:
            return None
        number = self._head + ahead + 1
        words, line = self._words, _descriptor(number - 1, self.layout)
        if words[line + _BEFORE] != number or words[line + _AFTER] != number:
            return None
        extent = words[line + _EXTENT]
        piece = Piece(
            number,
            words[line + _FRAME],
            words[line + _TOTAL],
            words[line + _OFFSET],
            extent >> _EXTENT_SHIFT,
            extent & (1 << _EXTENT_SHIFT) - 1,
            words[line + _EPOCH],
            words[line + _CRC],
        )
        self._check(piece)
        return piece

    def _check(self, piece: Piece) -> None:
        layout = self.layout
        inside = piece.total <= layout.frame_bytes_max and piece.slot < layout.slots
        size = min(layout.slot_bytes, piece.total - piece.offset) if inside else -1
        if piece.size != size or piece.offset % layout.slot_bytes or size < 0:
            raise RemoteProtocolError(f"impossible {piece}", reason="broken_ring")

    def intact(self, piece: Piece) -> bool:
        """Whether the slot still belongs to `piece`: asked after its bytes were read."""
        return self._words[_descriptor(piece.number - 1, self.layout) + _BEFORE] == piece.number

    def view(self, piece: Piece, size: int | None = None) -> memoryview:
        """The bytes from the start of `piece` on: its own, or `size` over its neighbours."""
        at = piece.slot * self.layout.slot_bytes
        return self._payload[at : at + (piece.size if size is None else size)]

    def take(self, pieces: int = 1) -> None:
        """Give the next `pieces` back to the writer."""
        self._head += pieces
        self._words[_HEAD] = self._head


def checksum_holds(piece: Piece, data: Buffer) -> bool:
    """Whether `data` has the checksum of `piece`; true when it carries none."""
    return not piece.crc or piece.crc == zlib.crc32(data) | _CRC_PRESENT


def _descriptor(index: int, layout: RingLayout) -> int:
    return _FIRST_DESCRIPTOR + index % layout.slots * LINE_WORDS
