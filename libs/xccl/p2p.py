"""The words of send and receive: what the machines are told, and what they ask for (P036).

    step  sender                                     receiver
    1     `Load`         application -> half buffer   5  `start`, reads its metadata
    2     `RemoteWrite`  half buffer -> slot          6  `LocalCopy`   slot -> application
    3     `Fence`, then `RemoteWrite` of the tail     7  `Fence`, then `RemoteWrite` of the ACK
    4     `Wait` for the ACK                             `Complete`
    8     `Complete`

`libs.xccl.send` and `libs.xccl.receive` hold the machines, `libs.xccl.endpoint` one die with all
its pairs. Whoever hosts them carries the requests out and answers:

    Load         read the range; answer `Loaded`
    RemoteWrite  pass it to the fabric; no answer. It may be lost, doubled, late or out of order
    Fence        answer `Fenced` once no earlier write of the lane can land after a later one
    LocalCopy    `DieMemory` moves the bytes (`Endpoint.copy`); answer `Copied`
    Wait         answer `WaitOver` after the delay. `polling` says whether the cores spin
                 meanwhile (synchronous) or sleep until they are woken (asynchronous)

Requests are numbered by lane, position and attempt, so an answer that comes after the machine has
moved on is recognised and ignored.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from libs import units
from libs.errors import BadInput, DeadlineExceeded, OperatingError, PeerLost, TransferFailed
from libs.patience import wait_ns
from libs.xccl.memory import Area, Destination, PairEpoch
from libs.xccl.paths import Path

#: `MetadataField.tail` of a message that its writer gave up.
ABORTED = (1 << 64) - 1
_NAMESPACE_SHIFT = 32


class Role(StrEnum):
    """Which end of an ordered pair a die is."""

    SEND = "send"
    RECEIVE = "receive"


@dataclass(frozen=True, slots=True)
class Flow:
    """One direction between this die and `peer`; it carries one message at a time."""

    peer: int
    role: Role


class Step(StrEnum):
    """Where a message was when it failed."""

    OPEN = "open"
    DATA = "data"
    ACK = "ack"
    TAIL = "tail"
    CHECKSUM = "checksum"


def event_id(namespace: int, number: int) -> int:
    """The event of transfer `number` of one DistFlow instance: instances cannot collide."""
    if not (0 <= namespace < 1 << 32 and 0 <= number < 1 << 32):
        raise BadInput(f"event {number} of namespace {namespace} needs 32 bits each", field="event")
    return namespace << _NAMESPACE_SHIFT | number


def namespace_of(event: int) -> int:
    """The DistFlow instance to which an event belongs."""
    return event >> _NAMESPACE_SHIFT


@dataclass(frozen=True, slots=True)
class Limits:
    """Bounds of every wait (assumed; a 9 MB send takes 136 us, a straggler of Fig. 20 3 ms)."""

    wait_ns: int = units.ms(2)
    #: Waits without any progress before the peer counts as lost. The receiver waits longer: its
    #: sender may not have begun.
    retransmits_max: int = 4
    receive_waits_max: int = 64
    #: Messages that may be queued on one flow.
    outstanding_max: int = 64

    def repeat_ns(self, retransmits: int) -> int:
        """The sender's wait after so many retransmits."""
        return wait_ns(self.wait_ns, retransmits)


# ---------------------------------------------------------------- what callers ask for


@dataclass(frozen=True, slots=True)
class Send:
    """Send a range of the application area. With `into` it goes straight to that destination of
    the peer (zero-copy), without it through the managed ring and one copy at the receiver.

    `charge_bytes` is what the message weighs on the emulated timeline, 0 for what it is.
    """

    event: int
    peer: int
    offset: int
    nbytes: int
    aivs: int = 2
    path: Path = Path.MTE
    into: Destination | None = None
    asynchronous: bool = False
    charge_bytes: int = 0

    @property
    def flow(self) -> Flow:
        """The flow that carries it."""
        return Flow(self.peer, Role.SEND)


