from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from libs.errors import RemoteProtocolError
from libs.xccl.frames import Landing, pack_write, unpack_write
from libs.xccl.memory import Area, PairEpoch
from libs.xccl.p2p import Flow, RemoteWrite, Role, Tag

U16 = st.integers(0, (1 << 16) - 1)
TAG = st.builds(
    Tag, st.builds(PairEpoch, U16, U16, U16), st.integers(0, 47), st.integers(0, (1 << 64) - 1)
)
WRITE = st.builds(
    RemoteWrite, st.just(Flow(1, Role.SEND)), st.just(1), st.sampled_from(Area),
    st.integers(0, 1 << 40), st.binary(max_size=100), TAG,
)  # fmt: skip


@given(WRITE)
def test_a_write_survives_the_way(write: RemoteWrite) -> None:
    assert unpack_write(pack_write(write)) == Landing.of(write)


@given(WRITE, st.integers(0), st.integers(1, 255))
def test_a_damaged_write_does_not_land(write: RemoteWrite, at: int, flip: int) -> None:
    frame = bytearray(pack_write(write))
    frame[at % len(frame)] ^= flip
    with pytest.raises(RemoteProtocolError):
        unpack_write(bytes(frame))


@given(WRITE, st.integers(0, 200))
def test_half_a_write_does_not_land(write: RemoteWrite, length: int) -> None:
    frame = pack_write(write)
    with pytest.raises(RemoteProtocolError):
        unpack_write(frame[: min(length, len(frame) - 1)])
