"""Round trips, and every way in which a frame can be wrong."""

from __future__ import annotations

import struct
import zlib
from typing import Any

import msgpack
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from libs.errors import LocalProtocolError, RemoteProtocolError
from libs.wire.codec import MAPS_MAX, decode_frame, encode_frame
from libs.wire.envelope import Envelope
from libs.wire.registry import Limit
from libs.wire.samples import same
from tests.unit.wire.kinds import Bulk, Control, Guarded, Part, Tokens, bulk, control, floats

ENVELOPE = Envelope("decode_te.d0.dp1", 3, 7, 123, 456, "00-ab-cd-01", "reply.to")
ABOUT = {"sender": "x", "incarnation": 1, "epoch": 1, "at_ns": 0}
BODY: dict[str, Any] = {"count": 1, "ratio": 1.0, "ready": True, "name": "n", "blob": b""}


def frame(head: bytes, *, magic: bytes = b"XDSF", version: int = 1, tensors: int = 0) -> bytes:
    prefix = struct.pack("<4sBBHII", magic, version, 0, tensors, len(head), zlib.crc32(head))
    return prefix + head


def reason(data: bytes, limit: int = Limit.BULK) -> str:
    with pytest.raises(RemoteProtocolError) as caught:
        decode_frame(data, limit)
    return caught.value.reason


def body_reason(body: object, about: object = ABOUT, kind: object = "test_control") -> str:
    return reason(frame(msgpack.packb([kind, about, body])))


def test_a_control_message_round_trips() -> None:
    assert decode_frame(encode_frame(ENVELOPE, control())) == (ENVELOPE, control())


def test_nested_tensors_round_trip_bit_for_bit() -> None:
    envelope, message = decode_frame(encode_frame(ENVELOPE, bulk()))
    assert envelope == ENVELOPE
    assert same(message, bulk())


def test_one_message_has_one_encoding() -> None:
    assert encode_frame(ENVELOPE, bulk()) == encode_frame(ENVELOPE, bulk())


def test_tensors_are_aligned_read_only_views_of_the_frame() -> None:
    data = encode_frame(ENVELOPE, bulk())
    rows = decode_frame(data)[1].parts[0].rows
    assert rows.flags.aligned
    assert not rows.flags.writeable
    start = rows.__array_interface__["data"][0]
    frame_start = np.frombuffer(data, np.uint8).__array_interface__["data"][0]
    assert (start - frame_start) % 64 == 0
    assert 0 < start - frame_start < len(data)


def test_a_writable_buffer_still_gives_read_only_tensors() -> None:
    data = bytearray(encode_frame(ENVELOPE, bulk()))
    assert not decode_frame(memoryview(data))[1].scale.flags.writeable


def test_an_odd_buffer_address_costs_a_copy_but_stays_aligned() -> None:
    data = memoryview(b"?" + encode_frame(ENVELOPE, bulk()))[1:]
    message = decode_frame(data)[1]
    assert message.scale.flags.aligned
    assert same(message, bulk())


def test_transposed_tensors_travel_in_row_order() -> None:
    rows = np.arange(6, dtype=np.int16).reshape(2, 3).T
    sent = Bulk((Part("t", rows),), (), floats(1))
    assert (decode_frame(encode_frame(ENVELOPE, sent))[1].parts[0].rows == rows).all()


def test_absent_fields_take_their_defaults() -> None:
    _, message = decode_frame(frame(msgpack.packb(["test_control", ABOUT, BODY])))
    assert message == Control(1, 1.0, True, "n", b"", None, 3)


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ({"count": True}, "wrong_type"),
        ({"count": 1.0}, "wrong_type"),
        ({"count": 2**63}, "out_of_range"),
        ({"ratio": 1}, "wrong_type"),
        ({"ratio": float("nan")}, "not_a_number"),
        ({"ready": 1}, "wrong_type"),
        ({"name": b"n"}, "wrong_type"),
        ({"blob": "n"}, "wrong_type"),
        ({"note": 4}, "wrong_type"),
        ({"retries": None}, "wrong_type"),
        ({"surplus": 1}, "unknown_field"),
        ({"name": msgpack.Timestamp(1)}, "bad_msgpack"),
    ],
)
def test_a_wrong_field_is_refused(change: dict[str, Any], expected: str) -> None:
    assert body_reason(BODY | change) == expected


