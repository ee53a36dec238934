"""Garbage collection at a chosen moment instead of any (P064).

Python's collector starts whenever enough objects have been made, also between the layers of an
iteration, and every other die waits at the next dispatch for the one that collects. Here it is off;
what is alive after warm-up is set aside for good (`gc.freeze`), and the host says when an iteration
is over: every so many of those the collector runs. When nothing iterates, it runs now and then.

    begin --(warm-up)--> frozen --between x every--> collect
                            +------idle---------------> collect

The pauses that there are, wherever they fall, are counted in both ways of working.
"""

from __future__ import annotations

import asyncio
import gc
from dataclasses import dataclass

from libs.clock.pod_clock import monotonic_s

#: Ends of iterations after which everything that lives as long as the process has been made.
WARM_UP = 20
#: Real seconds between collections of a process in which nothing iterates; assumed.
IDLE_S = 10.0


@dataclass(slots=True)
class GcPauses:
    """Collections since the start, and how long they took."""

    collections: int = 0
    total_s: float = 0.0
    longest_s: float = 0.0

    def add(self, pause_s: float) -> None:
        """One more."""
        self.collections += 1
        self.total_s += pause_s
        self.longest_s = max(self.longest_s, pause_s)


class GcControl:
    """The collector of this process; `every` 0 leaves it alone and only counts."""

    def __init__(self, every: int) -> None:
        assert every >= 0, every
        self.every = every
        self.pauses = GcPauses()
        self._ends = 0
        self._ends_before = 0
        self._frozen = False
        self._began_s = 0.0
        self._timer: asyncio.TimerHandle | None = None

    def begin(self, loop: asyncio.AbstractEventLoop) -> None:
        """Take over; what happens from here on is counted."""
        gc.callbacks.append(self._count)
        if self.every:
            gc.disable()
            self._timer = loop.call_later(IDLE_S, self._idle, loop)

    def between(self) -> None:
        """An iteration is over and the next has not begun: the moment to collect, if it is due."""
        self._ends += 1
        if not self.every:
            return
        if not self._frozen and self._ends >= WARM_UP:
            self._frozen = True
            gc.collect()
            gc.freeze()
        elif self._ends % self.every == 0:
            gc.collect()

    def _idle(self, loop: asyncio.AbstractEventLoop) -> None:
        if self._ends == self._ends_before:
            gc.collect()
        self._ends_before = self._ends
        self._timer = loop.call_later(IDLE_S, self._idle, loop)

    def _count(self, phase: str, _info: dict[str, int]) -> None:
        if phase == "start":
            self._began_s = monotonic_s()
        else:
            self.pauses.add(monotonic_s() - self._began_s)

    def end(self) -> None:
        """Give the collector back; ending twice is fine."""
        if self._count in gc.callbacks:
            gc.callbacks.remove(self._count)
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if self.every:
            gc.enable()
