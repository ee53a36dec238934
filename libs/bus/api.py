"""The bus that every service speaks: subjects, lanes, typed errors. Open this file first.

A bus has three **lanes**, each a connection of its own with its own bounded outbox, so that a burst
of tensors cannot stand in front of a rollback: control, token, bulk. `NatsBus` (`libs.bus.nats`)
and `MemoryBus` (`libs.bus.memory`) implement `Bus` and pass one conformance suite.

What may happen to a message
- **Lost**: yes, at most once is the promise. A broker that dies, a subscriber that is not there or
  whose pending queue is full, all lose messages. What matters is acknowledged and sent again above.
- **Duplicated**: never by the bus. Senders that try again must be idempotent.
- **Reordered**: never between one publisher and one subscription (a wildcard one too) on one lane.
  Across subscriptions, across lanes and across publishers there is no order.
- **Altered or cut**: never. Messages above the broker's payload limit travel in pieces with total
  length and checksum, and arrive whole or not at all.

`publish` never waits and never blocks: a full outbox raises `Backpressure`, a lost connection
raises `Disconnected` (the control lane still takes a few messages and sends them after the
reconnect). Because it is not a coroutine, cancelling a task can never cut a message in half.

A handler is called for one message at a time per subscription. It should only hand the message on:
while it runs, everything behind it on the same subscription waits. When it raises, the requester
gets a typed error, the bus reports a fault, and the subscription lives on.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Protocol

from libs.errors import CapacityExceeded, DeadlineExceeded, OperatingError, PeerLost

__all__ = [
    "POLICIES",
    "Bus",
    "BusFault",
    "BusMessage",
    "DeadlineExceeded",
    "Denied",
    "Disconnected",
    "Draining",
    "FaultHandler",
    "Handler",
    "Lane",
    "LanePolicy",
    "LaneStatistics",
    "NoResponders",
    "PayloadTooLarge",
    "Subscription",
]

MIB = 1024 * 1024


class Lane(StrEnum):
    """A class of traffic with a connection of its own."""

    CONTROL = "control"
    TOKEN = "token"
    BULK = "bulk"


@dataclass(frozen=True, slots=True)
class LanePolicy:
    """Bounds of one lane.

    The outbox holds what is accepted and not yet written; `pending_*` bounds what each subscription
    holds unhandled (beyond it messages are dropped and counted); `hold_messages` are still accepted
    while the connection is down; a handler that runs longer than `handler_stuck_s` is reported.
    """

    outbox_messages: int
    outbox_bytes: int
    message_bytes_max: int
    pending_messages: int
    pending_bytes: int
    hold_messages: int = 0
    handler_stuck_s: float = 10.0


POLICIES: Mapping[Lane, LanePolicy] = {
    Lane.CONTROL: LanePolicy(4096, 16 * MIB, 4 * MIB, 16384, 64 * MIB, hold_messages=256),
    Lane.TOKEN: LanePolicy(4096, 16 * MIB, 4 * MIB, 16384, 64 * MIB),
    Lane.BULK: LanePolicy(8192, 64 * MIB, 32 * MIB, 16384, 256 * MIB),
}


@dataclass(frozen=True, slots=True)
class BusMessage:
    """What a handler receives; `reply` is where the sender waits for an answer, or empty."""

    subject: str
    data: bytes
    reply: str = ""


@dataclass(frozen=True, slots=True)
class BusFault:
    """Something went wrong that no caller could be told about.

    `kind` is one of: slow_consumer, handler_error, handler_cancelled, handler_stuck, denied,
    disconnected, reconnected, bad_chunk, message_lost, client_error, closed.
    """

    lane: Lane
    kind: str
    detail: str
    subject: str = ""


@dataclass(slots=True)
class LaneStatistics:
    """Counters of one lane since the start; `outbox_*` is the present fill.

    `refused` messages were never accepted (the publisher got an error); `lost` ones were accepted
    but could not be sent; `dropped` ones arrived for a subscription whose pending queue was full.
    """

    published: int = 0
    published_bytes: int = 0
    refused: int = 0
    lost: int = 0
    delivered: int = 0
    delivered_bytes: int = 0
    dropped: int = 0
    handler_errors: int = 0
    bad_chunks: int = 0
    denied: int = 0
    disconnects: int = 0
    outbox_messages: int = 0
    outbox_bytes: int = 0


Handler = Callable[[BusMessage], Awaitable[None]]
FaultHandler = Callable[[BusFault], None]


class Subscription(Protocol):
    """Interest in a pattern, until `unsubscribe`."""

    @property
    def pending(self) -> int:
        """Messages that arrived and were not handled yet."""
        ...

    async def unsubscribe(self) -> None:
        """End the interest; messages still pending are discarded."""
        ...


class Bus(Protocol):
    """Everything a service needs of the network; the module docstring says what is promised.

    All methods belong to the event loop on which the bus was connected. Malformed subjects raise
    `BadInput`; an unusable bus raises `Disconnected` or `Draining`.
    """

    @property
    def connected(self) -> bool:
        """Whether every lane has a live connection; detection of a dead peer takes a few pings."""
        ...

    def publish(
        self, subject: str, data: bytes, *, lane: Lane = Lane.CONTROL, reply: str = ""
    ) -> None:
        """Put a message into the lane's outbox; raises `Backpressure` or `PayloadTooLarge`."""
        ...

    def probe(
        self,
        subject: str,
        data: bytes,
        unreachable: Callable[[], None],
        *,
        lane: Lane = Lane.CONTROL,
    ) -> None:
        """Like `publish`, and `unreachable` is called when nobody listens on `subject`."""
        ...

    async def request(
        self, subject: str, data: bytes, timeout_s: float, *, lane: Lane = Lane.CONTROL
    ) -> bytes:
        """Publish and wait for one answer.

        Raises `NoResponders` at once when nobody listens, `DeadlineExceeded` after `timeout_s`, and
        whatever typed error the handler on the other side raised.
        """
        ...

    async def subscribe(
        self, subject: str, handler: Handler, *, queue: str = "", lane: Lane = Lane.CONTROL
    ) -> Subscription:
        """Listen; on return the broker knows, so what others publish from now on arrives.

        Of the subscriptions with one `queue` name, one random member gets each message. Messages
        that travel in pieces cannot be shared out that way and are dropped as `bad_chunk`. Raises
        `Denied` when the broker forbids the subject.
        """
        ...

    async def flush(self, timeout_s: float = 5.0) -> None:
        """Wait until the broker has everything published so far, on all lanes."""
        ...

    async def drain(self, timeout_s: float) -> int:
        """Stop intake, let handlers finish, send what they answered, close.

        Returns the number of messages left unhandled when the time was up: 0 is a clean drain.
        """
        ...

    async def close(self) -> None:
        """Close at once; outboxes are discarded."""
        ...

    def statistics(self) -> Mapping[Lane, LaneStatistics]:
        """A copy of the counters of each lane."""
        ...


# ---------------------------------------------------------------- errors (all under libs.errors)


class PayloadTooLarge(CapacityExceeded):
    """The message exceeds the lane's limit; `size` and `limit` are in bytes."""

    code = "payload_too_large"

    def __init__(self, size: int, limit: int) -> None:
        super().__init__(f"message of {size} bytes, the lane takes at most {limit}")
        self.size = size
        self.limit = limit


class NoResponders(PeerLost):
    """Nobody listens on the subject: surely not delivered."""

    code = "no_responders"
    definite_default = True


class Disconnected(OperatingError):
    """The connection is down; a request under way when it broke may have happened."""

    code = "disconnected"


class Draining(OperatingError):
    """This bus is draining or closed."""

    code = "draining"


class Denied(OperatingError):
    """The broker forbids this client the subject."""

    code = "denied"
