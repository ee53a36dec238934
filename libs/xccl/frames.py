"""A remote write as bytes, for carriers that move frames: a fixed header, then what is written.

    area u8 | 7 spare | offset | lane u32, sender life u16, receiver life u16 | number |
    session u64 | crc32 of header and data

All little-endian. A write that was damaged on its way does not land.
"""

from __future__ import annotations

import struct
import zlib
from dataclasses import dataclass

from libs.errors import RemoteProtocolError
from libs.xccl.memory import Area, PairEpoch
from libs.xccl.p2p import RemoteWrite, Tag

_HEADER = struct.Struct("<B7xQIHHQII")


@dataclass(frozen=True, slots=True)
class Landing:
    """A write as it reaches the die it is meant for."""

    area: Area
    offset: int
    data: bytes
    tag: Tag

    @classmethod
    def of(cls, write: RemoteWrite) -> Landing:
        """What the target sees of `write`."""
        return cls(write.area, write.offset, write.data, write.tag)


def pack_write(write: RemoteWrite) -> bytes:
    """The frame of a write."""
    epoch = write.tag.epoch
    head = _HEADER.pack(
        write.area, write.offset, write.tag.lane, epoch.sender_life, epoch.receiver_life,
        write.tag.number, epoch.session, 0,
    )[:-4]  # fmt: skip
    crc = zlib.crc32(write.data, zlib.crc32(head))
    return b"".join((head, crc.to_bytes(4, "little"), write.data))


def unpack_write(frame: bytes | memoryview) -> Landing:
    """Raises `RemoteProtocolError` for a truncated, damaged or foreign frame."""
    if len(frame) < _HEADER.size:
        raise RemoteProtocolError(f"a write of {len(frame)} bytes", reason="truncated")
    view = memoryview(frame)
    area, offset, lane, sender, receiver, number, session, crc = _HEADER.unpack_from(view)
    head, data = view[: _HEADER.size - 4], view[_HEADER.size :]
    if zlib.crc32(data, zlib.crc32(head)) != crc:
        raise RemoteProtocolError("a write fails its checksum", reason="bad_crc")
    if area not in tuple(Area) or session >= 1 << 16:
        raise RemoteProtocolError(f"a write to area {area}", reason="malformed")
    tag = Tag(PairEpoch(sender, receiver, session), lane, number)
    return Landing(Area(area), offset, bytes(data), tag)
