"""The bus on NATS; the only module that imports the client (nats-py).

Each lane is one client connection, wrapped so that none of the client's measured habits reaches the
rest of the system. What the wrapper does about each of them:

- `publish` of the client swallows cancellation and blocks for seconds when the socket is full: only
  the lane's sender task calls it, everybody else puts into the outbox.
- Payload at the limit plus headers closes the client for good: whole messages stay 16 KiB below.
- A handler that lets `CancelledError` escape silently ends its subscription: `LaneEnd.deliver`.
- A raising `error_cb` ends the read loop: ours only notes the error, as do the other callbacks.
- A timed-out `flush` leaves a cancelled future among the expected PONGs, and the PONG that comes
  later ends the read loop: round trips are never cancelled while their connection lives.
- While disconnected the client buffers silently: the sender waits, and `publish` above it refuses.
- `drain` loses what its timeout cuts off: subscriptions first, then outbox, then connection.
- Reconnects all come at the same moment: the wait is spread by client name.
- Defaults notice a dead server after minutes: pings every two seconds, two may be outstanding.
- The client may close for good without an exception: `on_closed` is for leaving the process.
"""

from __future__ import annotations

import asyncio
import contextlib
import re
from collections.abc import Callable, Coroutine
from typing import Any, Self

import nats
from nats.aio.client import Client
from nats.aio.msg import Msg
from nats.aio.subscription import Subscription as ClientSubscription
from nats.nuid import NUID

from libs.bus.api import (
    BusMessage,
    DeadlineExceeded,
    Denied,
    Disconnected,
    FaultHandler,
    Handler,
    Lane,
    LanePolicy,
    Subscription,
)
from libs.bus.lane import Inlet, LaneEnd
from libs.bus.lane_bus import LaneBus, ignore_fault
from libs.bus.nats_options import NatsOptions, reconnect_wait_s
from libs.bus.outbox import Outgoing

__all__ = ["NatsBus", "NatsLane", "NatsOptions"]

HEADER_ROOM_BYTES = 16 * 1024
CLIENT_BUFFER_BYTES = 1024 * 1024  # beyond it the client's publish waits for the socket
WRITE_STALLED_S = 2.0
CLOSE_S = 1.0
ROUND_TRIP_NEVER_S = 86_400  # callers stop waiting, the round trip itself does not
BURST = 64  # messages the sender hands over before it lets the event loop run

_DENIED = re.compile(r'permissions violation for (publish|subscription) to "([^"]+)"')


class NatsBus(LaneBus["NatsLane"]):
    """A bus on a NATS server; made by `connect`."""

    @classmethod
    async def connect(
        cls,
        options: NatsOptions,
        *,
        on_fault: FaultHandler = ignore_fault,
        on_closed: Callable[[str], None] = lambda _: None,
    ) -> Self:
        """Open every lane, or raise `Disconnected` or `Denied` within `options.connect_s`.

        `on_closed` is called with the reason when a connection has ended for good.
        """
        ends = {
            lane: NatsLane(lane, policy, options, on_fault, on_closed)
            for lane, policy in options.policies.items()
        }
        try:
            for end in ends.values():
                await end.open()
        except BaseException:
            await asyncio.gather(*(end.close() for end in ends.values()))
            raise
        return cls(ends)


class _NatsSubscription:
    def __init__(self, end: NatsLane, inlet: Inlet, inner: ClientSubscription) -> None:
        self._end = end
        self.inlet = inlet
        self.inner = inner

    @property
    def pending(self) -> int:
        return self.inner.pending_msgs + (self.inlet.busy_since_s is not None)

    async def unsubscribe(self) -> None:
        await self._end.forget(self)


