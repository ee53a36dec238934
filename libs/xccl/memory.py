"""The memory of one die as XCCL divides it: application, metadata, managed (P035).

    application   what the serving engine owns: KV blocks, hidden states; XCCL writes here only
                  under a registered destination, or by the receiver's own copy
    metadata      4 MB of 32-byte fields: one per peer die, AIV core and kind (tail or ack)
    managed       per ordered pair of dies a ring of fixed slots, opened lane by lane at first use

A field is four native 8-byte words, aligned, little-endian on every machine this runs on:

    event_id | chunk_id | tail | sender life, receiver life, session, attempt (16 bits each)

Words are stored and loaded whole (`memoryview.cast("Q")`), never byte by byte, and `tail` last.
That 32 aligned bytes arrive as one piece is assumed; it is the block size of the transfer engines.

294,528 pairs of dies could talk, so nothing is set aside for those that do not. Managed memory is
shared by every DistFlow instance of the die and bounded twice: in all, and per namespace.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from enum import IntEnum

import numpy as np

from libs.errors import Backpressure, BadInput, CapacityExceeded, RemoteProtocolError
from libs.fabric.superpod import AIV_PER_DIE

FIELD_BYTES = 32  # given (P035)
METADATA_BYTES = 4 * 1024 * 1024  # given (P035)
DIES_MAX = 768  # given: 384 chips of two dies (P024)
FIELDS = DIES_MAX * AIV_PER_DIE * 2  # given (P035): 73,728, written there as "about 74,000"
#: Peers that the area has room for: the dies of the pod, and those of 910B servers beside it.
PEERS_MAX = METADATA_BYTES // (AIV_PER_DIE * 2 * FIELD_BYTES)
WORD = 8

_FIELD = struct.Struct("<QQQQ")
_LIFE_MAX = (1 << 16) - 1


class Area(IntEnum):
    """Where a remote write goes."""

    APPLICATION = 0
    METADATA = 1
    MANAGED = 2


class Kind(IntEnum):
    """The two fields of a pair of AIV cores: `TAIL` is the sender's, `ACK` the receiver's."""

    TAIL = 0
    ACK = 1


@dataclass(frozen=True, slots=True, order=True)
class PairEpoch:
    """Which life of an ordered pair of dies a write belongs to.

    Lives are the incarnations of the two ends. `session` is the sender's: it grows whenever a
    message was given up in the middle, so that both ends begin again from an empty ring.
    """

    sender_life: int
    receiver_life: int
    session: int = 0

    def __post_init__(self) -> None:
        numbers = (self.sender_life, self.receiver_life, self.session)
        if not all(0 <= number <= _LIFE_MAX for number in numbers):
            raise CapacityExceeded(f"lives and sessions are 16-bit numbers: {self}")


@dataclass(frozen=True, slots=True)
class MetadataField:
    """One field: how far a lane has got, in chunks (`chunk_id`) and in bytes of the message."""

    event_id: int
    chunk_id: int
    tail: int
    epoch: PairEpoch
    attempt: int = 0

    def pack(self) -> bytes:
        """The 32 bytes as they are written into the peer's metadata area."""
        epoch = self.epoch
        mark = epoch.sender_life << 48 | epoch.receiver_life << 32 | epoch.session << 16
        return _FIELD.pack(self.event_id, self.chunk_id, self.tail, mark | self.attempt)

    @classmethod
    def unpack(cls, data: bytes | memoryview) -> MetadataField:
        """Raises `RemoteProtocolError` for anything but 32 bytes."""
        if len(data) != FIELD_BYTES:
            text = f"metadata field of {len(data)} bytes, expected {FIELD_BYTES}"
            raise RemoteProtocolError(text, reason="truncated")
        event_id, chunk_id, tail, mark = _FIELD.unpack(data)
        epoch = PairEpoch(mark >> 48, mark >> 32 & 0xFFFF, mark >> 16 & 0xFFFF)
        return cls(event_id, chunk_id, tail, epoch, mark & 0xFFFF)

    def newer_than(self, other: MetadataField | None) -> bool:
        """Whether this field says more than `other`; a late or repeated one does not."""
        if other is None or other.epoch != self.epoch:
            return other is None or self.epoch > other.epoch
        return (self.attempt, self.chunk_id, self.tail) > (
            other.attempt, other.chunk_id, other.tail,
        )  # fmt: skip


def field_offset(peer: int, lane: int, kind: Kind) -> int:
    """Where in the metadata area the field shared with AIV `lane` of die `peer` lies."""
    if not (0 <= peer < PEERS_MAX and 0 <= lane < AIV_PER_DIE):
        raise BadInput(f"there is no field for lane {lane} of die {peer}", field="lane")
    return ((peer * AIV_PER_DIE + lane) * 2 + kind) * FIELD_BYTES


