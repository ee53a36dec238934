"""What one rank's side of a collective is made of: fields, limits, states, events, effects."""

from __future__ import annotations

import struct
import zlib
from dataclasses import dataclass
from enum import Enum
from typing import Any

from numpy.typing import NDArray

from libs import units
from libs.errors import RemoteProtocolError
from libs.xccl.agreement import RankMessage, Tell, World

#: Columns of equal length: one batch of rows. What they hold is the affair of dispatch and combine.
Rows = tuple[NDArray[Any], ...]

# event, offset, count, world version, a spare word, crc32 of all before it
_FIELD = struct.Struct("<QQIIII")
FIELD_BYTES = _FIELD.size  # given: 32 bytes per rank (P039)


@dataclass(frozen=True, slots=True)
class MetadataField:
    """What one rank announces to another: `count` rows lie at `offset` of its managed area."""

    event_id: int
    world: int
    offset: int
    count: int

    def pack(self) -> bytes:
        """The 32 bytes as they are written into the peer's metadata area."""
        head = _FIELD.pack(self.event_id, self.offset, self.count, self.world, 0, 0)[:-4]
        return head + zlib.crc32(head).to_bytes(4, "little")

    @classmethod
    def unpack(cls, data: bytes) -> MetadataField:
        """Raises `RemoteProtocolError` for a torn or foreign field."""
        if len(data) != FIELD_BYTES:
            text = f"metadata field of {len(data)} bytes, expected {FIELD_BYTES}"
            raise RemoteProtocolError(text, reason="truncated")
        event_id, offset, count, world, _, crc = _FIELD.unpack(data)
        if zlib.crc32(data[:-4]) != crc:
            raise RemoteProtocolError("metadata field fails its checksum", reason="bad_crc")
        return cls(event_id, world, offset, count)


@dataclass(frozen=True, slots=True)
class Limits:
    """Bounds of one rank. `rows_max` is the size of a managed area, in rows."""

    rows_max: int = 65_536
    #: One wait; assumed. A collective takes 20-140 us (Fig. 6), its worst straggler 3 ms (Fig. 20).
    wait_ns: int = units.ms(20)
    #: Silent waits before an accusation, and waits granted to ranks that say they are late.
    asks_max: int = 3
    late_waits_max: int = 50
    #: Collectives that are run again together: 2 for dispatch and combine, because the results of
    #: a rank that died between the two are lost with it.
    unit: int = 1


class State(Enum):
    """Where a rank is in the collective `Collective.event`."""

    IDLE = "idle"
    COUNTING = "counting"
    PULLING = "pulling"
    AGREEING = "agreeing"
    HALTED = "halted"


# ---------------------------------------------------------------- events


@dataclass(frozen=True, slots=True)
class Written:
    """A peer wrote its field into our metadata area."""

    sender: int
    field: MetadataField


@dataclass(frozen=True, slots=True, eq=False)
class Pulled:
    """The answer to a `Pull`; `rows` is None when the peer no longer has them."""

    source: int
    field: MetadataField
    rows: Rows | None


@dataclass(frozen=True, slots=True)
class Heard:
    """A peer told us something."""

    sender: int
    message: RankMessage


@dataclass(frozen=True, slots=True)
class WaitOver:
    """The wait with this number ended; an older number is ignored."""

    number: int


CollectiveEvent = Written | Pulled | Heard | WaitOver


# ---------------------------------------------------------------- effects


@dataclass(frozen=True, slots=True)
class Write:
    """Write a field into the metadata area of `target`."""

    target: int
    field: MetadataField


@dataclass(frozen=True, slots=True)
class Pull:
    """Read `field.count` rows at `field.offset` of the managed area of `source`."""

    source: int
    field: MetadataField


@dataclass(frozen=True, slots=True)
class Wait:
    """Feed `WaitOver(number)` after `delay_ns`."""

    number: int
    delay_ns: int


@dataclass(frozen=True, slots=True, eq=False)
class Completed:
    """Everything arrived: rows by source, ascending, this rank's own among them."""

    event_id: int
    world: int
    arrived: dict[int, Rows]


@dataclass(frozen=True, slots=True)
class Missing:
    """A deadline passed; these ranks are what is waited for."""

    event_id: int
    ranks: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class WorldChanged:
    """Survivors go on as `world`; enter `resume` next, with rows routed for it."""

    world: World
    dead: tuple[int, ...]
    resume: int


@dataclass(frozen=True, slots=True)
class Halted:
    """This rank takes no further part: voted dead, or there is no quorum without `missing`."""

    reason: str
    missing: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Refused:
    """A peer broke the contract; what it sent was ignored."""

    sender: int
    reason: str


CollectiveEffect = (
    Write | Pull | Tell | Wait | Completed | Missing | WorldChanged | Halted | Refused
)  # fmt: skip
