"""One lane of one bus: everything that does not depend on what carries the bytes.

    publish --> Outbox --> [carrier] --> ... --> [carrier] --> deliver --> handler

A carrier (`libs.bus.nats`, `libs.bus.memory`) derives from `LaneEnd`: it takes from the outbox what
`LaneEnd` put there, and calls `deliver` or `answer` with what arrives. Admission, cutting into
pieces and collecting them, requests, handler supervision and the counters are here, once for all
carriers.
"""

from __future__ import annotations

import asyncio
import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace

from libs.bus import chunks
from libs.bus.api import (
    BusFault,
    BusMessage,
    DeadlineExceeded,
    Disconnected,
    Draining,
    FaultHandler,
    Handler,
    Lane,
    LanePolicy,
    LaneStatistics,
    PayloadTooLarge,
    Subscription,
)
from libs.bus.outbox import Outbox, Outgoing
from libs.bus.requests import PendingRequests, write_error
from libs.bus.subjects_match import check_subject
from libs.errors import Backpressure, OperatingError


@dataclass(slots=True)
class Inlet:
    """The receiving end of one subscription: its handler, its pieces, what it is doing."""

    pattern: str
    handler: Handler
    queue: str
    collector: chunks.Collector
    busy_since_s: float | None = None
    stuck_reported: bool = field(default=False)


