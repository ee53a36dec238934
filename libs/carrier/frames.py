"""Frames out of a ring: collects pieces, drops what is stale, hands over what is whole. Sans-IO.

    peek a piece -> older epoch? take it and forget its frame
                 -> give: copy it into private memory, take it at once; whole after the last piece
                 -> lend: leave it; whole when all its pieces are there, taken at `release`

Giving overlaps with the writer: while it copies piece n in, piece n - 1 is copied out. Lending
saves that copy, and holds the slots for as long as the handler runs.
"""

from __future__ import annotations

import weakref

import numpy as np

from libs.carrier.api import CarrierStatistics
from libs.carrier.ring import Piece, RingReader, checksum_holds
from libs.errors import RemoteProtocolError

#: Looks at a published piece without seeing it, before the ring counts as broken. Assumed: far more
#: than the nanoseconds that any machine takes to make stores visible.
LOOKS_MAX = 1000


class FrameReader:
    """`next` frame of one ring, then `release`; whatever is wrong with a frame is counted."""

    def __init__(self, ring: RingReader, counters: CarrierStatistics, *, lend: bool) -> None:
        self.ring = ring
        self._counters = counters
        self._lend = lend
        self._frame = 0  # the last frame of which a piece was taken
        self._offset = 0  # how much of it was taken; 0 between frames
        self._total = 0  # its size, as its first piece said
        self._buffer: memoryview | None = None
        self._corrupt = False
        self._looks = 0  # in a row at a piece that is published and not visible
        self._seen = 0  # pieces of the next frame that were found published, when lending
        self._lent: tuple[weakref.ref[np.ndarray], int] | None = None

    @property
    def unfinished(self) -> bool:
        """Whether a frame was begun: it will never be whole if its writer is dead."""
        return self._offset != 0 or self.ring.published > 0

    @property
    def unseen(self) -> bool:
        """Whether a piece is published and its words were not visible yet: look again soon."""
        return self._looks > 0

    def next(self, epoch: int) -> memoryview | None:
        """The next whole frame of `epoch` or later; None when there is none yet.

        Raises `RemoteProtocolError` when the ring contradicts itself and is of no use any more.
        """
        assert self._lent is None, "release first"
        while True:
            piece = self.ring.peek()
            if piece is None:
                self._look(self.ring.published > 0)
                return None
            self._looks = 0
            self._check_order(piece)
            if piece.epoch < epoch:
                self._drop(piece)
                continue
            if not self._lend:
                frame = self._copy(piece)
                if frame is not None:
                    return frame
                continue
            if not self._all_published(piece):
                return None
            frame = self._borrow(piece)
            if frame is not None:
                return frame

    def release(self) -> bool:
        """The handler is done with what `next` returned, and the caller has forgotten it too.

        False when somebody still holds a view of a frame that was only lent.
        """
        if self._lent is None:
            return True
        owner, pieces = self._lent
        self._lent = None
        self.ring.take(pieces)
        return owner() is None

    # ------------------------------------------------------------ pieces

    def _look(self, unseen: bool) -> None:
        self._looks = self._looks + 1 if unseen else 0
        self._counters.unseen += unseen
        if self._looks > LOOKS_MAX:
            raise RemoteProtocolError("a published piece never appeared", reason="broken_ring")

    def _check_order(self, piece: Piece) -> None:
        expected = (self._frame + 1, 0, piece.total)
        if self._offset:
            expected = (self._frame, self._offset, self._total)
        if (piece.frame, piece.offset, piece.total) != expected:
            raise RemoteProtocolError(f"{piece} instead of {expected}", reason="broken_ring")

    def _taken(self, piece: Piece) -> bool:
        """Move on behind `piece`; whether it was the last of its frame."""
        self.ring.take()
        self._frame = piece.frame
        self._total = piece.total
        self._offset = piece.offset + piece.size
        last = self._offset == piece.total
        if last:
            self._offset = 0
        return last

    def _drop(self, piece: Piece) -> None:
        self._buffer = None
        self._corrupt = False
        self._seen = 0
        if self._taken(piece):
            self._counters.stale += 1

    def _still_there(self, piece: Piece) -> None:
        if not self.ring.intact(piece):
            raise RemoteProtocolError(f"{piece} was overwritten", reason="broken_ring")

    # ------------------------------------------------------------ give

    def _copy(self, piece: Piece) -> memoryview | None:
        source = self.ring.view(piece)
        if piece.size == piece.total:
            target = memoryview(bytes(source))
            self._buffer = target
        elif piece.offset == 0:
            # Not a bytearray: that one would be filled with zeros first.
            target = self._buffer = np.empty(piece.total, np.uint8).data
            target[: piece.size] = source
        else:
            assert self._buffer is not None, piece
            target = self._buffer[piece.offset : piece.offset + piece.size]
            target[:] = source
        self._still_there(piece)
        if piece.crc and not checksum_holds(piece, target[: piece.size]):
            self._corrupt = True
        if not self._taken(piece):
            return None
        frame, corrupt = self._buffer, self._corrupt
        self._buffer, self._corrupt = None, False
        assert frame is not None
        if corrupt:
            self._counters.corrupt += 1
            return None
        return frame.toreadonly()

    # ------------------------------------------------------------ lend

    def _all_published(self, first: Piece) -> bool:
        needed = self.ring.layout.slots_for(first.total)
        self._seen = max(1, self._seen)
        while self._seen < needed:
            piece = self.ring.peek(self._seen)
            if piece is None:
                self._look(self.ring.published > self._seen)
                return False
            offset = self._seen * self.ring.layout.slot_bytes
            place = (piece.frame, piece.total, piece.offset, piece.slot)
            if place != (first.frame, first.total, offset, first.slot + self._seen):
                raise RemoteProtocolError(f"{piece} is no part of {first}", reason="broken_ring")
            self._seen += 1
        return True

    def _borrow(self, first: Piece) -> memoryview | None:
        pieces, self._seen = self._seen, 0
        self._frame = first.frame
        if self._holds(pieces):
            # All views of a frame keep this array alive, so its death says that none is left.
            owner = np.asarray(self.ring.view(first, first.total))
            self._lent = (weakref.ref(owner), pieces)
            return owner.data.toreadonly()
        self._counters.corrupt += 1
        self.ring.take(pieces)
        return None

    def _holds(self, pieces: int) -> bool:
        for ahead in range(pieces):
            piece = self.ring.peek(ahead)
            if piece is None:
                return False
            if piece.crc and not checksum_holds(piece, self.ring.view(piece)):
                return False
        return True
