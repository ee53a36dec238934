from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from libs.errors import BadInput
from libs.xccl.memory import MetadataField, PairEpoch
from libs.xccl.ring import (
    ATTEMPT_MAX,
    HEADER_BYTES,
    Admission,
    ReceiveRing,
    RingShape,
    SendRing,
    SlotHeader,
)

EPOCH = PairEpoch(1, 1)
SHAPE = RingShape(slots=2, payload_bytes=64, lanes=3)


@given(st.integers(0, 2), st.integers(0, 100), st.integers(0, 2), st.integers(0, 100))
def test_two_positions_share_a_slot_only_in_different_generations(
    lane: int, position: int, other_lane: int, other: int
) -> None:
    same_slot = SHAPE.offset(lane, position) == SHAPE.offset(other_lane, other)
    assert same_slot == (lane == other_lane and position % 2 == other % 2)
    if same_slot and position != other:
        assert SHAPE.generation(position) != SHAPE.generation(other)
    assert SHAPE.offset(lane, position) + SHAPE.slot_bytes <= SHAPE.lanes * SHAPE.lane_bytes


@pytest.mark.parametrize(
    "wrong",
    [{"slots": 1}, {"payload_bytes": 0}, {"payload_bytes": 33}, {"lanes": 49}, {"lanes": 0}],
)
def test_a_shape_that_is_no_ring_is_refused(wrong: dict[str, int]) -> None:
    with pytest.raises(BadInput):
        RingShape(**wrong)


def test_a_slot_header_survives_packing_and_is_64_bytes() -> None:
    header = SlotHeader(MetadataField(1, 2, 3, EPOCH, 4), 5, 6, 7, 8, 9)
    assert len(header.pack()) == HEADER_BYTES == 64
    assert SlotHeader.unpack(memoryview(header.pack())) == header


def test_an_untouched_slot_names_an_epoch_that_nobody_uses() -> None:
    assert SlotHeader.unpack(memoryview(bytes(HEADER_BYTES))).field.epoch == PairEpoch(0, 0)


def test_a_slot_is_open_for_one_generation_at_a_time() -> None:
    ring = ReceiveRing(0, 1, EPOCH, SHAPE)
    assert [ring.admits(0, position) for position in range(3)] == [
        Admission.OPEN, Admission.OPEN, Admission.AHEAD,
    ]  # fmt: skip
    ring.lanes[0].consumed = 1
    assert [ring.admits(0, position) for position in range(3)] == [
        Admission.STALE, Admission.OPEN, Admission.OPEN,
    ]  # fmt: skip
    assert ring.admits(1, 0) is Admission.OPEN, "lanes do not share slots"


def test_a_new_session_is_an_empty_ring() -> None:
    ring = SendRing(0, 1, EPOCH, SHAPE)
    ring.lanes[0].written = 2
    assert ring.retry()
    ring.renew()
    assert ring.epoch == PairEpoch(1, 1, 1)
    assert ring.lanes[0].written == ring.attempt == 0


def test_sessions_and_attempts_end_instead_of_wrapping() -> None:
    ring = SendRing(0, 1, PairEpoch(1, 1, ATTEMPT_MAX), SHAPE)
    assert ring.exhausted
    ring.renew()
    assert ring.epoch.session == ATTEMPT_MAX
    ring.attempt = ATTEMPT_MAX
    assert not ring.retry()


@pytest.mark.parametrize("fields", [{"acked": 1}, {"written": 3}])
def test_the_accounts_of_a_sender_are_checked(fields: dict[str, int]) -> None:
    ring = SendRing(0, 1, EPOCH, SHAPE)
    for name, value in fields.items():
        setattr(ring.lanes[2], name, value)
    with pytest.raises(AssertionError):
        ring.validate()


@pytest.mark.parametrize("fields", [{"acked": 1}, {"taken": 3}, {"consumed": 1}])
def test_the_accounts_of_a_receiver_are_checked(fields: dict[str, int]) -> None:
    ring = ReceiveRing(0, 1, EPOCH, SHAPE)
    for name, value in fields.items():
        setattr(ring.lanes[1], name, value)
    with pytest.raises(AssertionError):
        ring.validate()
