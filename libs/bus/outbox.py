"""What a lane has accepted and not yet written: a queue bounded in messages and bytes.

Between `publish`, which must never wait, and the connection, which may. Barriers (futures) stand in
the same queue and tell when everything before them has been taken.
"""

from __future__ import annotations

import asyncio
from collections import deque
from dataclasses import dataclass

from libs.bus.api import LanePolicy
from libs.errors import Backpressure


@dataclass(frozen=True, slots=True)
class Outgoing:
    """One message on its way to the broker."""

    subject: str
    data: bytes
    reply: str = ""
    headers: dict[str, str] | None = None


Barrier = asyncio.Future[None]


class Outbox:
    """First in, first out; `put` refuses, it never waits."""

    def __init__(self, policy: LanePolicy) -> None:
        self._policy = policy
        self._queue: deque[Outgoing | Barrier] = deque()
        self.messages = 0
        self.bytes = 0

    def put(self, items: list[Outgoing]) -> None:
        """Accept all of `items`, or raise `Backpressure` and accept none."""
        size = sum(len(item.data) for item in items)
        if self.messages + len(items) > self._policy.outbox_messages:
            raise Backpressure(f"outbox holds {self.messages} messages")
        if self.bytes + size > self._policy.outbox_bytes:
            raise Backpressure(f"outbox holds {self.bytes} bytes")
        self._queue.extend(items)
        self.messages += len(items)
        self.bytes += size

    def put_barrier(self, barrier: Barrier) -> None:
        """Queue a future; whoever takes it resolves it."""
        self._queue.append(barrier)

    def head(self) -> Outgoing | Barrier | None:
        """The next item, which stays in the queue until `pop`."""
        return self._queue[0] if self._queue else None

    def pop(self) -> None:
        """Remove the head."""
        item = self._queue.popleft()
        if isinstance(item, Outgoing):
            self.messages -= 1
            self.bytes -= len(item.data)
        assert self.messages >= 0, self.messages
        assert self.bytes >= 0, self.bytes

    def clear(self) -> int:
        """Discard everything, cancel the barriers; returns how many messages were lost."""
        lost = self.messages
        for item in self._queue:
            if isinstance(item, asyncio.Future):
                item.cancel()
        self._queue.clear()
        self.messages = self.bytes = 0
        return lost