@dataclass(frozen=True, slots=True)
class Receive:
    """Receive a message of exactly `nbytes`; `registered` when the peer writes it directly."""

    event: int
    peer: int
    offset: int
    nbytes: int
    aivs: int = 2
    registered: Destination | None = None
    asynchronous: bool = False
    charge_bytes: int = 0

    @property
    def flow(self) -> Flow:
        """The flow that carries it."""
        return Flow(self.peer, Role.RECEIVE)


# ---------------------------------------------------------------- effects


@dataclass(frozen=True, slots=True)
class Tag:
    """What the receiving memory judges a write by.

    `number` is the position of a chunk in its lane, or the generation of a destination.
    """

    epoch: PairEpoch
    lane: int
    number: int


@dataclass(frozen=True, slots=True)
class Load:
    """MTE2: bring a chunk into one half of the unified buffer (`half` 0 or 1)."""

    flow: Flow
    lane: int
    half: int
    offset: int
    nbytes: int
    number: int


@dataclass(frozen=True, slots=True)
class RemoteWrite:
    """MTE3 or DMA: write `data` at `offset` of an area of die `target`.

    Offsets into `Area.MANAGED` count from the start of the ring of this ordered pair; only the
    receiver knows where that lies.
    """

    flow: Flow
    target: int
    area: Area
    offset: int
    data: bytes
    tag: Tag
    path: Path = Path.MTE


@dataclass(frozen=True, slots=True)
class Fence:
    """Order every earlier write of the lane before every later one."""

    flow: Flow
    lane: int
    number: int


@dataclass(frozen=True, slots=True)
class LocalCopy:
    """Copy a slot's payload to the application area, through both halves of the buffer."""

    flow: Flow
    lane: int
    position: int
    offset: int
    nbytes: int


@dataclass(frozen=True, slots=True)
class Wait:
    """Say `WaitOver(number)` after `delay_ns`; every message begins with one."""

    flow: Flow
    event: int
    number: int
    delay_ns: int
    step: Step
    polling: bool


@dataclass(frozen=True, slots=True)
class Complete:
    """The message is there, whole; a sender may reuse its source, a receiver read what it got."""

    flow: Flow
    event: int
    nbytes: int


@dataclass(frozen=True, slots=True)
class Failed:
    """The message did not arrive, or, with `definite` False, its sender cannot know.

    Nothing of it touches the application area from here on.
    """

    flow: Flow
    event: int
    step: Step
    reason: str
    definite: bool

    @property
    def peer(self) -> int:
        """The other die."""
        return self.flow.peer

    def error(self) -> OperatingError:
        """The failure as an exception, for callers that raise."""
        kind: type[OperatingError]
        match self.step:
            case Step.CHECKSUM | Step.DATA:
                kind = TransferFailed
            case Step.ACK | Step.TAIL:
                kind = DeadlineExceeded
            case Step.OPEN:
                kind = PeerLost
            case _:
                raise AssertionError(f"unknown step {self.step!r}")
        text = f"{self.flow.role} with die {self.peer} failed at {self.step}: {self.reason}"
        return kind(text, definite=self.definite)


Effect = Load | RemoteWrite | Fence | LocalCopy | Wait | Complete | Failed

# ---------------------------------------------------------------- events


@dataclass(frozen=True, slots=True)
class Loaded:
    """The chunk of a `Load` is in its half."""

    flow: Flow
    lane: int
    number: int


@dataclass(frozen=True, slots=True)
class Fenced:
    """A `Fence` holds."""

    flow: Flow
    lane: int
    number: int


@dataclass(frozen=True, slots=True)
class Copied:
    """A `LocalCopy` is done; `intact` is False when the slot was closed in the meantime."""

    flow: Flow
    lane: int
    position: int
    intact: bool = True


@dataclass(frozen=True, slots=True)
class Visible:
    """A field of `lane` changed in the local metadata area."""

    flow: Flow
    lane: int


@dataclass(frozen=True, slots=True)
class WaitOver:
    """The delay of `Wait(number)` has passed."""

    flow: Flow
    number: int


Event = Loaded | Fenced | Copied | Visible | WaitOver
