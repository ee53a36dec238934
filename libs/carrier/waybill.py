"""A frame with its waybill: one line of words before the encoded inner frame.

    source target | depart_ns | begin_ns | charge_bytes | repeat plane | 0 | inner frame

It says what the link arithmetic at the other end needs to know, so that no outer frame has to be
encoded and decoded, which would copy a large one twice more. The line is 64 bytes long so that
tensors in the frame keep their alignment.
"""

from __future__ import annotations

import struct

import numpy as np

from libs.carrier.api import Buffer
from libs.errors import RemoteProtocolError
from libs.wire.fabric import UbFrame

_LINE = struct.Struct("<II qqq I 8s 20x")
assert _LINE.size == 64


def with_waybill(frame: UbFrame) -> tuple[Buffer, Buffer]:
    """The two parts to `Carrier.send`; the payload is not copied."""
    line = _LINE.pack(
        frame.source, frame.target, frame.depart_ns, frame.begin_ns, frame.charge_bytes,
        frame.repeat, frame.plane.encode("ascii"),
    )  # fmt: skip
    return line, frame.payload.data


def read_waybill(view: memoryview) -> UbFrame:
    """The frame; its payload is a view. Raises `RemoteProtocolError` when the line is cut."""
    if view.nbytes < _LINE.size:
        raise RemoteProtocolError(f"{view.nbytes} bytes are no waybill", reason="truncated")
    source, target, depart_ns, begin_ns, charge_bytes, repeat, plane = _LINE.unpack_from(view)
    payload = np.frombuffer(view[_LINE.size :], np.uint8)
    name = plane.rstrip(b"\0").decode("ascii", "replace")
    return UbFrame(source, target, depart_ns, charge_bytes, repeat, payload, begin_ns, name)
