"""The carrier over shared memory between real processes: echo, kill, successor, epoch, overload."""

from __future__ import annotations

import asyncio
import contextlib
import multiprocessing
import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from libs.carrier.ring import RingLayout
from libs.carrier.segment import ShmPlan, make_segments
from libs.carrier.shm import ShmCarrier
from libs.carrier.stamp import read_stamped, stamped
from libs.errors import Backpressure, CapacityExceeded, RemoteProtocolError, StaleEpoch

FORK = multiprocessing.get_context("fork")
#: Small enough that frames wrap around and large ones take several slots.
LAYOUT = RingLayout(slots=8, slot_bytes=4096)
HERE, THERE = 3, 11


@pytest.fixture
def plan(tmp_path: Path) -> Iterator[ShmPlan]:
    with make_segments([HERE, THERE], layout=LAYOUT, checksum=True, root=tmp_path) as made:
        yield made


def body(number: int) -> bytes:
    """Frame `number`: it says its number, and its length varies from 8 bytes to several slots."""
    size = 8 + (number * 7919) % (3 * LAYOUT.slot_bytes)
    return number.to_bytes(8, "little") + bytes([number % 251]) * (size - 8)


def serve(plan: ShmPlan, role: Callable[[ShmCarrier], None]) -> None:
    """A child: one carrier for `THERE`, until it is killed."""

    async def main() -> None:
        role(ShmCarrier(plan, THERE))
        await asyncio.Event().wait()

    asyncio.run(main())


def echo(carrier: ShmCarrier) -> None:
    """Send back every frame."""
    carrier.on_frame(lambda source, view: carrier.send(source, view))
    carrier.start(asyncio.get_running_loop())


def flood(carrier: ShmCarrier) -> None:
    """Send numbered frames as fast as they are taken."""
    loop = asyncio.get_running_loop()
    number = 0

    def pump() -> None:
        nonlocal number
        with contextlib.suppress(Backpressure):
            for _ in range(16):
                carrier.send(HERE, body(number))
                number += 1
        loop.call_soon(pump)

    carrier.on_frame(lambda source, view: None)
    carrier.start(loop)
    pump()


@contextlib.contextmanager
def child(plan: ShmPlan, role: Callable[[ShmCarrier], None]) -> Iterator[int]:
    process = FORK.Process(target=serve, args=(plan, role), daemon=True)
    process.start()
    assert process.pid is not None
    try:
        yield process.pid
    finally:
        process.kill()
        process.join(10)


async def eventually(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(20):
        while not condition():  # noqa: ASYNC110 - counters in shared memory raise no event
            await asyncio.sleep(0.001)


class End:
    """The parent's carrier and what it received."""

    def __init__(self, plan: ShmPlan, die: int = HERE) -> None:
        self.frames: list[bytes] = []
        self.carrier = ShmCarrier(plan, die)
        self.carrier.on_frame(lambda source, view: self.frames.append(bytes(view)))
        self.carrier.start(asyncio.get_running_loop())

    async def until(self, count: int) -> None:
        await eventually(lambda: len(self.frames) >= count)

    async def quiet(self) -> None:
        """Until nothing more has come for a while."""
        seen = -1
        while seen != len(self.frames):
            seen = len(self.frames)
            await asyncio.sleep(0.1)


async def test_frames_of_all_sizes_return_whole_and_in_order(plan: ShmPlan) -> None:
    with child(plan, echo):
        end = End(plan)
        for number in range(600):
            end.carrier.send(THERE, (body(number)[:5], body(number)[5:]))
            if number % 32 == 0:
                await asyncio.sleep(0)
        await end.until(600)
        assert end.frames == [body(number) for number in range(600)]
        counters = end.carrier.statistics()
        assert (counters.corrupt, counters.broken, counters.refused) == (0, 0, 0)
        assert counters.waiting_frames == counters.waiting_bytes == 0
        end.carrier.close()


async def test_a_process_killed_while_it_sends_leaves_whole_frames_only(plan: ShmPlan) -> None:
    end = End(plan)
    for life in range(3):
        with child(plan, flood) as pid:
            await end.until(200)
            os.kill(pid, signal.SIGKILL)
        await end.quiet()
        assert end.frames == [body(number) for number in range(len(end.frames))], life
        end.frames.clear()
    counters = end.carrier.statistics()
    assert (counters.corrupt, counters.broken) == (0, 0)
    end.carrier.close()


async def test_a_successor_gets_nothing_that_was_meant_for_the_dead(plan: ShmPlan) -> None:
    end = End(plan)
    with child(plan, echo) as pid:
        end.carrier.send(THERE, body(0))
        await end.until(1)
        os.kill(pid, signal.SIGSTOP)  # alive, and it will never read again
        for number in range(1, 50):
            end.carrier.send(THERE, body(number))
        assert end.carrier.statistics().waiting_frames > 0
    with child(plan, echo):
        # Its birth is what replaces the ring.
        await eventually(lambda: end.carrier.statistics().stale > 0)
        end.carrier.send(THERE, body(99))
        await end.until(2)
        await end.quiet()
        assert end.frames == [body(0), body(99)]
    end.carrier.close()


async def test_a_replaced_process_that_lives_on_may_not_send(plan: ShmPlan) -> None:
    old, sender = End(plan), End(plan, THERE)
    new = End(plan)
    with pytest.raises(StaleEpoch):
        old.carrier.send(THERE, b"late")
    sender.carrier.send(HERE, b"hello")
    await new.until(1)
    assert (old.frames, new.frames) == ([], [b"hello"])
    for end in (old, sender, new):
        end.carrier.close()


async def test_a_new_epoch_drops_what_was_sent_before_it(plan: ShmPlan) -> None:
    sender, end = End(plan, THERE), End(plan)
    sender.carrier.send(HERE, b"first")
    await end.until(1)
    for number in range(50):  # more than the ring holds: some wait in the outbox
        sender.carrier.send(HERE, body(number))
    plan.bump_epoch()
    sender.carrier.send(HERE, b"after")
    await end.until(2)
    await end.quiet()
    assert end.frames == [b"first", b"after"]
    assert sender.carrier.statistics().stale + end.carrier.statistics().stale == 50
    sender.carrier.close()
    end.carrier.close()


async def test_overload_is_refused_whole_and_nothing_that_was_taken_is_lost(plan: ShmPlan) -> None:
    sender, end = End(plan, THERE), End(plan)
    taken = 0
    with contextlib.suppress(Backpressure):
        while taken < 100_000:
            sender.carrier.send(HERE, body(taken))
            taken += 1
    assert sender.carrier.statistics().refused == 1
    await end.until(taken)
    assert end.frames == [body(number) for number in range(taken)]
    with pytest.raises(CapacityExceeded):
        sender.carrier.send(HERE, bytes(LAYOUT.slots * LAYOUT.slot_bytes + 1))
    sender.carrier.close()
    end.carrier.close()


def test_a_stamp_travels_beside_the_frame_and_a_cut_one_is_refused() -> None:
    whole = b"".join(stamped(HERE, THERE, 123_456_789, b"frame"))
    stamp = read_stamped(memoryview(whole))
    assert (stamp.source, stamp.target, stamp.deliver_ns) == (HERE, THERE, 123_456_789)
    assert bytes(stamp.frame) == b"frame"
    with pytest.raises(RemoteProtocolError):
        read_stamped(memoryview(whole)[:63])
