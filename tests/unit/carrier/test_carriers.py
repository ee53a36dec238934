"""Carriers in one event loop, over real files: what fails, who is told, and what is left over."""

from __future__ import annotations

import asyncio
import os
import struct
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import numpy as np
import pytest
import pytest_asyncio

from libs.carrier import outbound
from libs.carrier.api import CarrierClosed, CarrierStatistics, Frame, Unroutable
from libs.carrier.outbound import Outbound
from libs.carrier.ring import RingLayout
from libs.carrier.segment import DiePage, Segment, ShmPlan, make_segments, remove_abandoned
from libs.carrier.shm import ShmCarrier
from libs.errors import Backpressure, BadInput, CapacityExceeded, LocalProtocolError

LAYOUT = RingLayout(slots=8, slot_bytes=1024)


class Die:
    """One die's carrier and what arrived at it."""

    def __init__(self, plan: ShmPlan, die: int, *, lend: bool = False) -> None:
        self.frames: list[tuple[int, bytes]] = []
        self.carrier = ShmCarrier(plan, die, lend=lend)
        self.carrier.on_frame(lambda source, view: self.frames.append((source, bytes(view))))

    def start(self) -> Die:
        self.carrier.start(asyncio.get_running_loop())
        return self

    def send(self, target: int, frame: Frame) -> None:
        self.carrier.send(target, frame)

    async def until(self, count: int) -> list[tuple[int, bytes]]:
        await until(lambda: len(self.frames) >= count)
        return self.frames


async def until(done: Callable[[], bool]) -> None:
    async with asyncio.timeout(5):
        while not done():  # noqa: ASYNC110 - what we wait for has no event to wait on
            await asyncio.sleep(0)


def loop_errors() -> list[BaseException]:
    """What reaches the event loop's exception handler from now on."""
    errors: list[BaseException] = []
    loop = asyncio.get_running_loop()
    loop.set_exception_handler(lambda _, context: errors.append(context["exception"]))
    return errors


def refuse_memory(_descriptor: int, _at: int, _nbytes: int) -> None:
    raise OSError(28, "No space left on device")


def mapped() -> str:
    """What this process has mapped."""
    return Path("/proc/self/maps").read_text()


@pytest_asyncio.fixture
async def plan(tmp_path: Path) -> AsyncIterator[ShmPlan]:
    with make_segments([0, 1, 7], root=tmp_path, layout=LAYOUT) as made:
        yield made
    assert not os.listdir(tmp_path)


@pytest_asyncio.fixture
async def dies(plan: ShmPlan) -> AsyncIterator[list[Die]]:
    started = [Die(plan, number).start() for number in (0, 1, 7)]
    yield started
    for die in started:
        die.carrier.close()


async def test_everybody_may_send_to_everybody_and_to_itself(dies: list[Die]) -> None:
    numbers = (0, 1, 7)
    for source in dies:
        for target in numbers:
            source.send(target, f"{source.carrier.die}-{target}".encode())
    for die in dies:
        got = await die.until(3)
        assert sorted(got) == [(n, f"{n}-{die.carrier.die}".encode()) for n in numbers]


async def test_arrays_travel_as_they_are(dies: list[Die]) -> None:
    array = np.arange(600, dtype=np.float64)
    dies[0].send(1, [b"head", array.data])
    assert await dies[1].until(1) == [(0, b"head" + array.tobytes())]


async def test_mail_waits_for_a_die_that_has_not_started(plan: ShmPlan) -> None:
    early, late = Die(plan, 0).start(), Die(plan, 1)
    early.send(1, b"first")
    late.start()
    early.send(1, b"second")
    assert await late.until(2) == [(0, b"first"), (0, b"second")]
    early.carrier.close()
    late.carrier.close()


