"""The receiving end of one die: finds the rings that were opened towards it, reads them in turn.

A source announces a ring by a new generation word in our directory page. The ring it replaces is
read to its end first: what a dead process published whole is delivered, what it left unfinished is
forgotten. A ring that was opened for another life of this die is not read at all.
"""

from __future__ import annotations

from collections.abc import Callable

from libs.carrier import doorbell
from libs.carrier.api import CarrierStatistics, FrameHandler
from libs.carrier.frames import FrameReader
from libs.carrier.ring import RingReader, read_identity
from libs.carrier.segment import DiePage, Segment, ShmPlan, ring_path
from libs.errors import LocalProtocolError, RemoteProtocolError

#: Frames of one ring before the others have their turn; assumed, a few hundred microseconds.
BURST = 32


class _Source:
    """One ring that is read; of a broken or a foreign one only its generation is remembered."""

    def __init__(self, generation: int, segment: Segment | None, reader: FrameReader | None):
        self.generation = generation
        self.segment = segment
        self.reader = reader

    def close(self) -> None:
        self.reader = None
        if self.segment is not None:
            self.segment.close()


class Inbound:
    """Everything that one die receives; `poll` after each ring of its doorbell."""

    def __init__(
        self, plan: ShmPlan, die: int, page: DiePage, counters: CarrierStatistics, *, lend: bool
    ) -> None:
        self._plan = plan
        self._die = die
        self._page = page
        self._life = page.begin_life()
        self._counters = counters
        self._lend = lend
        self._closed = False
        self._sources: dict[int, _Source] = {}
        self._known = b""  # the generation words when all of them had been followed
        for source in plan.doorbells:
            if page.generation(source):  # it may hold mail for the life before this one
                doorbell.ring(plan.doorbells[source])

    @property
    def superseded(self) -> bool:
        """Whether another process serves this die by now."""
        return self._page.life != self._life

    def poll(self, handler: FrameHandler, epoch: Callable[[], int]) -> bool:
        """Hand over what is there, a burst per ring; whether to look again without a doorbell."""
        # Before reading: a ring that is announced now was the last word of the one before it.
        announced = self._announced()
        again = False
        for number, source in tuple(self._sources.items()):
            if self._read(number, source, handler, epoch):
                again = True
                announced.pop(number, None)  # not before the present ring is read to its end
        for number, generation in announced.items():
            again |= self._follow(number, generation)
        return again

    def _announced(self) -> dict[int, int]:
        """Sources with a ring that we have not opened."""
        words = self._page.generations()
        if words == self._known:
            return {}
        announced = {}
        for number in self._plan.doorbells:
            generation = self._page.generation(number)
            source = self._sources.get(number)
            if generation != (source.generation if source else 0):
                announced[number] = generation
        if not announced:
            self._known = words
        return announced

    # ------------------------------------------------------------ read

    def _read(
        self, number: int, source: _Source, handler: FrameHandler, epoch: Callable[[], int]
    ) -> bool:
        """One burst; true when there may be more."""
        for _ in range(BURST):
            reader = source.reader
            if reader is None:  # broken, foreign, or closed by the handler
                return False
            try:
                frame = reader.next(epoch())
            except RemoteProtocolError:
                self._counters.broken += 1
                source.close()
                return False
            if frame is None:
                if reader.ring.writer_waits:
                    doorbell.ring(self._plan.doorbells[number])
                return reader.unseen
            self._counters.frames_received += 1
            self._counters.bytes_received += frame.nbytes
            try:
                handler(number, frame)
            finally:
                del frame
                returned = source.reader is not reader or reader.release()
            if not returned:
                raise LocalProtocolError(
                    "a handler kept a view of a frame that was lent to it; copy, or do not lend"
                )
        return True

    # ------------------------------------------------------------ rings come and go

    def _follow(self, number: int, generation: int) -> bool:
        """Leave the present ring of a source and open the one it announced; whether there is one
        to read.
        """
        if self._closed:  # by a handler, a moment ago
            return False
        old = self._sources.pop(number, None)
        if old is not None:
            self._counters.unfinished += old.reader is not None and old.reader.unfinished
            old.close()
        try:
            segment = Segment.open(ring_path(self._plan, number, self._die, generation))
        except (FileNotFoundError, ValueError):  # replaced by now; one just created is empty
            return False
        if self._page.generation(number) != generation:  # the name may be the next one's already
            segment.close()
            return False
        reader = self._reader(segment, number, generation)
        if reader is None:
            segment.close()
        self._sources[number] = _Source(generation, segment if reader else None, reader)
        return reader is not None

    def _reader(self, segment: Segment, number: int, generation: int) -> FrameReader | None:
        """A reader, unless the ring is of no use to us."""
        try:
            identity, layout = read_identity(segment.words, segment.nbytes)
        except RemoteProtocolError:
            self._counters.broken += 1
            return None
        wanted = (number, self._die, generation, self._life)
        found = (identity.source, identity.target, identity.generation, identity.life)
        if found != wanted:
            return None
        ring = RingReader(segment.words, segment.data[layout.payload_at :], layout)
        return FrameReader(ring, self._counters, lend=self._lend)

    def close(self) -> None:
        """Stop reading and unmap."""
        self._closed = True
        for source in self._sources.values():
            source.close()
        self._sources.clear()