@pytest.mark.parametrize(
    ("kind", "about", "body", "expected"),
    [
        ("test_control", ABOUT, {key: BODY[key] for key in BODY if key != "name"}, "missing_field"),
        ("test_control", ABOUT | {"epoch": "1"}, BODY, "wrong_type"),
        ("test_control", {"sender": "x"}, BODY, "missing_field"),
        ("test_control", ABOUT, [1, 2], "wrong_type"),
        ("no_such_kind", ABOUT, BODY, "unknown_kind"),
        (["test_control"], ABOUT, BODY, "unknown_kind"),
        ("test_guarded", ABOUT, {"share": 2.0}, "invalid_value"),
        ("test_token", ABOUT, {"lists": ["ab"]}, "wrong_type"),
        ("test_token", ABOUT, {"lists": [["a"] * 5000]}, "bad_msgpack"),
        ("test_bulk", ABOUT, {"parts": [], "pairs": [[1]], "scale": 0}, "wrong_type"),
        ("test_bulk", ABOUT, {"parts": [], "pairs": [], "scale": 0}, "bad_tensor"),
        ("test_bulk", ABOUT, {"parts": [], "pairs": [], "scale": True}, "wrong_type"),
    ],
)
def test_a_wrong_header_is_refused(
    kind: object, about: object, body: object, expected: str
) -> None:
    assert body_reason(body, about, kind) == expected


def test_the_error_names_the_path_of_the_field() -> None:
    body = {"parts": [{"label": 3, "rows": 0}], "pairs": [], "scale": 1}
    with pytest.raises(RemoteProtocolError, match=r"test_bulk\.parts\[0\]\.label: expected str"):
        decode_frame(frame(msgpack.packb(["test_bulk", ABOUT, body])))


def test_the_error_of_a_whole_map_names_the_kind() -> None:
    with pytest.raises(RemoteProtocolError, match="test_control: unknown field 'surplus'"):
        decode_frame(frame(msgpack.packb(["test_control", ABOUT, BODY | {"surplus": 1}])))


@pytest.mark.parametrize(
    ("data", "expected"),
    [
        (b"", "truncated"),
        (frame(b"\x90", magic=b"HTTP"), "bad_magic"),
        (frame(b"\x90", version=2), "bad_version"),
        (frame(b"\x90"), "bad_msgpack"),
        (frame(b"\xc1"), "bad_msgpack"),
        (frame(b"\x91" * 4000), "bad_msgpack"),
        (frame(b"\xdd\xff\xff\xff\xff"), "bad_msgpack"),
        (frame(b"\x81\x01\x01"), "bad_msgpack"),
        (frame(b"\xa1\xff"), "bad_msgpack"),
        (frame(b"\x82\xa1a\x01\xa1a\x02"), "duplicate_key"),
        (frame(b"\x90\x90"), "bad_msgpack"),
        (frame(b"\x90")[:-1], "truncated"),
    ],
)
def test_bytes_that_are_no_frame_are_refused(data: bytes, expected: str) -> None:
    assert reason(data) == expected


def test_a_frame_over_its_class_limit_is_refused_before_it_is_parsed() -> None:
    assert reason(b"\x00" * 100, limit=99) == "too_long"
    padding = {"name": "n" * int(Limit.CONTROL)}
    assert body_reason(BODY | padding) == "too_long"


def test_a_bomb_of_empty_maps_is_refused() -> None:
    row = msgpack.packb([{}] * 4096)
    bomb = b"\x94" + row * 4
    assert MAPS_MAX < 4 * 4096
    assert reason(frame(bomb)) == "too_long"


def test_flipped_header_and_payload_bits_fail_their_checksums() -> None:
    data = encode_frame(ENVELOPE, bulk())
    flipped = bytearray(data)
    flipped[-1] ^= 1
    assert reason(bytes(flipped)) == "bad_crc"
    flipped = bytearray(data)
    flipped[20] ^= 1
    assert reason(bytes(flipped)) == "bad_crc"


def test_bytes_after_the_last_tensor_are_refused() -> None:
    assert reason(encode_frame(ENVELOPE, bulk()) + b"\x00") == "trailing_bytes"
    assert reason(encode_frame(ENVELOPE, control()) + b"\x00") == "trailing_bytes"


def test_a_tensor_that_no_field_claims_is_refused() -> None:
    body = {"parts": [], "pairs": [], "scale": 0}
    one = encode_frame(ENVELOPE, Bulk((), (), floats(1), floats(2)))
    head = msgpack.packb(["test_bulk", ABOUT, body])
    tensors_at = 16 + struct.unpack_from("<I", one, 8)[0]
    tensors_at += -tensors_at % 64
    data = frame(head, tensors=2)
    assert reason(data + bytes(-len(data) % 64) + one[tensors_at:]) == "bad_tensor"