async def test_a_full_outbox_pushes_back_and_nothing_taken_is_lost(
    dies: list[Die], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(outbound, "OUTBOX_BYTES_MAX", 20_000)
    sent, refused = [], 0
    for number in range(40):
        frame = bytes([number]) * 1000
        try:
            dies[0].send(1, frame)  # the reader cannot run: we hold the loop
        except Backpressure:
            refused += 1
        else:
            sent.append((0, frame))
    counters = dies[0].carrier.statistics()
    assert (len(sent), counters.refused, counters.waiting_frames) == (28, refused, 20)
    assert await dies[1].until(len(sent)) == sent
    await until(lambda: dies[0].carrier.statistics().waiting_bytes == 0)
    dies[0].send(1, b"again")
    assert (await dies[1].until(len(sent) + 1))[-1] == (0, b"again")


async def test_a_full_file_system_is_an_error_and_not_a_signal(
    dies: list[Die], monkeypatch: pytest.MonkeyPatch
) -> None:
    dies[0].send(1, b"opens the ring")
    await dies[1].until(1)
    with monkeypatch.context() as patch:
        patch.setattr(os, "posix_fallocate", refuse_memory)
        with pytest.raises(CapacityExceeded, match="tmpfs"):
            dies[0].send(1, bytes(4000))
        with pytest.raises(CapacityExceeded, match="tmpfs"):
            dies[0].send(7, b"no ring")
    dies[0].send(1, bytes(4000))
    dies[0].send(7, b"ring")
    assert (await dies[1].until(2))[-1] == (0, bytes(4000))
    assert await dies[2].until(1) == [(0, b"ring")]


async def test_an_unknown_die_is_unroutable(plan: ShmPlan, dies: list[Die]) -> None:
    assert dies[0].carrier.reaches(7)
    assert not dies[0].carrier.reaches(2)
    with pytest.raises(Unroutable):
        dies[0].send(2, b"")
    with pytest.raises(Unroutable):
        ShmCarrier(plan, 2)


async def test_a_ring_that_its_reader_left_for_a_new_life_is_not_written_to(plan: ShmPlan) -> None:
    """The target is reborn while frames wait in the outbox, and the next thing is a `send`."""
    source, dead = Die(plan, 0).start(), Die(plan, 1).start()
    for _ in range(12):
        source.send(1, bytes(1024))
    dead.carrier.close()
    reborn = Die(plan, 1).start()
    source.send(1, b"hello")
    assert await reborn.until(1) == [(0, b"hello")]
    assert source.carrier.statistics().stale == 4
    for die in (source, reborn):
        die.carrier.close()


@pytest.mark.parametrize("looks", range(3))
async def test_a_target_may_be_reborn_between_any_two_looks_at_its_life(
    plan: ShmPlan, monkeypatch: pytest.MonkeyPatch, looks: int
) -> None:
    counters = CarrierStatistics()
    pair = Outbound(plan, 0, 1, counters)
    for _ in range(12):
        pair.send([bytes(1024)], 1024, 1)
    assert counters.waiting_frames == 4
    lives = [1] * looks + [2] * 9
    monkeypatch.setattr(DiePage, "life", property(lambda _: lives.pop(0)))
    pair.send([b"hello"], 5, 1)
    pair.send([b"again"], 5, 1)
    assert (counters.waiting_frames, counters.stale) == (0, 4 + (looks == 2))
    pair.close()


async def test_a_restarted_source_follows_what_the_dead_one_published(plan: ShmPlan) -> None:
    target, dead = Die(plan, 1).start(), Die(plan, 0).start()
    dead.send(1, b"a")
    await target.until(1)
    dead.send(1, b"b")
    dead.carrier.close()
    reborn = Die(plan, 0).start()
    reborn.send(1, b"c")
    assert await target.until(3) == [(0, b"a"), (0, b"b"), (0, b"c")]
    rings = sorted(path.name for path in plan.directory.glob("ring-*"))
    assert rings == ["ring-0-1-0"]
    for die in (target, reborn):
        die.carrier.close()


async def test_a_broken_ring_is_left_and_the_next_one_is_read(
    plan: ShmPlan, dies: list[Die]
) -> None:
    dies[0].send(1, b"fine")
    await dies[1].until(1)
    impossible = struct.pack("<8Q", 2, 2, 2**60, 0, 0, 1, 0, 2)
    with (plan.directory / "ring-0-1-1").open("r+b") as file:
        file.seek(4096 + 64)  # the second descriptor
        file.write(impossible)
        file.seek(64)  # the tail
        file.write(struct.pack("<Q", 2))
    dies[2].send(1, b"rings the doorbell")
    await dies[1].until(2)
    assert dies[1].carrier.statistics().broken == 1
    dies[0].carrier.close()
    again = Die(plan, 0).start()
    again.send(1, b"fine again")
    assert (await dies[1].until(3))[-1] == (0, b"fine again")
    again.carrier.close()


@pytest.mark.parametrize("content", [b"", bytes(LAYOUT.total_bytes)], ids=["empty", "unwritten"])
async def test_a_ring_that_is_replaced_while_it_is_opened_is_not_an_error(
    plan: ShmPlan, dies: list[Die], monkeypatch: pytest.MonkeyPatch, content: bytes
) -> None:
    """Two successors of the source came and went, and the third is about to use the same name."""
    errors = loop_errors()
    page = DiePage(plan, 1)
    path = plan.directory / "ring-0-1-1"
    path.write_bytes(content)
    opened: list[Path] = []
    really_open = Segment.open

    def open_late(at: Path) -> Segment:
        if at == path and not opened:
            opened.append(at)
            page.announce(0, 2)
        return really_open(at)

    monkeypatch.setattr(Segment, "open", open_late)
    page.announce(0, 1)
    dies[2].send(1, b"rings the doorbell")
    await until(lambda: bool(opened))
    dies[0].send(1, b"the third")
    assert (await dies[1].until(2))[-1] == (0, b"the third")
    assert dies[1].carrier.statistics().broken == 0
    assert not errors
    page.close()


async def test_a_handler_that_raises_stops_nothing(plan: ShmPlan) -> None:
    errors = loop_errors()
    seen: list[bytes] = []

    def handler(_source: int, view: memoryview) -> None:
        seen.append(bytes(view))
        if len(seen) == 1:
            raise KeyError("handler")

    source, target = Die(plan, 0).start(), ShmCarrier(plan, 1)
    target.on_frame(handler)
    target.start(asyncio.get_running_loop())
    source.send(1, b"a")
    source.send(1, b"b")
    await until(lambda: len(seen) == 2)
    assert seen == [b"a", b"b"]
    assert [type(error) for error in errors] == [KeyError]
    source.carrier.close()
    target.close()


async def test_a_handler_that_keeps_a_lent_view_is_reported(plan: ShmPlan) -> None:
    errors = loop_errors()
    kept: list[memoryview] = []
    source, target = Die(plan, 0).start(), ShmCarrier(plan, 1, lend=True)
    target.on_frame(lambda _, view: kept.append(view))
    target.start(asyncio.get_running_loop())
    source.send(1, b"mine")
    await until(lambda: bool(errors))
    assert isinstance(errors[0], LocalProtocolError)
    kept.clear()
    source.carrier.close()
    target.close()


async def test_a_handler_may_send_and_may_close(plan: ShmPlan) -> None:
    left, right = ShmCarrier(plan, 0), ShmCarrier(plan, 1, lend=True)
    hops: list[int] = []

    def bounce(carrier: ShmCarrier, view: memoryview) -> None:
        hops.append(view[0])
        if view[0] >= 9:
            carrier.close()
        else:
            carrier.send(1 - carrier.die, bytes([view[0] + 1]))

    left.on_frame(lambda _, view: bounce(left, view))
    right.on_frame(lambda _, view: bounce(right, view))
    for carrier in (left, right):
        carrier.start(asyncio.get_running_loop())
    left.send(1, b"\0")
    await until(lambda: len(hops) == 10)
    with pytest.raises(CarrierClosed):  # the tenth hop is the left one's
        left.send(1, b"")
    right.send(0, b"\x09")
    for carrier in (left, right, right):
        carrier.close()


async def test_everything_is_unmapped_and_every_descriptor_closed(tmp_path: Path) -> None:
    before = sorted(os.listdir("/proc/self/fd"))
    with make_segments([0, 1], root=tmp_path, layout=LAYOUT) as plan:
        left, right = Die(plan, 0).start(), Die(plan, 1, lend=True).start()
        for _ in range(3):
            left.send(1, bytes(3000))
        await right.until(3)
        assert str(plan.directory) in mapped()
        left.carrier.close()
        right.carrier.close()
    assert str(plan.directory) not in mapped()
    assert sorted(os.listdir("/proc/self/fd")) == before


async def test_removed_memory_is_said_so(plan: ShmPlan, dies: list[Die]) -> None:
    for name in os.listdir(plan.directory):
        (plan.directory / name).unlink()
    with pytest.raises(CarrierClosed, match="gone"):
        dies[0].send(1, b"")
    with pytest.raises(CarrierClosed, match="gone"):
        Die(plan, 1).start()


def test_only_an_abandoned_directory_is_removed(tmp_path: Path) -> None:
    with make_segments([0], root=tmp_path) as plan:
        assert remove_abandoned(tmp_path) == []
        left = tmp_path / "xds-shm-left"
        left.mkdir()
        (left / "lock").touch()
        (tmp_path / "other").mkdir()
        with make_segments([0], root=tmp_path) as second:
            assert not left.exists()
            assert second.directory != plan.directory
        assert plan.directory.exists()
        assert (tmp_path / "other").exists()


def test_an_unusable_root_is_refused(tmp_path: Path) -> None:
    with pytest.raises(BadInput, match="writable"):
        make_segments([0], root=tmp_path / "missing")


def test_a_failed_start_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "posix_fallocate", refuse_memory)
    before = sorted(os.listdir("/proc/self/fd"))
    with pytest.raises(CapacityExceeded):
        make_segments([0], root=tmp_path)
    assert not os.listdir(tmp_path)
    assert sorted(os.listdir("/proc/self/fd")) == before


def test_epochs_only_grow_and_lives_are_counted(tmp_path: Path) -> None:
    with make_segments([3], root=tmp_path) as plan:
        assert [plan.epoch, plan.bump_epoch(), plan.epoch] == [1, 2, 2]
        page = DiePage(plan, 3)
        assert [page.life, page.begin_life(), page.begin_life(), page.life] == [1, 1, 2, 2]
        page.close()