def field_at(offset: int) -> tuple[int, int, Kind]:
    """The peer, lane and kind of the field at `offset`."""
    index, rest = divmod(offset, FIELD_BYTES)
    if rest or not 0 <= index < PEERS_MAX * AIV_PER_DIE * 2:
        raise RemoteProtocolError(f"no field at {offset}", reason="bad_offset")
    pair, kind = divmod(index, 2)
    return pair // AIV_PER_DIE, pair % AIV_PER_DIE, Kind(kind)


@dataclass(frozen=True, slots=True)
class Quota:
    """Bounds of the managed area of one die. Both are assumed; no figure is published."""

    total_bytes: int = 2 << 30
    namespace_bytes: int = 1 << 30


@dataclass(frozen=True, slots=True)
class Destination:
    """A range of the application area registered for direct writes, under one generation."""

    offset: int
    nbytes: int
    generation: int


class DieMemory:
    """The three areas of one die. `application` is any writable buffer of the engine."""

    def __init__(self, application: bytearray | memoryview, quota: Quota | None = None) -> None:
        self.application = memoryview(application).cast("B")
        self.quota = quota or Quota()
        self.managed_bytes = 0
        # Zeroed on demand by the operating system: what nobody touches takes no memory.
        self._words = np.zeros(METADATA_BYTES // WORD, np.uint64).data.cast("B").cast("Q")
        self.metadata = self._words.cast("B")
        self._lanes: dict[tuple[int, int], tuple[int, memoryview]] = {}
        self._by_namespace: dict[int, int] = {}
        self._destinations: dict[int, Destination] = {}
        self._generation = 0

    # ------------------------------------------------------------ metadata

    def store_field(self, offset: int, data: bytes) -> None:
        """Store the four words of a field, `tail` last."""
        field_at(offset)
        first = offset // WORD
        for index in (0, 1, 3, 2):
            self._words[first + index] = int.from_bytes(data[8 * index : 8 * index + 8], "little")

    def field(self, peer: int, lane: int, kind: Kind) -> MetadataField | None:
        """What the field says; None while nothing was ever written."""
        offset = field_offset(peer, lane, kind)
        found = MetadataField.unpack(self.metadata[offset : offset + FIELD_BYTES])
        return found if found.epoch.sender_life else None

    # ------------------------------------------------------------ managed

    def open_lane(self, source: int, lane: int, nbytes: int, namespace: int) -> memoryview:
        """The ring that `source` writes with AIV `lane`, opened when it is first used.

        Raises `Backpressure` when the quota has no room for it.
        """
        known = self._lanes.get((source, lane))
        if known is not None:
            return known[1]
        share = self._by_namespace.get(namespace, 0) + nbytes
        if self.managed_bytes + nbytes > self.quota.total_bytes:
            raise Backpressure(f"the managed area is full: {self.managed_bytes} bytes in use")
        if share > self.quota.namespace_bytes:
            raise Backpressure(f"namespace {namespace} has used up its share of managed memory")
        memory = memoryview(bytearray(nbytes))
        self.managed_bytes += nbytes
        self._by_namespace[namespace] = share
        self._lanes[source, lane] = namespace, memory
        return memory

    def lane(self, source: int, lane: int) -> memoryview | None:
        """The same ring, or None while it is closed."""
        known = self._lanes.get((source, lane))
        return None if known is None else known[1]

    def close_rings(self, source: int) -> None:
        """Give back every ring of `source`; whatever it still writes there is refused."""
        for key in [key for key in self._lanes if key[0] == source]:
            namespace, memory = self._lanes.pop(key)
            self.managed_bytes -= len(memory)
            self._by_namespace[namespace] -= len(memory)

    def open_rings(self) -> Iterator[tuple[int, int]]:
        """Every open `(source, lane)`."""
        yield from self._lanes

    # ------------------------------------------------------------ application

    def register(self, offset: int, nbytes: int) -> Destination:
        """Allow direct writes into a range; its generation is never used again."""
        if not (offset >= 0 and nbytes >= 0 and offset + nbytes <= len(self.application)):
            raise BadInput("the destination is outside the application area", field="offset")
        self._generation += 1
        made = self._destinations[self._generation] = Destination(offset, nbytes, self._generation)
        return made

    def retire(self, destination: Destination) -> None:
        """Refuse direct writes from now on; the range may be used for something else."""
        self._destinations.pop(destination.generation, None)

    def allows(self, generation: int, offset: int, nbytes: int) -> bool:
        """Whether a direct write falls into the destination that is open under `generation`."""
        known = self._destinations.get(generation)
        if known is None:
            return False
        return known.offset <= offset and offset + nbytes <= known.offset + known.nbytes

    def checksum(self, offset: int, nbytes: int) -> int:
        """CRC-32 of a range of the application area."""
        return zlib.crc32(self.application[offset : offset + nbytes])

    def validate(self) -> None:
        """The accounts agree with what is open, and stay below the quota."""
        total = sum(len(memory) for _, memory in self._lanes.values())
        assert total == self.managed_bytes <= self.quota.total_bytes, (total, self.managed_bytes)
        assert total == sum(self._by_namespace.values()), self._by_namespace
        assert all(0 <= used <= self.quota.namespace_bytes for used in self._by_namespace.values())