@pytest.mark.parametrize(
    ("message", "text"),
    [
        (control(count=True), r"test_control\.count: expected int, got bool"),
        (control(count=np.int64(1)), r"test_control\.count: .*convert it to a plain number"),
        (control(count=2**63), r"test_control\.count: .*64 bits"),
        (control(ratio=float("nan")), r"test_control\.ratio: is NaN"),
        (control(ratio="1"), r"test_control\.ratio: expected float"),
        (control(blob=bytearray(b"")), r"test_control\.blob: expected bytes"),
        (control(name="\ud800"), "test_control: .*not valid Unicode"),
        (control(name="n" * 70_000), "test_control: frame of .* limit 65536"),
        (Tokens((("a", 1),)), r"test_token\.lists\[0\]\[1\]: expected str"),  # type: ignore[arg-type]
        (Tokens(["a"]), r"test_token\.lists: expected tuple, got list"),  # type: ignore[arg-type]
        (Bulk((), ((1,),), floats(1)), r"pairs\[0\]: expected a tuple of 2"),  # type: ignore[arg-type]
        (Bulk((), (), np.ones(1)), r"scale: expected dtype float32"),  # type: ignore[arg-type]
        (Bulk((), (), floats(1), np.array([True])), "mask: dtype bool does not travel"),
        (Bulk((), (), floats(1), np.zeros((1,) * 5)), "mask: 5 dimensions"),
        (Bulk((Part("a", [1]),), (), floats(1)), r"parts\[0\]\.rows: expected a tensor"),  # type: ignore[arg-type]
        (object(), "object is not a registered message"),
    ],
)
def test_a_message_that_may_not_travel_names_its_field(message: object, text: str) -> None:
    with pytest.raises(LocalProtocolError, match=text):
        encode_frame(ENVELOPE, message)


def test_a_class_may_check_its_own_fields_on_arrival() -> None:
    assert decode_frame(encode_frame(ENVELOPE, Guarded(0.25)))[1] == Guarded(0.25)


FRAMES = [encode_frame(ENVELOPE, message) for message in (control(), bulk(), Tokens((("a",),)))]


@settings(max_examples=400, deadline=None)
@given(st.binary(max_size=400))
def test_random_bytes_raise_one_error(data: bytes) -> None:
    with pytest.raises(RemoteProtocolError):
        decode_frame(data)


@settings(max_examples=400, deadline=None)
@given(st.binary(max_size=200))
def test_random_fields_under_a_valid_prefix_raise_one_error(head: bytes) -> None:
    with pytest.raises(RemoteProtocolError):
        decode_frame(frame(head))


@settings(max_examples=600, deadline=None)
@given(st.sampled_from(FRAMES), st.data())
def test_a_mutated_frame_is_refused_or_is_the_same_message(
    original: bytes, data: st.DataObject
) -> None:
    mutated = bytearray(original)
    position = data.draw(st.integers(0, len(mutated) - 1))
    match data.draw(st.sampled_from(["flip", "cut", "insert", "repair"])):
        case "flip":
            mutated[position] ^= data.draw(st.integers(1, 255))
        case "cut":
            del mutated[position:]
        case "insert":
            mutated[position:position] = data.draw(st.binary(min_size=1, max_size=70))
        case "repair":  # change the fields and make their checksum right again
            length = struct.unpack_from("<I", mutated, 8)[0]
            mutated[16 + position % length] ^= data.draw(st.integers(1, 255))
            mutated[12:16] = struct.pack("<I", zlib.crc32(mutated[16 : 16 + length]))
        case unexpected:
            raise AssertionError(unexpected)
    try:
        decode_frame(bytes(mutated))
    except RemoteProtocolError:
        pass
    else:  # only fields whose checksum was made right again may read as something else
        assert struct.unpack_from("<I", mutated, 12) != struct.unpack_from("<I", original, 12)


json_like = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**64 - 1)
    | st.floats()
    | st.text()
    | st.binary(),
    lambda inner: (
        st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4)
    ),
    max_leaves=12,
)


@settings(max_examples=300, deadline=None)
@given(st.sampled_from(["test_control", "test_bulk", "test_token", "test_guarded"]), json_like)
def test_any_field_map_gives_a_message_or_one_error(kind: str, body: object) -> None:
    try:
        decode_frame(frame(msgpack.packb([kind, ABOUT, body])))
    except RemoteProtocolError:
        pass
    else:
        assert isinstance(body, dict)


@settings(max_examples=200, deadline=None)
@given(
    st.integers(-(2**63), 2**63 - 1), st.floats(allow_nan=False), st.text(), st.binary(max_size=50)
)
def test_every_value_in_range_round_trips(count: int, ratio: float, name: str, blob: bytes) -> None:
    message = control(count=count, ratio=ratio, name=name, blob=blob)
    assert same(decode_frame(encode_frame(ENVELOPE, message))[1], message)
