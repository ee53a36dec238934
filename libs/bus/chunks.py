"""Messages larger than the broker takes: cut into pieces, put together again, or dropped whole.

Each piece carries one header, `Xds-Chunk: <stream> <index> <count> <bytes> <crc32>`: the sender's
name for this message, the piece's number, how many there are, and length and checksum of the whole.
A subscription sees the pieces of one sender in order, so the collector needs no sorting: anything
unexpected means that a piece was lost, and the rest of that message is dropped.
"""

from __future__ import annotations

import re
import zlib
from dataclasses import dataclass, field

HEADER = "Xds-Chunk"
PIECE_BYTES = 256 * 1024  # larger pieces hold the receiver's event loop for tens of milliseconds
PARTIALS_MAX = 64
TTL_S = 10.0

_VALUE = re.compile(r"([A-Za-z0-9_.-]{1,80}) (\d{1,6}) (\d{1,6}) (\d{1,10}) (\d{1,10})")


class ChunkError(Exception):
    """A piece that fits nothing; the message it belongs to is lost."""


def split(data: bytes, stream: str, piece_bytes: int) -> list[tuple[bytes, dict[str, str]]]:
    """The pieces of `data` with their headers, each at most `piece_bytes` long."""
    assert 0 < piece_bytes < len(data), "a message that fits travels whole"
    count = -(-len(data) // piece_bytes)
    crc = zlib.crc32(data)
    return [
        (
            data[index * piece_bytes : (index + 1) * piece_bytes],
            {HEADER: f"{stream} {index} {count} {len(data)} {crc}"},
        )
        for index in range(count)
    ]


@dataclass(slots=True)
class _Partial:
    count: int
    length: int
    crc: int
    due_s: float
    pieces: list[bytes] = field(default_factory=list)
    held: int = 0


class Collector:
    """Puts the pieces that one subscription receives together, within bounds of bytes and time."""

    def __init__(self, message_bytes_max: int) -> None:
        self._message_bytes_max = message_bytes_max
        self._partials: dict[str, _Partial] = {}

    def add(self, header: str, piece: bytes, now_s: float) -> bytes | None:
        """The whole message once its last piece is here, else None; raises `ChunkError`."""
        match = _VALUE.fullmatch(header)
        if match is None:
            raise ChunkError(f"malformed chunk header {header[:100]!r}")
        stream = match[1]
        index, count, length, crc = (int(text) for text in match.groups()[1:])
        partial = self._partials.get(stream)
        if partial is None:
            partial = self._begin(stream, _Partial(count, length, crc, now_s + TTL_S), index)
        expected = (len(partial.pieces), partial.count, partial.length, partial.crc)
        partial.held += len(piece)
        if (index, count, length, crc) != expected or partial.held > length:
            del self._partials[stream]
            raise ChunkError(f"piece {index} of {count} where {expected[0]} was due")
        partial.pieces.append(piece)
        if len(partial.pieces) < count:
            return None
        del self._partials[stream]
        whole = b"".join(partial.pieces)
        if len(whole) != length or zlib.crc32(whole) != crc:
            raise ChunkError(f"message of {length} bytes fails its checksum")
        return whole

    def _begin(self, stream: str, partial: _Partial, index: int) -> _Partial:
        if index != 0:
            raise ChunkError(f"piece {index} of a message whose beginning was lost")
        if not 1 < partial.count <= partial.length <= self._message_bytes_max:
            raise ChunkError(f"{partial.count} pieces of {partial.length} bytes in all")
        if len(self._partials) >= PARTIALS_MAX:
            raise ChunkError(f"more than {PARTIALS_MAX} messages in pieces at once")
        self._partials[stream] = partial
        return partial

    def expire(self, now_s: float) -> list[str]:
        """Forget the messages whose pieces stopped coming; returns their streams."""
        late = [stream for stream, partial in self._partials.items() if partial.due_s <= now_s]
        for stream in late:
            del self._partials[stream]
        return late
