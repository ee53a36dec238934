"""Tensors as raw bytes: a 64-byte header, then the payload, both at multiples of 64.

A tensor never becomes a list. The encoder copies it once, into the frame; the decoder does not
copy at all: it hands out read-only views of the received buffer. `proto/README.md` has the layout
table.

    offset  0  u8   dtype code (`DTYPES`)
            1  u8   ndim, at most 4
            2  u16  zero
            4  u32  crc32 of the payload, continued over this header with zero in this place
            8  u64  payload bytes
           16  u64  shape[4], unused dimensions zero
           48  16 bytes, zero
"""

from __future__ import annotations

import struct
import zlib
from typing import Any

import numpy as np

from libs.errors import LocalProtocolError, RemoteProtocolError

ALIGNMENT = 64
NDIM_MAX = 4
TENSORS_MAX = 64

Tensor = np.ndarray[Any, np.dtype[Any]]

DTYPES: dict[int, np.dtype[Any]] = {
    1: np.dtype("<i1"), 2: np.dtype("<u1"), 3: np.dtype("<i2"), 4: np.dtype("<u2"),
    5: np.dtype("<i4"), 6: np.dtype("<u4"), 7: np.dtype("<i8"), 8: np.dtype("<u8"),
    9: np.dtype("<f2"), 10: np.dtype("<f4"), 11: np.dtype("<f8"),
}  # fmt: skip
_CODES = {dtype: code for code, dtype in DTYPES.items()}
_HEADER = struct.Struct("<BBHIQ4Q16s")
_ZEROS = bytes(ALIGNMENT)

assert _HEADER.size == ALIGNMENT


def padding(offset: int) -> bytes:
    """The zero bytes that bring `offset` up to the next multiple of 64."""
    return _ZEROS[: -offset % ALIGNMENT]


def check_sendable(value: Any) -> Tensor:
    """`value` as a C-contiguous array of a known dtype; `LocalProtocolError` when it is not one."""
    if not isinstance(value, np.ndarray):
        raise LocalProtocolError(f"expected a tensor, got {type(value).__name__}")
    if value.dtype not in _CODES:
        raise LocalProtocolError(f"dtype {value.dtype} does not travel")
    if value.ndim > NDIM_MAX:
        raise LocalProtocolError(f"{value.ndim} dimensions, at most {NDIM_MAX} travel")
    return np.asarray(value, order="C")


def append_tensors(parts: list[Any], offset: int, tensors: list[Tensor]) -> int:
    """Append padding, header and payload of each tensor to `parts`; returns the new frame length.

    `offset` is the length of what `parts` already holds.
    """
    for tensor in tensors:
        assert tensor.flags.c_contiguous, "check_sendable comes first"
        pad = padding(offset)
        shape = tensor.shape + (0,) * (NDIM_MAX - tensor.ndim)
        code, ndim, nbytes = _CODES[tensor.dtype], tensor.ndim, tensor.nbytes
        header = _HEADER.pack(code, ndim, 0, 0, nbytes, *shape, _ZEROS[:16])
        crc = zlib.crc32(header, zlib.crc32(tensor.data))
        parts += (pad, header[:4], crc.to_bytes(4, "little"), header[8:], tensor)
        offset += len(pad) + ALIGNMENT + nbytes
    return offset


def read_tensors(view: memoryview, offset: int, count: int) -> list[Tensor]:
    """Read exactly `count` tensors that fill `view` from `offset` to its end.

    Returns read-only arrays over `view` (they keep the received buffer alive). Raises
    `RemoteProtocolError` for a bad header, shape, checksum or length.
    """
    if count > TENSORS_MAX:
        raise _bad(f"{count} tensors, at most {TENSORS_MAX}")
    tensors: list[Tensor] = []
    for index in range(count):
        pad = -offset % ALIGNMENT
        if offset + pad + ALIGNMENT > len(view):
            raise RemoteProtocolError(f"tensor {index} is cut off", reason="truncated")
        if view[offset : offset + pad] != _ZEROS[:pad]:
            raise _bad(f"padding before tensor {index} is not zero")
        tensor = _read_one(view, offset + pad, index)
        tensors.append(tensor)
        offset += pad + ALIGNMENT + tensor.nbytes
    if offset != len(view):
        reason = f"{len(view) - offset} bytes after the last tensor"
        raise RemoteProtocolError(reason, reason="trailing_bytes")
    return tensors


def _read_one(view: memoryview, offset: int, index: int) -> Tensor:
    code, ndim, zero, crc, nbytes, *rest = _HEADER.unpack_from(view, offset)
    shape, reserved = tuple(rest[:ndim]), rest[NDIM_MAX]
    dtype = DTYPES.get(code)
    if dtype is None:
        raise _bad(f"tensor {index} has unknown dtype code {code}")
    if ndim > NDIM_MAX or zero or any(rest[ndim:NDIM_MAX]) or any(reserved):
        raise _bad(f"tensor {index} has a malformed header")
    start = offset + ALIGNMENT
    if start + nbytes > len(view):
        raise RemoteProtocolError(f"tensor {index} is cut off", reason="truncated")
    # An empty tensor may have any other dimensions; bound them too, or numpy would refuse the
    # shape.
    items, bound = 1, 1
    for extent in shape:
        items *= extent
        bound *= max(extent, 1)
    if items * dtype.itemsize != nbytes or bound > 1 << 40:
        raise _bad(f"tensor {index} has shape {list(shape)} but {nbytes} bytes")
    found = zlib.crc32(view[start : start + nbytes])
    for piece in (view[offset : offset + 4], _ZEROS[:4], view[offset + 8 : start]):
        found = zlib.crc32(piece, found)
    if found != crc:
        raise RemoteProtocolError(f"tensor {index} fails its checksum", reason="bad_crc")
    tensor: Tensor = np.ndarray(shape, dtype, buffer=view, offset=start)
    if not tensor.flags.aligned:  # only when the caller's own buffer starts at an odd address
        tensor = tensor.copy()
    tensor.flags.writeable = False
    return tensor


def _bad(text: str) -> RemoteProtocolError:
    return RemoteProtocolError(text, reason="bad_tensor")
