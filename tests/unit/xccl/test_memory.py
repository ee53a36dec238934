from __future__ import annotations

import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st

from libs.errors import Backpressure, BadInput, CapacityExceeded, RemoteProtocolError
from libs.fabric.superpod import SuperPod
from libs.xccl.memory import (
    FIELD_BYTES,
    FIELDS,
    METADATA_BYTES,
    PEERS_MAX,
    DieMemory,
    Kind,
    MetadataField,
    PairEpoch,
    Quota,
    field_at,
    field_offset,
)

U16 = st.integers(0, (1 << 16) - 1)
U64 = st.integers(0, (1 << 64) - 1)
FIELD = st.builds(MetadataField, U64, U64, U64, st.builds(PairEpoch, U16, U16, U16), U16)


def test_a_field_is_four_little_endian_words() -> None:
    field = MetadataField(0x1122334455667788, 3, 4096, PairEpoch(0x0A, 0x0B, 0x0C), 0x0D)
    data = field.pack()
    assert len(data) == FIELD_BYTES == 32
    assert data[:8] == bytes([0x88, 0x77, 0x66, 0x55, 0x44, 0x33, 0x22, 0x11])
    assert data[8:24] == struct.pack("<QQ", 3, 4096)
    # attempt, session, receiver's life, sender's life
    assert data[24:] == bytes([0x0D, 0, 0x0C, 0, 0x0B, 0, 0x0A, 0])


@given(FIELD)
def test_a_field_survives_packing(field: MetadataField) -> None:
    assert MetadataField.unpack(field.pack()) == field


@pytest.mark.parametrize("data", [b"", b"x" * 31, b"x" * 33])
def test_a_field_of_another_length_is_refused(data: bytes) -> None:
    with pytest.raises(RemoteProtocolError, match="expected 32"):
        MetadataField.unpack(data)


def test_a_life_or_session_beyond_16_bits_is_refused() -> None:
    with pytest.raises(CapacityExceeded):
        PairEpoch(1, 1, 1 << 16)


def test_the_fields_of_a_full_superpod_fit_into_the_metadata_area() -> None:
    assert FIELDS == 384 * 2 * 48 * 2 == 73_728
    assert FIELDS * FIELD_BYTES <= METADATA_BYTES == 4 * 1024 * 1024
    assert PEERS_MAX == 1365, "room for 597 dies beside the pod"
    assert SuperPod().ub_pairs == 294_528


@given(st.integers(0, 767), st.integers(0, 47), st.sampled_from(Kind))
def test_every_field_has_a_place_of_its_own(peer: int, lane: int, kind: Kind) -> None:
    offset = field_offset(peer, lane, kind)
    assert offset % FIELD_BYTES == 0
    assert 0 <= offset < METADATA_BYTES
    assert field_at(offset) == (peer, lane, kind)


@pytest.mark.parametrize("offset", [-32, 1, PEERS_MAX * 96 * FIELD_BYTES])
def test_there_is_no_field_elsewhere(offset: int) -> None:
    with pytest.raises(RemoteProtocolError):
        field_at(offset)


@pytest.mark.parametrize(("peer", "lane"), [(1365, 0), (-1, 0), (0, 48)])
def test_no_field_for_a_die_or_core_that_does_not_exist(peer: int, lane: int) -> None:
    with pytest.raises(BadInput):
        field_offset(peer, lane, Kind.ACK)


def test_a_stored_field_lies_at_its_offset_byte_for_byte() -> None:
    memory = DieMemory(bytearray(0))
    field = MetadataField(7, 8, 9, PairEpoch(1, 2, 3), 4)
    assert memory.field(767, 47, Kind.ACK) is None
    offset = field_offset(767, 47, Kind.ACK)
    memory.store_field(offset, field.pack())
    assert bytes(memory.metadata[offset : offset + FIELD_BYTES]) == field.pack()
    assert memory.field(767, 47, Kind.ACK) == field
    assert memory.field(767, 47, Kind.TAIL) is None
    assert len(memory.metadata) == METADATA_BYTES


def test_only_a_field_that_says_more_is_newer() -> None:
    epoch = PairEpoch(1, 1, 5)
    field = MetadataField(1, 4, 100, epoch, 1)
    assert field.newer_than(None)
    assert not field.newer_than(field)
    assert field.newer_than(MetadataField(1, 9, 900, epoch, 0)), "a later attempt"
    assert field.newer_than(MetadataField(1, 3, 75, epoch, 1)), "more chunks"
    assert not field.newer_than(MetadataField(1, 0, 0, PairEpoch(1, 1, 6), 0)), "an older session"
    assert field.newer_than(MetadataField(1, 9, 900, PairEpoch(1, 1, 4), 9))


# ---------------------------------------------------------------- managed memory


def test_rings_are_opened_when_first_used_and_given_back_whole() -> None:
    memory = DieMemory(bytearray(0), Quota(total_bytes=1000, namespace_bytes=1000))
    assert memory.lane(3, 0) is None
    ring = memory.open_lane(3, 0, 400, namespace=1)
    assert memory.open_lane(3, 0, 400, namespace=2) is ring, "opened once, shared afterwards"
    memory.open_lane(4, 0, 400, namespace=2)
    assert memory.managed_bytes == 800
    memory.close_rings(3)
    memory.validate()
    assert memory.managed_bytes == 400
    assert list(memory.open_rings()) == [(4, 0)]


def test_a_full_managed_area_is_back_pressure() -> None:
    memory = DieMemory(bytearray(0), Quota(total_bytes=1000, namespace_bytes=1000))
    memory.open_lane(3, 0, 900, namespace=1)
    with pytest.raises(Backpressure, match="full"):
        memory.open_lane(4, 0, 101, namespace=2)
    memory.validate()


def test_one_namespace_cannot_take_what_is_left_for_others() -> None:
    memory = DieMemory(bytearray(0), Quota(total_bytes=1000, namespace_bytes=500))
    memory.open_lane(3, 0, 500, namespace=1)
    with pytest.raises(Backpressure, match="namespace 1"):
        memory.open_lane(3, 1, 1, namespace=1)
    memory.open_lane(4, 0, 500, namespace=2)
    memory.validate()


# ---------------------------------------------------------------- registered destinations


def test_a_destination_is_writable_inside_and_until_it_is_retired() -> None:
    memory = DieMemory(bytearray(100))
    first = memory.register(20, 50)
    assert memory.allows(first.generation, 20, 50)
    assert not memory.allows(first.generation, 19, 2)
    assert not memory.allows(first.generation, 60, 11)
    memory.retire(first)
    again = memory.register(20, 50)
    assert again.generation != first.generation, "a late write names the old one"
    assert not memory.allows(first.generation, 20, 50)


@pytest.mark.parametrize(("offset", "nbytes"), [(-1, 2), (99, 2), (0, 101)])
def test_a_destination_outside_the_application_area_is_refused(offset: int, nbytes: int) -> None:
    with pytest.raises(BadInput):
        DieMemory(bytearray(100)).register(offset, nbytes)
