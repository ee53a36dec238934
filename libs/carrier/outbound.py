"""The sending end of one pair: opens the ring with the first frame, and holds what it cannot take.

    send --> ring has room and nothing waits? --> ring
         --> outbox has room?                 --> outbox --(the reader rings back)--> ring
         --> Backpressure

A new ring is opened for each life of the target, so that a process which replaced a dead one finds
an empty ring; what waited for the dead one is dropped. A new process of the source opens a new ring
too, in a new file: what a late writer still stores lands in memory that nobody reads.
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

from libs.carrier import doorbell
from libs.carrier.api import Buffer, CarrierStatistics
from libs.carrier.ring import RingIdentity, RingWriter, write_identity
from libs.carrier.segment import DiePage, Segment, ShmPlan, allocate, create, ring_path
from libs.errors import Backpressure, CapacityExceeded

#: Bounds of what waits for one target. Assumed: half of what the bulk lane of the bus holds for all
#: targets together; a die that is this far behind is not slow, it is stuck.
OUTBOX_FRAMES_MAX = 4096
OUTBOX_BYTES_MAX = 32 * 1024 * 1024


class _Ring:
    """An opened ring: its file, its memory, its writer."""

    def __init__(self, plan: ShmPlan, identity: RingIdentity) -> None:
        self.identity = identity
        path = ring_path(plan, identity.source, identity.target, identity.generation)
        # A process that was killed between creating and announcing left one of this name.
        path.unlink(missing_ok=True)
        create(path, plan.layout.total_bytes, plan.layout.payload_at)
        self._descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        self._segment = Segment(path, self._descriptor)
        self._layout = plan.layout
        write_identity(self._segment.words, identity, plan.layout)
        self.writer = RingWriter(
            self._segment.words,
            self._segment.data[plan.layout.payload_at :],
            plan.layout,
            published=partial(doorbell.ring, plan.doorbells[identity.target]),
            reserve=self._reserve,
            checksum=plan.checksum,
        )

    def _reserve(self, slot: int, nbytes: int) -> None:
        at = self._layout.payload_at + slot * self._layout.slot_bytes
        allocate(self._descriptor, at, nbytes)

    def close(self) -> None:
        del self.writer
        os.close(self._descriptor)
        self._segment.close()


@dataclass(frozen=True, slots=True)
class _Waiting:
    frame: bytes
    epoch: int


class Outbound:
    """Everything that one die sends to one other."""

    def __init__(self, plan: ShmPlan, source: int, target: int, counters: CarrierStatistics):
        self._plan = plan
        self._source = source
        self._target = target
        self._counters = counters
        self._page = DiePage(plan, target)
        self._ring: _Ring | None = None
        self._outbox: deque[_Waiting] = deque()
        self._outbox_bytes = 0

    @property
    def waiting(self) -> bool:
        """Whether frames are in the outbox."""
        return bool(self._outbox)

    def send(self, parts: Sequence[Buffer], nbytes: int, epoch: int) -> None:
        """Take one frame whole, or raise `Backpressure` or `CapacityExceeded`."""
        limit = self._plan.layout.frame_bytes_max
        if nbytes > limit:
            raise CapacityExceeded(f"frame of {nbytes} bytes, the carrier takes at most {limit}")
        self.flush(epoch)
        writer = self._writer()  # after the flush, which opens a new ring for a new life
        if self._outbox or not writer.offer(parts, nbytes, epoch):
            self._wait(writer, parts, nbytes, epoch)
        self._counters.frames_sent += 1
        self._counters.bytes_sent += nbytes

    def _writer(self) -> RingWriter:
        """The writer of the ring towards the target's present life."""
        life = self._page.life
        if self._ring is None or self._ring.identity.life != life:
            self._open(life)
        assert self._ring is not None
        return self._ring.writer

    def _open(self, life: int) -> None:
        old = self._page.generation(self._source)
        identity = RingIdentity(self._source, self._target, old + 1, life)
        ring = _Ring(self._plan, identity)
        self._page.announce(self._source, identity.generation)
        ring_path(self._plan, self._source, self._target, old).unlink(missing_ok=True)
        if self._ring is not None:
            self._counters.stale += len(self._outbox)
            self._clear()
            self._ring.close()
        self._ring = ring

    # ------------------------------------------------------------ outbox

    def _wait(self, writer: RingWriter, parts: Sequence[Buffer], nbytes: int, epoch: int) -> None:
        full = self._outbox_bytes + nbytes > OUTBOX_BYTES_MAX
        if full or len(self._outbox) >= OUTBOX_FRAMES_MAX:
            self._counters.refused += 1
            text = f"{len(self._outbox)} frames wait for die {self._target} already"
            raise Backpressure(f"{text}, {self._outbox_bytes} bytes")
        self._outbox.append(_Waiting(b"".join(parts), epoch))
        self._outbox_bytes += nbytes
        self._counters.waiting_frames += 1
        self._counters.waiting_bytes += nbytes
        self._ask(writer)

    def _ask(self, writer: RingWriter) -> None:
        # The reader may have taken the last piece just before it could see the request. Ringing
        # makes it look once more, and the system call lets it see.
        writer.want_space(True)
        doorbell.ring(self._plan.doorbells[self._target])

    def flush(self, epoch: int) -> None:
        """Move on what waits, as far as it fits; what is older than `epoch` is dropped."""
        if not self._outbox:
            return
        try:
            writer = self._writer()
        except (OSError, CapacityExceeded):  # no new ring now; whoever sends next is told
            return
        while self._outbox:
            first = self._outbox[0]
            if first.epoch < epoch:
                self._counters.stale += 1
            elif not self._offer(writer, first):
                return
            self._outbox.popleft()
            self._outbox_bytes -= len(first.frame)
            self._counters.waiting_frames -= 1
            self._counters.waiting_bytes -= len(first.frame)
        writer.want_space(False)

    def _offer(self, writer: RingWriter, waiting: _Waiting) -> bool:
        try:
            return writer.offer((waiting.frame,), len(waiting.frame), waiting.epoch)
        except CapacityExceeded:
            # Out of memory: like a full ring, with the same bound, until somebody gives some back.
            return False

    def _clear(self) -> None:
        self._counters.waiting_frames -= len(self._outbox)
        self._counters.waiting_bytes -= self._outbox_bytes
        self._outbox.clear()
        self._outbox_bytes = 0

    def close(self) -> None:
        """Discard what waits and unmap; the file stays for a reader that has not caught up."""
        self._clear()
        if self._ring is not None:
            self._ring.close()
            self._ring = None
        self._page.close()