class LaneEnd(ABC):
    """Base of a lane's two carriers.

    `piece_bytes` is the largest payload that travels whole; carriers set it from the broker's
    limit.
    """

    def __init__(self, lane: Lane, policy: LanePolicy, inbox: str, on_fault: FaultHandler) -> None:
        self.lane = lane
        self.policy = policy
        self.counters = LaneStatistics()
        self.outbox = Outbox(policy)
        self.requests = PendingRequests(inbox)
        self.inlets: list[Inlet] = []
        self.refusing = False  # draining or closed
        self.dead = False  # the carrier gave up: nothing will ever be sent again
        self.whole_bytes_max = policy.message_bytes_max
        self._on_fault = on_fault
        self._answers = chunks.Collector(policy.message_bytes_max)
        self._streams = 0

    # ------------------------------------------------------------ what a carrier provides

    @property
    @abstractmethod
    def connected(self) -> bool:
        """Whether the connection is believed to be alive."""

    @abstractmethod
    def wake(self) -> None:
        """The outbox has something to take."""

    @abstractmethod
    async def subscribe(self, pattern: str, handler: Handler, queue: str) -> Subscription:
        """Tell the broker; on return it knows."""

    @abstractmethod
    async def flush(self, timeout_s: float) -> None:
        """Wait until the broker has what the outbox holds now."""

    @abstractmethod
    async def end_intake(self, timeout_s: float) -> int:
        """End all subscriptions once their pending messages are handled; returns what is left."""

    @abstractmethod
    async def close(self) -> None:
        """Release the connection."""

    # ------------------------------------------------------------ sending

    def publish(
        self, subject: str, data: bytes, reply: str = "", headers: dict[str, str] | None = None
    ) -> None:
        """Admit a message to the outbox, in pieces when the broker would not take it whole."""
        check_subject(subject)
        if reply:
            check_subject(reply)
        try:
            self._admit(len(data))
            self.outbox.put(self._pieces(subject, data, reply, headers))
        except OperatingError:
            self.counters.refused += 1
            raise
        self.counters.published += 1
        self.counters.published_bytes += len(data)
        self.wake()

    def _admit(self, size: int) -> None:
        if self.refusing:
            raise Draining(f"lane {self.lane} is closed")
        if size > self.policy.message_bytes_max:
            raise PayloadTooLarge(size, self.policy.message_bytes_max)
        if self.connected:
            return
        if self.dead or self.policy.hold_messages == 0:
            raise Disconnected(f"lane {self.lane} has no connection")
        if self.outbox.messages >= self.policy.hold_messages:
            raise Backpressure(f"lane {self.lane} has no connection and holds all it may")

    def _pieces(
        self, subject: str, data: bytes, reply: str, headers: dict[str, str] | None
    ) -> list[Outgoing]:
        if len(data) <= self.whole_bytes_max:
            return [Outgoing(subject, data, reply, headers)]
        self._streams += 1
        stream = f"{re.sub(r'[^A-Za-z0-9_.-]', '_', self.requests.inbox)[-60:]}.{self._streams}"
        size = min(self.whole_bytes_max, chunks.PIECE_BYTES)
        return [
            Outgoing(subject, piece, reply, (headers or {}) | header)
            for piece, header in chunks.split(data, stream, size)
        ]

    async def request(self, subject: str, data: bytes, timeout_s: float) -> bytes:
        """Publish and wait for the one answer."""
        if not self.connected:
            raise Disconnected(f"lane {self.lane} has no connection")
        reply, future = self.requests.open(subject)
        try:
            self.publish(subject, data, reply)
            async with asyncio.timeout(timeout_s):
                return await future
        except TimeoutError as error:
            raise DeadlineExceeded(f"no answer from {subject} within {timeout_s} s") from error
        finally:
            self.requests.close(reply)

    def probe(self, subject: str, data: bytes, unreachable: Callable[[], None]) -> None:
        """Publish; `unreachable` is called when nobody listens."""
        reply = self.requests.open_probe(unreachable, self.now_s())
        self.publish(subject, data, reply)

    # ------------------------------------------------------------ receiving

    def open_inlet(self, pattern: str, handler: Handler, queue: str) -> Inlet:
        """Begin to receive for a subscription."""
        collector = chunks.Collector(self.policy.message_bytes_max)
        inlet = Inlet(pattern, handler, queue, collector)
        self.inlets.append(inlet)
        return inlet

    def close_inlet(self, inlet: Inlet) -> None:
        """Receive no further for a subscription; closing twice is fine."""
        self.inlets = [kept for kept in self.inlets if kept is not inlet]

    async def deliver(
        self, inlet: Inlet, message: BusMessage, headers: Mapping[str, str] | None
    ) -> None:
        """Run the handler of one message under supervision; pieces wait until they are complete.

        Raises `CancelledError` only when the subscription's own task is being cancelled. A handler
        that lets one escape on its own account is treated as one that raised.
        """
        if headers and chunks.HEADER in headers:
            collector = None if inlet.queue else inlet.collector
            data = self._collect(collector, message, headers[chunks.HEADER])
            if data is None:
                return
            message = replace(message, data=data)
        self.counters.delivered += 1
        self.counters.delivered_bytes += len(message.data)
        inlet.busy_since_s, inlet.stuck_reported = self.now_s(), False
        try:
            await inlet.handler(message)
        except asyncio.CancelledError as error:
            task = asyncio.current_task()
            if task is not None and task.cancelling():
                raise
            self._handler_failed(message, "handler_cancelled", error)
        except Exception as error:  # noqa: BLE001 - the bus is a boundary: becomes an error reply
            self._handler_failed(message, "handler_error", error)
        finally:
            inlet.busy_since_s = None

    def answer(self, reply: str, data: bytes, headers: Mapping[str, str]) -> None:
        """Hand what arrived on the inbox to whoever asked; pieces wait until they are complete."""
        whole: bytes | None = data
        if chunks.HEADER in headers:
            whole = self._collect(self._answers, BusMessage(reply, data), headers[chunks.HEADER])
        if whole is not None:
            self.requests.resolve(reply, whole, headers)

    def _collect(
        self, collector: chunks.Collector | None, message: BusMessage, header: str
    ) -> bytes | None:
        try:
            if collector is None:
                raise chunks.ChunkError("a message in pieces cannot go to a queue group")
            return collector.add(header, message.data, self.now_s())
        except chunks.ChunkError as error:
            self.counters.bad_chunks += 1
            self.report("bad_chunk", str(error), message.subject)
            return None

    def _handler_failed(self, message: BusMessage, kind: str, error: BaseException) -> None:
        self.counters.handler_errors += 1
        self.report(kind, f"{type(error).__name__}: {error}", message.subject)
        if not message.reply:
            return
        data, headers = write_error(error)
        try:
            self.publish(message.reply, data, headers=headers)
        except OperatingError as refusal:  # the requester runs into its own deadline
            self.report("message_lost", f"error reply: {refusal}", message.subject)

    # ------------------------------------------------------------ housekeeping

    def now_s(self) -> float:
        """The event loop's clock, which only ever bounds waits."""
        return asyncio.get_running_loop().time()

    def report(self, kind: str, detail: str, subject: str = "") -> None:
        """Tell the owner of the bus about a fault, soon: its code must not run inside a carrier."""
        fault = BusFault(self.lane, kind, detail, subject)
        asyncio.get_running_loop().call_soon(self._on_fault, fault)

    def sweep(self) -> None:
        """Give up on pieces that stopped coming and report handlers that do not come back."""
        now = self.now_s()
        self.requests.expire(now)
        collectors = [(self.requests.inbox, self._answers)]
        collectors += [(inlet.pattern, inlet.collector) for inlet in self.inlets]
        for where, collector in collectors:
            for stream in collector.expire(now):
                self.counters.bad_chunks += 1
                self.report("bad_chunk", f"pieces of {stream} stopped coming", where)
        for inlet in self.inlets:
            since = inlet.busy_since_s
            if since is None or inlet.stuck_reported or now - since < self.policy.handler_stuck_s:
                continue
            inlet.stuck_reported = True
            self.report("handler_stuck", f"busy for {now - since:.0f} s", inlet.pattern)

    def statistics(self) -> LaneStatistics:
        """A copy of the counters, with the present fill of the outbox."""
        outbox = self.outbox
        return replace(self.counters, outbox_messages=outbox.messages, outbox_bytes=outbox.bytes)
