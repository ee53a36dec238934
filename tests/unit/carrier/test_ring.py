"""The ring between two ends over one piece of memory, whatever is interrupted whenever."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from libs.carrier.api import Buffer, CarrierStatistics
from libs.carrier.frames import LOOKS_MAX, FrameReader
from libs.carrier.ring import (
    RingIdentity,
    RingLayout,
    RingReader,
    RingWriter,
    read_identity,
    write_identity,
)
from libs.errors import RemoteProtocolError

LAYOUT = RingLayout(slots=4, slot_bytes=8)
TAIL = 8  # word of page 0, as documented in the layout
DESCRIPTOR = 512  # first word of the first descriptor


class KilledError(Exception):
    """The process ended between two stores."""


@dataclass
class Stores:
    """Counts stores to shared memory, and ends the process at one of them."""

    left: int | None = None

    def spend(self) -> bool:
        """Whether this store still happens; a copy of bytes happens by half at the last one."""
        if self.left is None:
            return True
        self.left -= 1
        return self.left >= 0


@dataclass
class DyingWords:
    inner: memoryview
    stores: Stores

    def __getitem__(self, index: int, /) -> int:
        return int(self.inner[index])

    def __setitem__(self, index: int, value: int, /) -> None:
        if not self.stores.spend():
            raise KilledError
        self.inner[index] = value


@dataclass
class DyingPayload:
    inner: memoryview
    stores: Stores

    def __getitem__(self, index: slice, /) -> memoryview:
        return self.inner[index]

    def __setitem__(self, index: slice, value: Buffer, /) -> None:
        if not self.stores.spend():
            half = (index.stop - index.start) // 2
            self.inner[index.start : index.start + half] = memoryview(value)[:half]
            raise KilledError
        self.inner[index] = value


@dataclass
class Memory:
    """One ring's memory; `checksum` is the writer's."""

    layout: RingLayout = LAYOUT
    checksum: bool = False
    data: memoryview = field(init=False)
    words: memoryview = field(init=False)
    stores: Stores = field(default_factory=Stores)

    def __post_init__(self) -> None:
        self.data = memoryview(bytearray(self.layout.total_bytes))
        self.words = self.data.cast("Q")

    @property
    def payload(self) -> memoryview:
        return self.data[self.layout.payload_at :]

    def writer(self) -> RingWriter:
        return RingWriter(
            DyingWords(self.words, self.stores),
            DyingPayload(self.payload, self.stores),
            self.layout,
            checksum=self.checksum,
        )

    def reader(self, *, lend: bool = False) -> FrameReader:
        ring = RingReader(self.words, self.payload, self.layout)
        return FrameReader(ring, CarrierStatistics(), lend=lend)


def body(number: int, size: int) -> bytes:
    return bytes((number * 31 + i) % 251 for i in range(size))


def read(reader: FrameReader, epoch: int = 0) -> bytes | None:
    view = reader.next(epoch)
    if view is None:
        return None
    data = bytes(view)
    del view
    reader.release()
    return data


@pytest.mark.parametrize("lend", [False, True])
@pytest.mark.parametrize("size", [0, 1, 7, 8, 9, 16, 31, 32])
def test_a_frame_of_any_size_up_to_the_ring_arrives(size: int, lend: bool) -> None:
    memory = Memory()
    writer, reader = memory.writer(), memory.reader(lend=lend)
    for number in range(9):
        assert writer.offer([body(number, size)], size, 0)
        assert read(reader) == body(number, size)
        assert read(reader) is None


def test_the_parts_of_a_frame_arrive_as_one() -> None:
    memory = Memory()
    parts: list[Buffer] = [b"", b"abc", bytearray(b"defgh"), memoryview(b"ijklmnopq"), b""]
    assert memory.writer().offer(parts, 17, 0)
    assert read(memory.reader()) == b"abcdefghijklmnopq"


def test_a_full_ring_takes_nothing_of_a_frame_and_all_of_it_later() -> None:
    memory = Memory()
    writer, reader = memory.writer(), memory.reader()
    assert writer.offer([body(1, 24)], 24, 0)
    assert not writer.offer([body(2, 16)], 16, 0)
    assert read(reader) == body(1, 24)
    assert read(reader) is None
    assert writer.offer([body(2, 16)], 16, 0)
    assert read(reader) == body(2, 16)


def test_a_quiet_pair_touches_one_slot_only() -> None:
    memory = Memory()
    writer, reader = memory.writer(), memory.reader()
    for number in range(1, 20):
        assert writer.offer([body(number, 8)], 8, 0)
        assert read(reader) == body(number, 8)
    assert not any(memory.payload[LAYOUT.slot_bytes :])


def test_reserve_is_asked_once_per_slot_and_may_refuse_before_anything_happens() -> None:
    memory = Memory()
    asked: list[tuple[int, int]] = []

    def reserve(slot: int, nbytes: int) -> None:
        asked.append((slot, nbytes))
        if slot == 2:
            raise MemoryError

    writer = RingWriter(memory.words, memory.payload, LAYOUT, reserve=reserve)
    reader = memory.reader()
    for _ in range(3):
        assert writer.offer([body(1, 12)], 12, 0)
        assert read(reader) == body(1, 12)
    assert asked == [(0, 8), (1, 4)]
    with pytest.raises(MemoryError):
        writer.offer([body(1, 20)], 20, 0)
    assert read(reader) is None
    assert writer.offer([body(4, 5)], 5, 0)
    assert read(reader) == body(4, 5)


def test_published_is_called_for_each_piece_after_it_can_be_seen() -> None:
    memory = Memory()
    tails: list[int] = []
    writer = RingWriter(
        memory.words, memory.payload, LAYOUT, published=lambda: tails.append(memory.words[TAIL])
    )
    writer.offer([body(1, 20)], 20, 0)
    assert tails == [1, 2, 3]


@pytest.mark.parametrize("lend", [False, True])
def test_frames_of_an_older_epoch_are_dropped_whole(lend: bool) -> None:
    memory = Memory()
    writer, reader = memory.writer(), memory.reader(lend=lend)
    writer.offer([body(1, 12)], 12, 1)
    writer.offer([body(2, 12)], 12, 2)
    assert read(reader, epoch=2) == body(2, 12)
    assert read(reader, epoch=2) is None


def test_an_epoch_that_begins_between_two_pieces_drops_the_frame() -> None:
    memory = Memory()
    writer, reader = memory.writer(), memory.reader()
    memory.stores.left = 12  # the first piece is 10 stores
    with pytest.raises(KilledError):
        writer.offer([body(1, 16)], 16, 1)
    assert read(reader, epoch=1) is None
    assert reader.unfinished
    # The same writer would have gone on: let another one finish the second piece as it would.
    whole = Memory()
    whole.writer().offer([body(1, 16)], 16, 1)
    memory.data[:] = whole.data
    memory.words[16] = 1  # what the reader has taken
    assert read(reader, epoch=2) is None
    assert not reader.unfinished


def test_a_flipped_bit_is_found_by_the_checksum() -> None:
    for lend in (False, True):
        memory = Memory(checksum=True)
        writer, reader = memory.writer(), memory.reader(lend=lend)
        writer.offer([body(1, 20)], 20, 0)
        writer.offer([body(2, 8)], 8, 0)
        memory.payload[9] ^= 1
        assert read(reader) == body(2, 8)
        assert read(reader) is None


@pytest.mark.parametrize("keep", [lambda view: view[2:4], lambda view: np.frombuffer(view, "u1")])
def test_a_lent_frame_that_is_kept_is_noticed(keep: Callable[[memoryview], Any]) -> None:
    memory = Memory()
    writer, reader = memory.writer(), memory.reader(lend=True)
    for hold in (False, True):
        writer.offer([body(1, 8)], 8, 0)
        view = reader.next(0)
        assert view is not None
        kept = keep(view) if hold else None
        del view
        assert reader.release() is not hold
        del kept


def test_a_given_frame_is_private() -> None:
    memory = Memory()
    writer, reader = memory.writer(), memory.reader()
    writer.offer([body(1, 20)], 20, 0)
    view = reader.next(0)
    reader.release()
    memory.payload[:] = bytes(len(memory.payload))
    assert view is not None
    assert bytes(view) == body(1, 20)
    assert view.readonly


@pytest.mark.parametrize("word", [0, 7])
def test_a_piece_is_believed_only_with_both_numbers(word: int) -> None:
    """On a weakly ordered machine the tail may be visible before the descriptor."""
    memory = Memory()
    writer, reader = memory.writer(), memory.reader()
    writer.offer([body(1, 8)], 8, 0)
    number, memory.words[DESCRIPTOR + word] = memory.words[DESCRIPTOR + word], 0
    assert read(reader) is None
    assert reader.unseen
    memory.words[DESCRIPTOR + word] = number
    assert read(reader) == body(1, 8)
    assert not reader.unseen


def test_a_piece_that_never_appears_breaks_the_ring() -> None:
    memory = Memory()
    memory.words[TAIL] = 1
    reader = memory.reader()
    for _ in range(LOOKS_MAX):
        assert read(reader) is None
    with pytest.raises(RemoteProtocolError):
        read(reader)


@given(word=st.sampled_from([1, 2, 3, 4]), value=st.integers(0, 40) | st.integers(0, 2**64 - 1))
def test_descriptors_that_contradict_themselves_are_refused(word: int, value: int) -> None:
    memory = Memory()
    memory.writer().offer([body(1, 20)], 20, 0)
    before = memory.words[DESCRIPTOR + word]
    memory.words[DESCRIPTOR + word] = value
    for lend in (False, True):
        reader = memory.reader(lend=lend)
        try:
            got = read(reader)
        except RemoteProtocolError:
            continue
        # Another slot number, or a frame that ends with its first slot, is no contradiction in
        # itself: the first only a checksum would tell, the second the piece that follows.
        moved = word == 4 and not lend
        cut = word == 2 and value == 8
        assert moved or cut or (value == before and got == body(1, 20)) or got is None
        if cut:
            with pytest.raises(RemoteProtocolError):
                read(reader)


@pytest.mark.parametrize("word", range(7))
def test_a_foreign_ring_is_recognised(word: int) -> None:
    memory = Memory()
    identity = RingIdentity(source=3, target=5, generation=2, life=1)
    write_identity(memory.words, identity, LAYOUT)
    assert read_identity(memory.words, memory.data.nbytes) == (identity, LAYOUT)
    memory.words[word] += 1
    if word in (0, 5, 6):
        with pytest.raises(RemoteProtocolError):
            read_identity(memory.words, memory.data.nbytes)
    else:
        assert read_identity(memory.words, memory.data.nbytes)[0] != identity


# ---------------------------------------------------------------- interleavings


@dataclass(frozen=True)
class Step:
    kind: str
    size: int = 0
    stores: int = 0


STEPS = st.lists(
    st.one_of(
        st.builds(Step, st.just("send"), st.integers(0, 32)),
        st.builds(Step, st.just("die"), st.integers(0, 32), st.integers(0, 45)),
        st.builds(Step, st.just("look")),
        st.builds(Step, st.just("reader_restarts")),
        st.builds(Step, st.just("epoch")),
    ),
    max_size=60,
)


class Pair:
    """Two ends and a model of what each life may have seen."""

    def __init__(self, lend: bool, checksum: bool) -> None:
        self.lend, self.checksum = lend, checksum
        self.epoch = 0
        self.number = 0
        self.taken: list[tuple[int, int]] = []  # (number, epoch) published whole, not yet seen
        self.reopen()

    def reopen(self) -> None:
        self.memory = Memory(checksum=self.checksum)
        self.writer = self.memory.writer()
        self.reader = self.memory.reader(lend=self.lend)
        self.sizes: dict[int, int] = {}
        self.taken.clear()

    def send(self, size: int) -> None:
        self.number += 1
        self.sizes[self.number] = size
        if self.writer.offer([body(self.number, size)], size, self.epoch):
            self.taken.append((self.number, self.epoch))

    def die(self, size: int, stores: int) -> None:
        """Kill the writer in a frame; the reader drains the ring, then both use a new one."""
        self.memory.stores.left = stores
        try:
            self.send(size)
        except KilledError:
            # All pieces may have been published, and only the return be missing.
            needed = LAYOUT.slots_for(size)
            maybe = stores >= needed * 10
            assert not maybe
        self.drain()
        assert not self.expected(), "what was published whole is delivered"
        self.reopen()

    def expected(self) -> list[int]:
        return [number for number, epoch in self.taken if epoch >= self.epoch]

    def look(self) -> bool:
        data = read(self.reader, self.epoch)
        expected = self.expected()
        if data is None:
            assert not expected
            return False
        number = expected[0]
        assert data == body(number, self.sizes[number])
        while self.taken.pop(0)[0] != number:
            pass
        return True

    def drain(self) -> None:
        while self.look():
            pass


@settings(max_examples=300, deadline=None)
@given(steps=STEPS, lend=st.booleans(), checksum=st.booleans())
def test_whole_in_order_and_once_whatever_dies(
    steps: list[Step], lend: bool, checksum: bool
) -> None:
    pair = Pair(lend, checksum)
    for step in steps:
        match step.kind:
            case "send":
                pair.send(step.size)
            case "die":
                pair.die(step.size, step.stores)
            case "look":
                pair.look()
            case "reader_restarts":
                pair.reopen()
            case "epoch":
                pair.epoch += 1
            case _:
                raise AssertionError(step)
    pair.drain()
    assert pair.reader.next(pair.epoch) is None
    assert not pair.reader.unfinished


@settings(max_examples=200, deadline=None)
@given(sizes=st.lists(st.integers(0, 40), min_size=1, max_size=30), data=st.data())
def test_frames_never_overlap_in_the_ring(sizes: list[int], data: st.DataObject) -> None:
    """With as many frames under way as fit, each is read as it was written."""
    layout = RingLayout(slots=5, slot_bytes=8)
    memory = Memory(layout=layout)
    writer, reader = memory.writer(), memory.reader(lend=data.draw(st.booleans()))
    under_way: list[bytes] = []
    for number, size in enumerate(sizes):
        while not writer.offer([body(number, size)], size, 0):
            assert under_way, "an empty ring takes any frame"
            assert read(reader) == under_way.pop(0)
        under_way.append(body(number, size))
        if data.draw(st.booleans()):
            assert read(reader) == under_way.pop(0)
    for frame in under_way:
        assert read(reader) == frame