class NatsLane(LaneEnd):
    """One lane of one `NatsBus`: a client connection and the task that feeds it."""

    def __init__(
        self,
        lane: Lane,
        policy: LanePolicy,
        options: NatsOptions,
        on_fault: FaultHandler,
        on_closed: Callable[[str], None],
    ) -> None:
        inbox = f"{options.inbox_prefix}.{re.sub(r'[^A-Za-z0-9_-]', '_', options.name)}"
        super().__init__(lane, policy, f"{inbox}.{NUID().next().decode()}", on_fault)
        self._options = options
        self._on_closed = on_closed
        self._client = Client()
        self._wakeup = asyncio.Event()
        self._sender: asyncio.Task[None] | None = None
        self._subscriptions: list[_NatsSubscription] = []
        self._round_trips: set[asyncio.Task[None]] = set()
        self._denied: set[str] = set()
        self._last_error = "no answer"
        self._rejected: asyncio.Future[str] | None = None
        self._begun = False
        self._closing = False

    # ------------------------------------------------------------ life of the connection

    async def open(self) -> None:
        """Connect and listen on the inbox."""
        self._rejected = rejected = asyncio.get_running_loop().create_future()
        connecting = asyncio.create_task(self._connect())
        either = asyncio.FIRST_COMPLETED  # the client would try for ever, rejected or not
        await asyncio.wait(
            {connecting, rejected}, timeout=self._options.connect_s, return_when=either
        )
        if not connecting.done():
            connecting.cancel()
            await asyncio.wait({connecting})
        if rejected.done():
            raise Denied(f"broker at {self._options.url}: {rejected.result()}")
        if connecting.cancelled() or connecting.exception() is not None or not self.connected:
            text = f"no broker at {self._options.url}: {self._last_error}"
            raise Disconnected(f"{text}; is nats-server running there?")
        self._sender = asyncio.create_task(self._send_forever())
        await self._client.subscribe(f"{self.requests.inbox}.>", cb=self._on_answer)
        await self.flush(self._options.connect_s)

    async def _connect(self) -> None:
        options = self._options
        # The client declares whole seconds and takes any number.
        times: dict[str, Any] = {
            "connect_timeout": options.connect_s,
            "reconnect_time_wait": reconnect_wait_s(options, self.lane),
            "ping_interval": options.detect_s / 3,
            "flush_timeout": WRITE_STALLED_S,
        }
        self._begun = True
        await self._client.connect(
            servers=[options.url],
            name=f"{options.name}/{self.lane}",
            error_cb=self._note_error,
            disconnected_cb=self._note_disconnected,
            reconnected_cb=self._note_reconnected,
            closed_cb=self._note_closed,
            max_reconnect_attempts=-1,
            max_outstanding_pings=2,
            pending_size=CLIENT_BUFFER_BYTES,
            **times,
            **options.credentials,
        )
        self._learn_limits()

    def _learn_limits(self) -> None:
        room = self._client.max_payload - HEADER_ROOM_BYTES
        self.whole_bytes_max = max(room, self._client.max_payload // 2)

    @property
    def connected(self) -> bool:
        return self._client.is_connected

    async def close(self) -> None:
        self._closing = True
        self._wakeup.set()
        self._forget_round_trips()
        if not self._begun:
            return
        closing = asyncio.create_task(self._client.close())
        done, _ = await asyncio.wait({closing}, timeout=CLOSE_S)
        if not done:  # a server that takes nothing: the socket goes with the process
            closing.cancel()
        if self._sender is not None:  # it may be inside the client's publish: now that ends too
            self._sender.cancel()
            await asyncio.wait({self._sender}, timeout=CLOSE_S)

    # ------------------------------------------------------------ callbacks: note, never raise

    async def _note_error(self, error: Exception) -> None:
        text = self._last_error = str(error) or type(error).__name__
        denied, rejected = _DENIED.search(text), self._rejected
        if "authorization" in text.lower() and rejected is not None and not rejected.done():
            rejected.set_result(text)
        if denied is not None:
            self.counters.denied += 1
            if denied[1] == "subscription":
                self._denied.add(denied[2])
            self.requests.fail(Denied(f"the broker forbids {denied[2]}"), denied[2])
            self.report("denied", text, denied[2])
        elif isinstance(error, nats.errors.SlowConsumerError):
            self.counters.dropped += 1
            self.report("slow_consumer", "pending queue is full", error.subject)
        else:
            self.report("client_error", text)

    async def _note_disconnected(self) -> None:
        self._forget_round_trips()
        if self._closing:
            return
        self.counters.disconnects += 1
        self.requests.fail(Disconnected(f"lane {self.lane} lost its connection", definite=False))
        self.report("disconnected", self._last_error)

    async def _note_reconnected(self) -> None:
        self._learn_limits()
        self.wake()
        self.report("reconnected", self._options.url)

    async def _note_closed(self) -> None:
        if not self._closing:
            self.dead = True
            reason = f"lane {self.lane}: {self._client.last_error}"
            self.report("closed", reason)
            asyncio.get_running_loop().call_soon(self._on_closed, reason)

    # ------------------------------------------------------------ sending

    def wake(self) -> None:
        self._wakeup.set()

    async def _send_forever(self) -> None:
        """Hand the outbox to the client, in order; nobody else publishes on this connection."""
        burst = 0
        while not self._closing:
            item = self.outbox.head()
            if item is None:
                self._wakeup.clear()
                await self._wakeup.wait()
                continue
            if not self._client.is_connected:  # keep the head; what is accepted stays accepted
                if self._client.is_closed:
                    return
                await asyncio.sleep(0.01)
                continue
            self.outbox.pop()
            if not isinstance(item, Outgoing):
                if not item.done():
                    item.set_result(None)
                continue
            try:
                await self._client.publish(item.subject, item.data, item.reply, item.headers)
            except nats.errors.Error as error:
                self.counters.lost += 1
                self.report("message_lost", str(error) or type(error).__name__, item.subject)
            burst = (burst + 1) % BURST
            if burst == 0:
                await asyncio.sleep(0)

    async def flush(self, timeout_s: float) -> None:
        """First through the outbox, then to the server and back."""
        if not self.connected:
            raise Disconnected(f"lane {self.lane} has no connection")
        barrier: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.outbox.put_barrier(barrier)
        self.wake()
        try:
            async with asyncio.timeout(timeout_s):
                await barrier
                await self._round_trip()
        except TimeoutError as error:
            raise DeadlineExceeded(f"lane {self.lane} was not flushed in {timeout_s} s") from error

    async def _round_trip(self) -> None:
        trip = asyncio.create_task(self._client.flush(ROUND_TRIP_NEVER_S))
        self._round_trips.add(trip)
        trip.add_done_callback(self._round_trips.discard)
        await asyncio.wait({trip})  # cancelling this wait leaves the round trip alone
        if trip.cancelled() or trip.exception() is not None:
            raise Disconnected(f"lane {self.lane} lost its connection", definite=False)

    def _forget_round_trips(self) -> None:
        for trip in self._round_trips:
            trip.cancel()

    # ------------------------------------------------------------ receiving

    async def _on_answer(self, msg: Msg) -> None:
        self.answer(msg.subject, msg.data, msg.headers or {})

    async def subscribe(self, pattern: str, handler: Handler, queue: str) -> Subscription:
        if not self.connected:
            raise Disconnected(f"lane {self.lane} has no connection")
        inlet = self.open_inlet(pattern, handler, queue)

        async def receive(msg: Msg) -> None:
            await self.deliver(inlet, BusMessage(msg.subject, msg.data, msg.reply), msg.headers)

        inner = await _whole(
            self._client.subscribe(
                pattern,
                queue=queue,
                cb=receive,
                pending_msgs_limit=self.policy.pending_messages,
                pending_bytes_limit=self.policy.pending_bytes,
            )
        )
        subscription = _NatsSubscription(self, inlet, inner)
        self._subscriptions.append(subscription)
        await self._round_trip()
        if pattern.lower() in self._denied:  # the client reports in lower case
            self._denied.discard(pattern.lower())
            await self.forget(subscription)
            raise Denied(f"the broker forbids listening on {pattern}")
        return subscription

    async def forget(self, subscription: _NatsSubscription) -> None:
        """End a subscription; ending it twice is fine."""
        self.close_inlet(subscription.inlet)
        if subscription in self._subscriptions:
            self._subscriptions.remove(subscription)
            with contextlib.suppress(nats.errors.Error):
                await _whole(subscription.inner.unsubscribe())

    async def end_intake(self, timeout_s: float) -> int:
        if not self.connected:
            return sum(subscription.pending for subscription in self._subscriptions)
        calls: list[Any] = [subscription.inner.drain for subscription in self._subscriptions]
        drains = {asyncio.create_task(drain()) for drain in calls}
        if drains:
            _, late = await asyncio.wait(drains, timeout=timeout_s)
            for drain in late:
                drain.cancel()
        return sum(subscription.pending for subscription in self._subscriptions)


async def _whole(call: Coroutine[Any, Any, Any]) -> Any:
    """Run a client call to its end even when the caller is cancelled in between."""
    return await asyncio.shield(asyncio.ensure_future(call))
