"""A bus is its lanes: what `NatsBus` and `MemoryBus` have in common."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from typing import Generic, TypeVar

from libs.bus.api import (
    BusFault,
    DeadlineExceeded,
    Disconnected,
    Draining,
    Handler,
    Lane,
    LaneStatistics,
    Subscription,
)
from libs.bus.lane import LaneEnd
from libs.bus.subjects_match import check_pattern, check_queue
from libs.errors import BadInput

SWEEP_S = 1.0

End = TypeVar("End", bound=LaneEnd)


def ignore_fault(_: BusFault) -> None:
    """The fault handler of a bus whose owner does not care; the counters still tell."""


class LaneBus(Generic[End]):
    """Implements `libs.bus.api.Bus` over connected lane ends; created on a running event loop."""

    def __init__(self, ends: Mapping[Lane, End]) -> None:
        assert ends, "a bus has at least one lane"
        self._ends = dict(ends)
        self._draining = False
        self._closed = False
        self._sweeper = asyncio.get_running_loop().create_task(self._sweep_forever())

    @property
    def connected(self) -> bool:
        return all(end.connected for end in self._ends.values())

    def publish(
        self, subject: str, data: bytes, *, lane: Lane = Lane.CONTROL, reply: str = ""
    ) -> None:
        self._end(lane).publish(subject, data, reply)

    def probe(
        self,
        subject: str,
        data: bytes,
        unreachable: Callable[[], None],
        *,
        lane: Lane = Lane.CONTROL,
    ) -> None:
        self._end(lane).probe(subject, data, unreachable)

    async def request(
        self, subject: str, data: bytes, timeout_s: float, *, lane: Lane = Lane.CONTROL
    ) -> bytes:
        return await self._end(lane).request(subject, data, timeout_s)

    async def subscribe(
        self, subject: str, handler: Handler, *, queue: str = "", lane: Lane = Lane.CONTROL
    ) -> Subscription:
        check_pattern(subject)
        check_queue(queue)
        if self._draining:
            raise Draining("the bus is draining")
        return await self._end(lane).subscribe(subject, handler, queue)

    async def flush(self, timeout_s: float = 5.0) -> None:
        await asyncio.gather(*(end.flush(timeout_s) for end in self._ends.values()))

    async def drain(self, timeout_s: float) -> int:
        self._draining = True
        ends = self._ends.values()
        left = sum(await asyncio.gather(*(end.end_intake(timeout_s) for end in ends)))
        for end in ends:  # from here on only what is already in the outboxes goes out
            end.refusing = True
        left += sum(await asyncio.gather(*(self._send_rest(end, timeout_s) for end in ends)))
        await self.close()
        return left

    async def _send_rest(self, end: End, timeout_s: float) -> int:
        """Flush; returns how many messages may have been lost."""
        try:
            await end.flush(timeout_s)
        except Disconnected:
            return end.outbox.messages
        except DeadlineExceeded:  # written, perhaps, but nobody confirmed it
            return max(end.outbox.messages, 1)
        return 0

    async def close(self) -> None:
        if self._closed:
            return
        self._closed = self._draining = True
        self._sweeper.cancel()
        for end in self._ends.values():
            end.refusing = True
        await asyncio.gather(*(end.close() for end in self._ends.values()))
        for end in self._ends.values():
            end.counters.lost += end.outbox.clear()
            end.requests.fail(Draining("the bus was closed", definite=False))

    def statistics(self) -> Mapping[Lane, LaneStatistics]:
        return {lane: end.statistics() for lane, end in self._ends.items()}

    def _end(self, lane: Lane) -> End:
        end = self._ends.get(lane)
        if end is None:
            raise BadInput(f"lane {lane} was not opened", field="lane")
        return end

    async def _sweep_forever(self) -> None:
        while True:
            await asyncio.sleep(SWEEP_S)
            for end in self._ends.values():
                end.sweep()
