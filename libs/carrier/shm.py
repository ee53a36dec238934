"""The carrier over shared memory: one die's rings and its doorbell, in its process's event loop.

    supervisor        plan = make_segments(dies), then fork
    each child        carrier = ShmCarrier(plan, die); on_frame, start(loop), send..., close
    supervisor        plan.bump_epoch() on failover, plan.remove() at the end

The doorbell rings for two reasons, and both are looked into each time: somebody published to us, or
a reader has made room for what waits in one of our outboxes.
"""

from __future__ import annotations

import asyncio
from dataclasses import replace

from libs.carrier import doorbell
from libs.carrier.api import (
    CarrierClosed,
    CarrierStatistics,
    Frame,
    FrameHandler,
    Unroutable,
)
from libs.carrier.inbound import Inbound
from libs.carrier.outbound import Outbound
from libs.carrier.segment import DiePage, PodPage, ShmPlan
from libs.errors import CapacityExceeded, StaleEpoch


class ShmCarrier:
    """One die's end of the shared memory; made in the process that serves the die."""

    def __init__(self, plan: ShmPlan, die: int, *, lend: bool = False) -> None:
        if die not in plan:
            raise Unroutable(f"die {die} has no place in {plan.directory}")
        self.die = die
        self._plan = plan
        self._lend = lend
        self._replaced = False
        self._counters = CarrierStatistics()
        self._handler: FrameHandler | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._pod: PodPage | None = None
        self._page: DiePage | None = None
        self._inbound: Inbound | None = None
        self._outbound: dict[int, Outbound] = {}

    def on_frame(self, handler: FrameHandler) -> None:
        """Call `handler(source_die, view)` for each frame."""
        self._handler = handler

    def start(self, loop: asyncio.AbstractEventLoop) -> None:
        """Begin a new life of this die and listen; frames that wait come in the next turn."""
        assert self._handler is not None, "on_frame first"
        assert self._loop is None, "started before"
        try:
            self._pod = PodPage(self._plan)
            self._page = DiePage(self._plan, self.die)
        except FileNotFoundError as error:
            raise CarrierClosed(f"{self._plan.directory} is gone") from error
        self._inbound = Inbound(self._plan, self.die, self._page, self._counters, lend=self._lend)
        self._loop = loop
        loop.add_reader(self._plan.doorbells[self.die], self._on_doorbell)
        loop.call_soon(self._look)

    def reaches(self, target_die: int) -> bool:
        """Whether `target_die` shares this host."""
        return target_die in self._plan

    # ------------------------------------------------------------ send

    def send(self, target_die: int, frame: Frame) -> None:
        """Take one frame whole, or raise; see `Carrier.send`."""
        if self._replaced or (self._inbound is not None and self._inbound.superseded):
            raise StaleEpoch(f"another process serves die {self.die} by now")
        if self._pod is None or self._inbound is None:
            raise CarrierClosed(f"the carrier of die {self.die} is not open")
        parts = (frame,) if isinstance(frame, bytes | bytearray | memoryview) else frame
        nbytes = sum(memoryview(part).nbytes for part in parts)
        try:
            outbound = self._outbound.get(target_die) or self._open(target_die)
            outbound.send(parts, nbytes, self._pod.epoch)
        except FileNotFoundError as error:
            raise CarrierClosed(f"{self._plan.directory} is gone") from error
        except OSError as error:
            raise CapacityExceeded(f"no ring to die {target_die}: {error.strerror}") from error

    def _open(self, target_die: int) -> Outbound:
        if target_die not in self._plan:
            raise Unroutable(f"die {target_die} is not on this host")
        outbound = Outbound(self._plan, self.die, target_die, self._counters)
        self._outbound[target_die] = outbound
        return outbound

    # ------------------------------------------------------------ listen

    def _on_doorbell(self) -> None:
        doorbell.answer(self._plan.doorbells[self.die])
        self._look()

    def _look(self) -> None:
        """One turn: what others published, then what could not be sent before."""
        if self._inbound is None or self._pod is None or self._handler is None:
            return
        if self._inbound.superseded:
            # The ring was for our successor, who listens to the same bell.
            self._replaced = True
            self.close()
            doorbell.ring(self._plan.doorbells[self.die])
            return
        again = True  # a handler that raises must not stop what is behind its frame
        try:
            again = self._inbound.poll(self._handler, self._epoch)
        finally:
            if again and self._loop is not None:
                self._loop.call_soon(self._look)
        self._flush()

    def _epoch(self) -> int:
        # A handler may have closed the carrier in the middle of a burst: then nothing is current.
        return self._pod.epoch if self._pod is not None else 0

    def _flush(self) -> None:
        for outbound in self._outbound.values():
            if outbound.waiting:
                outbound.flush(self._epoch())

    # ------------------------------------------------------------ end

    def close(self) -> None:
        """Stop at once; closing twice is fine."""
        if self._loop is not None:
            self._loop.remove_reader(self._plan.doorbells[self.die])
            self._loop = None
        if self._inbound is not None:
            self._inbound.close()
            self._inbound = None
        for outbound in self._outbound.values():
            outbound.close()
        self._outbound.clear()
        for page in (self._page, self._pod):
            if page is not None:
                page.close()
        self._page = self._pod = None

    def statistics(self) -> CarrierStatistics:
        """A copy of the counters."""
        return replace(self._counters)
