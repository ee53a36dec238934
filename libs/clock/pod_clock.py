"""One mapping between wall time and the emulated timeline, shared by every process of a pod.

    emulated = (wall - epoch) / pace

`pace` 1.0 is a real SuperPod's speed, 0.1 ten times faster. With pace 0 nothing is held and the
emulated now of an outside event is the latest stamp this process has seen: the pod runs as fast
as the machine can. The wall clock only paces; no decision reads it.
"""

from __future__ import annotations

import time

from libs import units


class PodClock:
    """Reads the wall clock for one process."""

    def __init__(self, epoch_wall_ns: int, pace: float) -> None:
        assert pace >= 0, pace
        self.epoch_wall_ns = epoch_wall_ns
        self.pace = pace
        self._latest_ns = 0

    def observe(self, at_ns: int) -> None:
        """Remember the latest emulated stamp; it is the outside's now when nothing is paced."""
        self._latest_ns = max(self._latest_ns, at_ns)

    def now_ns(self) -> int:
        """The emulated now of an event that comes from outside."""
        if self.pace == 0:
            return self._latest_ns
        return max(0, round((wall_ns() - self.epoch_wall_ns) / self.pace))

    def delay_s(self, at_ns: int) -> float:
        """Real seconds until the wall clock reaches emulated `at_ns`; 0 when it has."""
        if self.pace == 0:
            return 0.0
        due_wall_ns = self.epoch_wall_ns + round(at_ns * self.pace)
        return max(0.0, units.to_s(due_wall_ns - wall_ns()))

    def lag_ns(self, at_ns: int) -> int:
        """How far emulated `at_ns` is behind the paced wall clock (0 when it is ahead)."""
        return 0 if self.pace == 0 else max(0, self.now_ns() - at_ns)


def wall_ns() -> int:
    """Wall time in nanoseconds since the Unix epoch, comparable across processes of one host."""
    return time.time_ns()


def monotonic_s() -> float:
    """A clock for measuring real durations within one process."""
    return time.monotonic()
