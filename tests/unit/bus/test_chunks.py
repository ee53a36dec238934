"""Messages in pieces arrive whole or not at all."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from libs.bus import chunks
from libs.bus.chunks import ChunkError, Collector, split

DATA = bytes(range(256)) * 4
Pieces = list[tuple[bytes, str]]


def pieces(data: bytes = DATA, stream: str = "s", size: int = 100) -> Pieces:
    return [(piece, headers[chunks.HEADER]) for piece, headers in split(data, stream, size)]


def collect(collector: Collector, given_pieces: Pieces) -> list[bytes]:
    results = [collector.add(header, piece, 0.0) for piece, header in given_pieces]
    return [result for result in results if result is not None]


@settings(max_examples=100, deadline=None)
@given(st.binary(min_size=2, max_size=500), st.integers(1, 499))
def test_every_split_comes_together_again(data: bytes, size: int) -> None:
    size = min(size, len(data) - 1)
    parts = pieces(data, size=size)
    assert all(len(piece) <= size for piece, _ in parts)
    assert collect(Collector(500), parts) == [data]


def test_interleaved_messages_do_not_mix() -> None:
    other = DATA[::-1]
    mixed = [piece for pair in zip(pieces(), pieces(other, "r"), strict=True) for piece in pair]
    assert collect(Collector(10_000), mixed) == [DATA, other]


@pytest.mark.parametrize("lost", range(11))
def test_a_lost_piece_loses_that_message_and_no_other(lost: int) -> None:
    collector = Collector(10_000)
    parts = pieces()
    assert len(parts) == 11
    whole: list[bytes] = []
    errors = 0
    for piece, header in parts[:lost] + parts[lost + 1 :]:
        try:
            whole += filter(None, [collector.add(header, piece, 0.0)])
        except ChunkError:
            errors += 1
    assert whole == []
    assert errors > 0 or lost == 10  # the last piece is missed by time alone
    assert collector.expire(chunks.TTL_S) == (["s"] if lost == 10 else [])
    assert collect(collector, pieces(stream="next")) == [DATA]


def test_pieces_that_stop_coming_are_forgotten_in_time() -> None:
    collector = Collector(10_000)
    collect(collector, pieces()[:3])
    assert collector.expire(chunks.TTL_S - 0.1) == []
    assert collector.expire(chunks.TTL_S) == ["s"]
    assert collector.expire(chunks.TTL_S) == []


def test_a_changed_byte_fails_the_checksum() -> None:
    parts = pieces()
    parts[4] = (bytes(100), parts[4][1])
    with pytest.raises(ChunkError, match="checksum"):
        collect(Collector(10_000), parts)


@pytest.mark.parametrize(
    "header",
    [
        "",
        "s",
        "s 0 2 9",
        "s 0 2 9 1 1",
        "s -1 2 9 1",
        "s 0 x 9 1",
        "a b 0 2 9 1",
        "s 0 2 9 99999999999",
    ],
)
def test_a_malformed_header_is_refused(header: str) -> None:
    with pytest.raises(ChunkError, match="malformed"):
        Collector(100).add(header, b"x", 0.0)


@pytest.mark.parametrize(
    "header", ["s 0 2 101 0", "s 0 0 9 0", "s 0 1 9 0", "s 0 10 9 0", "s 1 2 9 0"]
)
def test_a_message_that_cannot_be_is_refused_at_its_first_piece(header: str) -> None:
    collector = Collector(100)
    with pytest.raises(ChunkError):
        collector.add(header, b"x", 0.0)
    assert collector.expire(1e9) == []


def test_pieces_longer_than_announced_are_refused() -> None:
    with pytest.raises(ChunkError):
        Collector(100).add("s 0 2 9 0", bytes(10), 0.0)


def test_the_number_of_unfinished_messages_is_bounded() -> None:
    collector = Collector(10_000)
    for index in range(chunks.PARTIALS_MAX):
        collect(collector, pieces(stream=f"s{index}")[:1])
    with pytest.raises(ChunkError, match="at once"):
        collect(collector, pieces(stream="more")[:1])
