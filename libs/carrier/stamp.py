"""A frame with its delivery stamp: one line of words before the encoded frame.

    deliver_ns | source | target | 0 0 0 0 0 | encoded frame

The sender's link arithmetic says when the frame arrives on the emulated timeline; the receiver gets
that number beside the bytes, without decoding an outer frame that would copy a large one once more.
The line is 64 bytes long so that tensors in the frame keep their alignment.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass

from libs.carrier.api import Buffer
from libs.errors import RemoteProtocolError

_LINE = struct.Struct("<QQQ40x")


@dataclass(frozen=True, slots=True)
class Stamped:
    """An encoded frame as it arrived; `frame` is a view of what the carrier handed over."""

    source: int
    target: int
    deliver_ns: int
    frame: memoryview


def stamped(source: int, target: int, deliver_ns: int, frame: Buffer) -> tuple[Buffer, Buffer]:
    """The two parts to `Carrier.send`; `frame` is not copied."""
    return _LINE.pack(deliver_ns, source, target), frame


def read_stamped(view: memoryview) -> Stamped:
    """Take the line off again; raises `RemoteProtocolError` when it is cut."""
    if view.nbytes < _LINE.size:
        raise RemoteProtocolError(f"{view.nbytes} bytes are no stamped frame", reason="truncated")
    deliver_ns, source, target = _LINE.unpack_from(view)
    return Stamped(source, target, deliver_ns, view[_LINE.size :])
