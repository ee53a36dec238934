"""A broker in memory, with the semantics of NATS: for tests and for a pod in one process.

`MemoryBroker` routes; several `MemoryBus` clients attach to it. Delivery is asynchronous, one step
of the event loop later, through the same bounded queues as on the network. The broker can be hurt
the way a real one can: `freeze` (it accepts nothing, connections look alive), `crash` (connections
break) and `revive`.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque
from collections.abc import Mapping
from typing import Protocol, Self

from libs.bus.api import (
    POLICIES,
    BusMessage,
    DeadlineExceeded,
    Disconnected,
    FaultHandler,
    Handler,
    Lane,
    LanePolicy,
    Subscription,
)
from libs.bus.lane import Inlet, LaneEnd
from libs.bus.lane_bus import LaneBus, ignore_fault
from libs.bus.outbox import Outgoing
from libs.bus.requests import NO_RESPONDERS_STATUS, STATUS_HEADER
from libs.bus.subjects_match import SubjectRouter

WHOLE_BYTES_MAX = 1024 * 1024


class MemoryBroker:
    """The meeting point of several buses on one event loop; `seed` fixes queue group choices."""

    def __init__(self, seed: int = 0) -> None:
        self._router: SubjectRouter[_Sink] = SubjectRouter(seed)
        self._ends: list[MemoryLane] = []
        self._names = 0
        self.alive = True
        self.frozen = False

    def freeze(self) -> None:
        """Stop taking messages while connections look alive, as a stopped process does."""
        self.frozen = True

    def crash(self) -> None:
        """Break every connection; what subscribers already received is still handled."""
        self.alive = False
        for end in self._ends:
            end.connection_lost()

    def revive(self) -> None:
        """End `freeze` or `crash`; clients reconnect with their subscriptions."""
        crashed, self.alive, self.frozen = not self.alive, True, False
        for end in self._ends:
            if crashed:
                end.report("reconnected", "the broker is back")
            end.wake()

    def next_inbox(self) -> str:
        """An inbox prefix that no other client has."""
        self._names += 1
        return f"_INBOX.{self._names}"

    def attach(self, end: MemoryLane) -> None:
        """Count a lane among the connections."""
        self._ends.append(end)

    def detach(self, end: MemoryLane) -> None:
        """Forget a connection."""
        self._ends.remove(end)

    def listen(self, pattern: str, sink: _Sink, queue: str = "") -> int:
        """Add a subscription; returns its handle for `ignore`."""
        return self._router.add(pattern, sink, queue)

    def ignore(self, handle: int) -> None:
        """Remove a subscription."""
        self._router.remove(handle)

    def route(self, item: Outgoing) -> None:
        """Deliver one message; a question that reaches nobody is answered with status 503."""
        sinks = self._router.match(item.subject)
        for sink in sinks:
            sink.push(item)
        if not sinks and item.reply:
            headers = {STATUS_HEADER: NO_RESPONDERS_STATUS}
            for sink in self._router.match(item.reply):
                sink.push(Outgoing(item.reply, b"", "", headers))


class _Sink(Protocol):
    """Where the broker puts the messages of one subscription."""

    def push(self, item: Outgoing) -> None: ...


class _Answers:
    """The subscription to a lane's own inbox: answers are handed over at once."""

    def __init__(self, end: MemoryLane) -> None:
        self._end = end

    def push(self, item: Outgoing) -> None:
        self._end.answer(item.subject, item.data, item.headers or {})


class _Feed:
    """One subscription in memory: a bounded queue and the task that empties it."""

    def __init__(self, end: MemoryLane, inlet: Inlet) -> None:
        self._end = end
        self._inlet = inlet
        self._queue: deque[Outgoing] = deque()
        self._bytes = 0
        self._wakeup = asyncio.Event()
        self._idle = asyncio.Event()
        self._idle.set()
        self._task = asyncio.get_running_loop().create_task(self._run())
        self.handle = -1

    @property
    def pending(self) -> int:
        return len(self._queue) + (self._inlet.busy_since_s is not None)

    def push(self, item: Outgoing) -> None:
        """Queue a message, or drop it when the subscriber is too slow."""
        policy = self._end.policy
        full = len(self._queue) >= policy.pending_messages
        if full or self._bytes + len(item.data) > policy.pending_bytes:
            self._end.counters.dropped += 1
            self._end.report("slow_consumer", f"{len(self._queue)} messages wait", item.subject)
            return
        self._queue.append(item)
        self._bytes += len(item.data)
        self._idle.clear()
        self._wakeup.set()

    async def drained(self) -> None:
        """Wait until everything queued has been handled."""
        await self._idle.wait()

    async def unsubscribe(self) -> None:
        self._end.forget(self)

    def stop(self) -> Inlet:
        """End the task; returns the inlet that it served."""
        self._task.cancel()
        return self._inlet

    async def _run(self) -> None:
        while True:
            if not self._queue:
                self._idle.set()
                self._wakeup.clear()
                await self._wakeup.wait()
            item = self._queue.popleft()
            self._bytes -= len(item.data)
            message = BusMessage(item.subject, item.data, item.reply)
            await self._end.deliver(self._inlet, message, item.headers)


