"""Frames: the only way in which a message becomes bytes, and bytes a message.

    prefix (16 bytes) | msgpack [kind, envelope, body] | [pad | tensor header | payload] ...

Hosts call `encode_frame` for each message they send and `decode_frame` for each payload they
receive. Whatever a peer puts into a frame, `decode_frame` raises `RemoteProtocolError` and nothing
else, within a time bounded by the class limit: lengths are checked before anything is parsed, the
number of maps is bounded (a megabyte of empty maps would otherwise hold the event loop for most of
a second), and every byte of a frame is accounted for. `proto/README.md` describes the layout for
other languages.

Reasons carried by `RemoteProtocolError.reason`: too_long, truncated, bad_magic, bad_version,
bad_crc, bad_msgpack, duplicate_key, unknown_kind, unknown_field, missing_field, wrong_type,
out_of_range, not_a_number, bad_tensor, trailing_bytes, invalid_value.
"""

from __future__ import annotations

import struct
import zlib
from typing import Any

import msgpack

from libs.errors import LocalProtocolError, RemoteProtocolError
from libs.wire import registry, tensors
from libs.wire.envelope import Envelope
from libs.wire.fields import ITEMS_MAX, StructType, TensorCursor, struct_type
from libs.wire.registry import Limit
from libs.wire.scalars import FieldError

MAGIC = b"XDSF"
VERSION = 1
HEADER_BYTES_MAX = int(Limit.TOKEN)  # of the msgpack part; what is larger than this is a tensor
MAPS_MAX = 8192

# magic, version, flags (zero), tensor count, msgpack length, crc32 of the msgpack part
_PREFIX = struct.Struct("<4sBBHII")
_ENVELOPE = struct_type(Envelope)


_COMPILED: dict[type[Any], tuple[str, int, StructType]] = {}


def _compiled(cls: type[Any]) -> tuple[str, int, StructType]:
    """Kind, size limit and codec of a registered class; `LocalProtocolError` when it is not one."""
    entry = _COMPILED.get(cls)
    if entry is None:
        entry = registry.kind_of(cls), int(registry.limit_of(cls)), struct_type(cls)
        _COMPILED[cls] = entry
    return entry


def encode_frame(envelope: Envelope, message: Any) -> bytes:
    """The frame of `message`; raises `LocalProtocolError` naming the field that cannot travel."""
    kind, limit, codec = _compiled(type(message))
    aside: list[tensors.Tensor] = []
    try:
        body = codec.pack(message, aside)
        head: bytes = msgpack.packb([kind, _ENVELOPE.pack(envelope, aside), body])
    except FieldError as error:
        raise LocalProtocolError(f"{kind}{error}") from error
    except UnicodeEncodeError as error:
        raise LocalProtocolError(f"{kind}: a string is not valid Unicode") from error
    if len(head) > HEADER_BYTES_MAX:
        raise LocalProtocolError(f"{kind}: {len(head)} bytes of fields, limit {HEADER_BYTES_MAX}")
    prefix = _PREFIX.pack(MAGIC, VERSION, 0, len(aside), len(head), zlib.crc32(head))
    parts: list[Any] = [prefix, head]
    length = tensors.append_tensors(parts, _PREFIX.size + len(head), aside)
    if length > limit:
        raise LocalProtocolError(f"{kind}: frame of {length} bytes, limit {limit}")
    frame = b"".join(parts)
    assert len(frame) == length
    return frame


def decode_frame(data: bytes | memoryview, limit: int = Limit.BULK) -> tuple[Envelope, Any]:
    """The envelope and message of one frame of at most `limit` bytes.

    Tensors are read-only views of `data`, which they keep alive. Raises `RemoteProtocolError` only.
    """
    view = memoryview(data)
    count, head = _split(view, limit)
    kind, about, body = _parse(head)
    cls = registry.class_of(kind) if isinstance(kind, str) else None
    if cls is None:
        raise RemoteProtocolError(f"unknown kind {str(kind)[:64]!r}", reason="unknown_kind")
    kind, limit, codec = _compiled(cls)
    if len(view) > limit:
        text = f"{kind}: frame of {len(view)} bytes, limit {limit}"
        raise RemoteProtocolError(text, reason="too_long")
    cursor = TensorCursor(tensors.read_tensors(view, _PREFIX.size + len(head), count))
    try:
        message = codec.unpack(body, cursor)
        envelope = _ENVELOPE.unpack(about, cursor)
    except FieldError as error:
        raise RemoteProtocolError(f"{kind}{error}", reason=error.reason) from error
    if cursor.left():
        text = f"{kind}: {cursor.left()} tensors belong to no field"
        raise RemoteProtocolError(text, reason="bad_tensor")
    assert isinstance(envelope, Envelope)
    return envelope, message


def _split(view: memoryview, limit: int) -> tuple[int, memoryview]:
    """Check the prefix; returns the tensor count and the msgpack part."""
    if len(view) > limit:
        raise RemoteProtocolError(f"frame of {len(view)} bytes, limit {limit}", reason="too_long")
    if len(view) < _PREFIX.size:
        raise RemoteProtocolError(f"frame of {len(view)} bytes", reason="truncated")
    magic, version, flags, count, length, crc = _PREFIX.unpack_from(view)
    if magic != MAGIC:
        raise RemoteProtocolError("not a frame", reason="bad_magic")
    if version != VERSION or flags:
        text = f"frame version {version} flags {flags}, this side reads version {VERSION}"
        raise RemoteProtocolError(text, reason="bad_version")
    if length > HEADER_BYTES_MAX:
        raise RemoteProtocolError(f"{length} bytes of fields", reason="too_long")
    head = view[_PREFIX.size : _PREFIX.size + length]
    if len(head) != length:
        raise RemoteProtocolError("fields are cut off", reason="truncated")
    if zlib.crc32(head) != crc:
        raise RemoteProtocolError("fields fail their checksum", reason="bad_crc")
    return count, head


class _MapBuilder:
    """Builds the maps of one frame; refuses duplicate keys and more than `MAPS_MAX` of them."""

    __slots__ = ("count",)

    def __init__(self) -> None:
        self.count = 0

    def __call__(self, pairs: list[tuple[Any, Any]]) -> dict[Any, Any]:
        self.count += 1
        built = dict(pairs)
        if len(built) != len(pairs):
            raise RemoteProtocolError("a map repeats a key", reason="duplicate_key")
        if self.count > MAPS_MAX:
            raise RemoteProtocolError(f"more than {MAPS_MAX} maps", reason="too_long")
        return built


def _parse(head: memoryview) -> list[Any]:
    try:
        top = msgpack.unpackb(
            head,
            raw=False,
            strict_map_key=True,
            object_pairs_hook=_MapBuilder(),
            max_str_len=HEADER_BYTES_MAX,
            max_bin_len=HEADER_BYTES_MAX,
            max_array_len=ITEMS_MAX,
            max_map_len=64,
            max_ext_len=0,
        )
    # UnicodeDecodeError is a ValueError; a timestamp extension may overflow.
    except (ValueError, msgpack.UnpackException, RecursionError, OverflowError) as error:
        text = f"fields are not msgpack: {type(error).__name__}"
        raise RemoteProtocolError(text, reason="bad_msgpack") from error
    if type(top) is not list or len(top) != 3:
        raise RemoteProtocolError("fields are not [kind, envelope, body]", reason="bad_msgpack")
    return top
