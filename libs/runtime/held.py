"""Items that people see, held until the wall clock has reached their emulated time.

One heap and one timer: asyncio may fire equal deadlines in any order, a stream may not.
"""

from __future__ import annotations

import asyncio
import heapq
from collections.abc import Callable
from typing import Any

from libs.actor import Present
from libs.clock.pod_clock import PodClock

Presenter = Callable[[str, Any, int], None]


class HeldItems:
    """What waits to be shown, in the order of its stamps."""

    def __init__(self, clock: PodClock) -> None:
        self.presenter: Presenter | None = None
        self._clock = clock
        self._heap: list[tuple[int, int, Present]] = []
        self._sequence = 0
        self._timer: asyncio.TimerHandle | None = None

    def hold(self, effect: Present) -> None:
        """Show it when it is due, which may be at once."""
        heapq.heappush(self._heap, (effect.at_ns, self._sequence, effect))
        self._sequence += 1
        self._show_due()

    def _show_due(self) -> None:
        self.close()
        while self._heap:
            delay_s = self._clock.delay_s(self._heap[0][0])
            if delay_s > 0:
                self._timer = asyncio.get_running_loop().call_later(delay_s, self._show_due)
                return
            _, _, effect = heapq.heappop(self._heap)
            if self.presenter is not None:
                self.presenter(effect.key, effect.item, effect.at_ns)

    def close(self) -> None:
        """Show nothing more."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