class MemoryLane(LaneEnd):
    """One lane of one `MemoryBus`."""

    def __init__(
        self, broker: MemoryBroker, lane: Lane, policy: LanePolicy, on_fault: FaultHandler
    ) -> None:
        super().__init__(lane, policy, broker.next_inbox(), on_fault)
        self.whole_bytes_max = WHOLE_BYTES_MAX
        self._broker = broker
        self._feeds: list[_Feed] = []
        self._pump: asyncio.Handle | None = None
        broker.attach(self)
        self._inbox_handle = broker.listen(f"{self.requests.inbox}.*", _Answers(self))

    @property
    def connected(self) -> bool:
        return self._broker.alive

    def wake(self) -> None:
        if self._pump is None:
            self._pump = asyncio.get_running_loop().call_soon(self._take)

    def _take(self) -> None:
        self._pump = None
        while self._broker.alive and not self._broker.frozen:
            match self.outbox.head():
                case None:
                    return
                case Outgoing() as item:
                    self.outbox.pop()
                    self._broker.route(item)
                case barrier:
                    self.outbox.pop()
                    if not barrier.done():
                        barrier.set_result(None)

    def connection_lost(self) -> None:
        """The broker crashed: questions under way may or may not have been heard."""
        self.counters.disconnects += 1
        self.requests.fail(Disconnected("the broker crashed", definite=False))
        self.report("disconnected", "the broker crashed")

    async def subscribe(self, pattern: str, handler: Handler, queue: str) -> Subscription:
        if not self.connected:
            raise Disconnected(f"lane {self.lane} has no connection")
        feed = _Feed(self, self.open_inlet(pattern, handler, queue))
        feed.handle = self._broker.listen(pattern, feed, queue)
        self._feeds.append(feed)
        return feed

    def forget(self, feed: _Feed) -> None:
        """End a subscription; ending it twice is fine."""
        self._broker.ignore(feed.handle)
        self.close_inlet(feed.stop())
        self._feeds = [kept for kept in self._feeds if kept is not feed]

    async def flush(self, timeout_s: float) -> None:
        if not self._broker.alive:
            raise Disconnected(f"lane {self.lane} has no connection")
        barrier = asyncio.get_running_loop().create_future()
        self.outbox.put_barrier(barrier)
        self.wake()
        try:
            async with asyncio.timeout(timeout_s):
                await barrier
        except TimeoutError as error:
            raise DeadlineExceeded(f"lane {self.lane} was not flushed in {timeout_s} s") from error

    async def end_intake(self, timeout_s: float) -> int:
        for feed in self._feeds:
            self._broker.ignore(feed.handle)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                await asyncio.gather(*(feed.drained() for feed in self._feeds))
        return sum(feed.pending for feed in self._feeds)

    async def close(self) -> None:
        for feed in list(self._feeds):
            self.forget(feed)
        self._broker.ignore(self._inbox_handle)
        self._broker.detach(self)


class MemoryBus(LaneBus[MemoryLane]):
    """A bus on a `MemoryBroker`; made by `connect`."""

    @classmethod
    async def connect(
        cls,
        broker: MemoryBroker,
        *,
        policies: Mapping[Lane, LanePolicy] = POLICIES,
        on_fault: FaultHandler = ignore_fault,
    ) -> Self:
        """A client of `broker` with one lane per entry of `policies`."""
        if not broker.alive:
            raise Disconnected("the broker is not alive")
        return cls(
            {lane: MemoryLane(broker, lane, policy, on_fault) for lane, policy in policies.items()}
        )
