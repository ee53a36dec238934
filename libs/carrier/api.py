"""Carries UB frames from one die to another; open this file first.

A carrier is one die's end: it sends frames of that die to others, and hands over what others send
to it. A process that serves several dies opens one carrier for each. What a frame is and when it
arrives on the emulated timeline is not its business: it moves bytes, as fast as the machine can.

What may happen to a frame
- **Lost**: never while both processes live, the epoch stays and the sender was not refused. With a
  dying process die the frames it had not published and the ones it had not taken.
- **Duplicated, reordered**: never within one ordered pair. Between pairs there is no order.
- **Altered or cut**: never. A frame arrives whole or not at all, whenever a process is killed.
- **Delivered late to the wrong life**: never. Frames of an epoch before the present one are dropped
  at both ends; a process that replaces a dead one never sees frames that were meant for the dead.
  What the dead had published whole is still delivered, before its successor's first frame.

`send` never waits: what the ring does not take goes to a bounded outbox, and when that is full too
`Backpressure` says so and nothing of the frame was taken. Who replaced whom is known by the number
of a die's **life**: a process that was replaced and lives on gets `StaleEpoch` for each `send`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from libs.errors import OperatingError

__all__ = [
    "Buffer",
    "Carrier",
    "CarrierClosed",
    "CarrierStatistics",
    "Frame",
    "FrameHandler",
    "Unroutable",
]

Buffer = bytes | bytearray | memoryview
#: One frame, or the parts of one frame in order; parts are only read, and only during `send`.
Frame = Buffer | Sequence[Buffer]
#: Called with the source die and the frame's bytes.
FrameHandler = Callable[[int, memoryview], None]


@dataclass(slots=True)
class CarrierStatistics:
    """Counters of one carrier since its start; `waiting_*` is the present fill of the outboxes.

    `refused` frames were never taken (the sender got `Backpressure`). `stale` frames belonged to an
    older epoch or to another life, `unfinished` ones to a sender that died in the middle. `corrupt`
    frames failed their checksum; `broken` rings contradicted themselves and were left. `unseen`
    counts looks at a slot whose words had not all become visible yet.
    """

    frames_sent: int = 0
    bytes_sent: int = 0
    frames_received: int = 0
    bytes_received: int = 0
    refused: int = 0
    stale: int = 0
    unfinished: int = 0
    corrupt: int = 0
    broken: int = 0
    unseen: int = 0
    waiting_frames: int = 0
    waiting_bytes: int = 0


class Carrier(Protocol):
    """One die's end; the module docstring says what is promised.

    All methods belong to the event loop given to `start`.
    """

    def on_frame(self, handler: FrameHandler) -> None:
        """Call `handler(source_die, view)` for each frame; set it before `start`.

        By default the view is given: private memory, the handler may keep it. A carrier opened with
        `lend=True` saves that copy and lends its own memory: it is valid until the handler returns,
        and a handler that keeps a view (or an array over it) gets a `LocalProtocolError`.
        """
        ...

    def start(self, loop: asyncio.AbstractEventLoop) -> None:
        """Begin a new life of this die and listen."""
        ...

    def reaches(self, target_die: int) -> bool:
        """Whether `target_die` can be sent to; another carrier has to serve the others."""
        ...

    def send(self, target_die: int, frame: Frame) -> None:
        """Take one frame whole, or raise and take nothing of it.

        Raises `Backpressure` (full now), `CapacityExceeded` (it will never fit, or the memory of
        the host is used up), `Unroutable`, `StaleEpoch` (this process was replaced) or
        `CarrierClosed`.
        """
        ...

    def close(self) -> None:
        """Stop at once; what waits in outboxes is discarded. Closing twice is fine."""
        ...

    def statistics(self) -> CarrierStatistics:
        """A copy of the counters."""
        ...


class Unroutable(OperatingError):
    """The die is not one that this carrier reaches."""

    code = "unroutable"


class CarrierClosed(OperatingError):
    """The carrier was closed, or never started."""

    code = "carrier_closed"
