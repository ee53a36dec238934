"""The contract between decisions and the world: open this file first.

    event + its emulated time  -->  core.handle(event, now_ns)  -->  list of effects

A **core** is a plain class without sockets, clocks, threads or awaits; every decision of the system
is made in one. A **host** (`libs.runtime`) feeds events to cores and carries effects out:
`AsyncioHost` for one service process on NATS, `SimHost` for any number of cores on one heap of
integer nanoseconds. A **shell** wires one core to its subjects and its executor.

Rules for cores
- Time and randomness are arguments. `now_ns` never goes back; `event.at_ns` is the event's own
stamp
  on the emulated timeline and may lie before `now_ns` when senders disagree. Work is charged by
  stamp.
- Timers bound waits and nothing else: under `AsyncioHost` they run on real time (they must catch a
  peer that is really dead), under `SimHost` on emulated time. No result depends on a timer.
- No iteration over sets where order matters. Every queue has a bound, every wait a deadline.
- Bad input from a peer is an effect (an error reply). An exception out of `handle` is our bug: the
  host stops the core and raises `InvariantError` with the story.
- Effects are carried out in list order.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, ClassVar, Protocol


class Message(Protocol):
    """What travels: a frozen dataclass of `libs.wire.messages`, known by its `KIND`."""

    KIND: ClassVar[str]


# ---------------------------------------------------------------- events


@dataclass(frozen=True, slots=True)
class Started:
    """The first event of every core: arm timers, introduce yourself."""

    at_ns: int


@dataclass(frozen=True, slots=True)
class Received:
    """A message arrived, over the bus or through the fabric.

    `sender` is the peer's actor name and `incarnation` the number of its life; `reply_to` is set
    when the peer waits for a `Reply`.
    """

    at_ns: int
    message: Any
    sender: str
    incarnation: int
    epoch: int
    reply_to: str = ""


@dataclass(frozen=True, slots=True)
class TimerFired:
    """The timer `name`, set with `SetTimer`, is due."""

    at_ns: int
    name: str


@dataclass(frozen=True, slots=True)
class ComputeDone:
    """The executor finished job `job_id`; `at_ns` is start + cost on the emulated timeline.

    `result` is what `Executor.run` returned, or the exception it raised.
    """

    at_ns: int
    job_id: int
    result: Any


@dataclass(frozen=True, slots=True)
class Unreachable:
    """A `Send` found nobody listening on `subject`: surely not delivered, so a retry is safe."""

    at_ns: int
    subject: str
    message: Any


Event = Started | Received | TimerFired | ComputeDone | Unreachable


# ---------------------------------------------------------------- effects


@dataclass(frozen=True, slots=True)
class Send:
    """Publish a control message on the bus. `at_ns` (default: now) is its departure stamp.

    With `probe` the host answers with `Unreachable` when nobody listens.
    """

    subject: str
    message: Any
    at_ns: int | None = None
    probe: bool = False


@dataclass(frozen=True, slots=True)
class Reply:
    """Answer the peer that waits on `reply_to`."""

    reply_to: str
    message: Any


@dataclass(frozen=True, slots=True)
class Transmit:
    """Move a frame from die `source` to die `target` over the UB plane, through the fabric.

    `charge_bytes` and `repeat` are what the frame costs on the emulated timeline, which need not be
    what the tensors really weigh: a frame of the small model stands for `repeat` exchanges of the
    profiled one, `charge_bytes` in all.
    """

    source: int
    target: int
    message: Any
    charge_bytes: int
    repeat: int = 1
    at_ns: int | None = None


@dataclass(frozen=True, slots=True)
class Deliver:
    """Hand already encoded bytes to whoever serves `subject`, stamped `at_ns`; the fabric's own
    effect.
    """

    subject: str
    message: Any
    at_ns: int


@dataclass(frozen=True, slots=True)
class SetTimer:
    """(Re)arm the timer `name` to fire after `delay_ns`; at most one timer per name."""

    name: str
    delay_ns: int


@dataclass(frozen=True, slots=True)
class CancelTimer:
    """Disarm the timer `name`; disarming an unarmed timer is fine."""

    name: str


@dataclass(frozen=True, slots=True)
class Compute:
    """Run `job` on this actor's executor, from `at_ns` (default: now) for `cost_ns` of emulated
    time.

    The answer is a `ComputeDone`. With `paced` the answer is held until the wall clock has reached
    its stamp, so that a fast machine does not run ahead of the people who watch.
    """

    job_id: int
    job: Any
    cost_ns: int
    at_ns: int | None = None
    paced: bool = False


@dataclass(frozen=True, slots=True)
class Present:
    """Show `item` to the person or client behind `key`; held until its emulated time is reached."""

    key: str
    item: Any
    at_ns: int


@dataclass(frozen=True, slots=True)
class Record:
    """A domain fact; the host turns it into a log line, a metric and a trace event."""

    name: str
    fields: dict[str, Any] = field(default_factory=dict)


Effect = (
    Send | Reply | Transmit | Deliver | SetTimer | CancelTimer | Compute | Present | Record
)  # fmt: skip


# ---------------------------------------------------------------- the two protocols


class Core(Protocol):
    """A decision maker. `name` is its actor name, unique in the pod."""

    name: str

    def handle(self, event: Event, now_ns: int) -> list[Effect]:
        """Take one event, return what must happen."""
        ...

    def validate(self) -> None:
        """Assert every invariant of the state; hosts call it after each event when asked to."""
        ...


class Executor(Protocol):
    """Computes what a core cannot decide: `tensor` runs the model, `digest` chains digests."""

    def run(self, job: Any) -> Any:
        """Run one job to its end; called from one thread at a time."""
        ...
