"""The tensor section of a frame, byte by byte."""

from __future__ import annotations

import struct
import zlib
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from libs.errors import RemoteProtocolError
from libs.wire import tensors


def section(**changes: Any) -> bytes:
    """Header and payload of one float32 `[2, 3]` tensor, with some header fields changed.

    The checksum is right unless it is what changes.
    """
    payload = np.arange(6, dtype="<f4").tobytes()
    fields: dict[str, Any] = {
        "code": 10, "ndim": 2, "zero": 0, "crc": 0, "nbytes": 24,
        "s0": 2, "s1": 3, "s2": 0, "s3": 0, "reserved": bytes(16),
    }  # fmt: skip
    fields |= changes
    header = struct.pack("<BBHIQ4Q16s", *fields.values())
    if "crc" not in changes:
        crc = zlib.crc32(header, zlib.crc32(payload[: fields["nbytes"]]))
        header = header[:4] + struct.pack("<I", crc) + header[8:]
    return header + payload


def test_the_reference_section_reads() -> None:
    (tensor,) = tensors.read_tensors(memoryview(section()), 0, 1)
    assert tensor.tolist() == [[0, 1, 2], [3, 4, 5]]


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"code": 0}, "bad_tensor"),
        ({"code": 99}, "bad_tensor"),
        ({"ndim": 5}, "bad_tensor"),
        ({"ndim": 1}, "bad_tensor"),
        ({"zero": 1}, "bad_tensor"),
        ({"reserved": b"x" * 16}, "bad_tensor"),
        ({"s0": 3}, "bad_tensor"),
        ({"s2": 1}, "bad_tensor"),
        ({"s0": 2**32, "s1": 2**32}, "bad_tensor"),
        ({"s0": 0, "s1": 2**63, "nbytes": 0}, "bad_tensor"),
        ({"crc": 1}, "bad_crc"),
        ({"nbytes": 25}, "truncated"),
        ({"nbytes": 2**64 - 1}, "truncated"),
        ({"nbytes": 20}, "bad_tensor"),
    ],
)
def test_a_malformed_section_is_refused(change: dict[str, Any], reason: str) -> None:
    with pytest.raises(RemoteProtocolError) as caught:
        tensors.read_tensors(memoryview(section(**change)), 0, 1)
    assert caught.value.reason == reason


@pytest.mark.parametrize("code", [5, 6])
def test_a_changed_dtype_of_the_same_size_fails_the_checksum(code: int) -> None:
    data = bytearray(section())
    data[0] = code
    with pytest.raises(RemoteProtocolError, match="checksum"):
        tensors.read_tensors(memoryview(data), 0, 1)


def test_swapped_dimensions_fail_the_checksum() -> None:
    data = bytearray(section())
    data[16], data[24] = data[24], data[16]
    with pytest.raises(RemoteProtocolError, match="checksum"):
        tensors.read_tensors(memoryview(data), 0, 1)


def test_padding_must_be_zero() -> None:
    data = b"\x00" * 40 + b"\x00" * 23 + b"\x01" + section()
    with pytest.raises(RemoteProtocolError, match="padding"):
        tensors.read_tensors(memoryview(data), 40, 1)


def test_more_tensors_than_allowed_are_refused() -> None:
    with pytest.raises(RemoteProtocolError, match="at most 64"):
        tensors.read_tensors(memoryview(b""), 0, 65)


@settings(max_examples=150, deadline=None)
@given(
    st.integers(0, 200),
    st.lists(
        st.tuples(st.sampled_from(sorted(tensors.DTYPES)), st.lists(st.integers(0, 4), max_size=4)),
        max_size=4,
    ),
)
def test_any_shapes_and_dtypes_round_trip(offset: int, specs: list[tuple[int, list[int]]]) -> None:
    sent = [np.full(shape, 7, dtype=tensors.DTYPES[code]) for code, shape in specs]
    parts: list[Any] = [b"\x00" * offset]
    length = tensors.append_tensors(parts, offset, sent)
    data = b"".join(parts)
    assert len(data) == length
    received = tensors.read_tensors(memoryview(data), offset, len(sent))
    assert [(tensor.dtype, tensor.shape) for tensor in received] == [
        (tensor.dtype, tensor.shape) for tensor in sent
    ]
    assert all((left == right).all() for left, right in zip(sent, received, strict=True))
