"""Dies in this process and in children that may be killed at any moment.

Every frame describes itself (life, number, checksum, and its number says its size), so a torn, cut,
repeated or foreign one is recognised wherever it turns up: here it fails the test, in a child it
ends the child, and `Children.kill` notices that there was nobody left to kill.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import signal
import struct
import sys
import time
import traceback
import zlib
from collections.abc import Callable, Coroutine
from typing import Any

from libs.carrier.api import FrameHandler
from libs.carrier.ring import RingLayout
from libs.carrier.segment import ShmPlan
from libs.carrier.shm import ShmCarrier
from libs.errors import Backpressure

#: Small, so that frames wrap around and most take several slots.
LAYOUT = RingLayout(slots=16, slot_bytes=4096)
DIES = HERE, THERE = 3, 11
PATIENCE_S = 20.0

_HEAD = struct.Struct("<III")
#: A die's process, from its start to whatever ends it.
Role = Callable[[], Coroutine[Any, Any, None]]


# ---------------------------------------------------------------- frames


def frame(life: int, number: int) -> bytes:
    body, crc = _body(number)
    return _HEAD.pack(life, number, crc) + body


def check(view: memoryview) -> tuple[int, int]:
    """Life and number of a frame that is exactly what was sent."""
    life, number, crc = _HEAD.unpack_from(view)
    body, wanted = _body(number)
    assert (view.nbytes, crc) == (_HEAD.size + len(body), wanted), (life, number)
    assert zlib.crc32(view[_HEAD.size :]) == crc, (life, number)
    return life, number


#: Made before any child is forked, so that a child that sends does little else than send, and is
#: killed inside the carrier. Too many for what an older frame left in a slot to fit a newer one.
_BODIES = [random.Random(i).randbytes(i * 977 % 20_000) for i in range(101)]
_CHECKSUMS = [zlib.crc32(body) for body in _BODIES]


def _body(number: int) -> tuple[bytes, int]:
    return _BODIES[number % len(_BODIES)], _CHECKSUMS[number % len(_BODIES)]


# ---------------------------------------------------------------- this process


class Home:
    """A die of this process, and what arrived at it."""

    def __init__(self, plan: ShmPlan, die: int, loop: asyncio.AbstractEventLoop, lend: bool):
        self.got: list[tuple[int, int]] = []
        self.carrier = ShmCarrier(plan, die, lend=lend)
        self.carrier.on_frame(lambda _, view: self.got.append(check(view)))
        self.carrier.start(loop)

    def hears(self, life: int) -> bool:
        """Whether the last frame so far is of `life`."""
        return bool(self.got) and self.got[-1][0] == life

    def numbers(self, life: int) -> list[int]:
        """What arrived from one life, in the order of arrival."""
        return [number for of, number in self.got if of == life]


class Host:
    """This process: its dies share a loop that runs only while somebody waits for something."""

    def __init__(self, plan: ShmPlan) -> None:
        self._plan = plan
        self._loop = asyncio.new_event_loop()
        self._failures: list[object] = []
        self._loop.set_exception_handler(lambda _, context: self._failures.append(context))
        self._homes: list[Home] = []

    def open(self, die: int, *, lend: bool = False) -> Home:
        """A new life of `die`."""
        self._homes.append(Home(self._plan, die, self._loop, lend))
        return self._homes[-1]

    def run(self, seconds: float) -> None:
        self._loop.run_until_complete(asyncio.sleep(seconds))

    def until(self, done: Callable[[], bool]) -> None:
        deadline = time.perf_counter() + PATIENCE_S
        while not done():
            assert not self._failures
            assert time.perf_counter() < deadline, self._story()
            self.run(0.001)

    def quiet(self) -> None:
        """Until nothing more has come for a while."""
        seen = -1
        while seen != (seen := sum(len(home.got) for home in self._homes)):
            self.run(0.1)

    def _story(self) -> list[object]:
        return [(home.carrier.statistics(), home.got[-3:]) for home in self._homes]

    def close(self) -> None:
        """Nothing may have been wrong with any frame or any ring."""
        for home in self._homes:
            home.carrier.close()
        self._loop.close()
        assert not self._failures
        for home in self._homes:
            counters = home.carrier.statistics()
            assert (counters.broken, counters.corrupt) == (0, 0), counters


# ---------------------------------------------------------------- children


class Children:
    """Forked processes; whoever is left when a test ends is killed."""

    def __init__(self) -> None:
        self._running: set[int] = set()

    def fork(self, main: Callable[[], None]) -> int:
        """A process that runs `main` and never comes back."""
        pid = os.fork()
        if pid == 0:
            try:
                main()
            except BaseException:  # noqa: BLE001 - a child must never return into the test
                traceback.print_exc()
            finally:
                os._exit(1)
        self._running.add(pid)
        return pid

    def spawn(self, role: Role) -> int:
        """A process that serves a die."""
        return self.fork(lambda: asyncio.run(role()))

    def kill(self, pid: int) -> None:
        """SIGKILL for a process that is in good health."""
        os.kill(pid, signal.SIGKILL)
        assert os.WIFSIGNALED(self.wait(pid)), "it had ended by itself: it says why on stderr"

    def wait(self, pid: int) -> int:
        """Its status, as soon as it ends."""
        _, status = os.waitpid(pid, 0)
        self._running.discard(pid)
        return status

    def kill_all(self) -> None:
        for pid in tuple(self._running):
            os.kill(pid, signal.SIGKILL)
            self.wait(pid)


def serve(plan: ShmPlan, die: int, handler: FrameHandler, *, lend: bool = False) -> ShmCarrier:
    """The carrier of `die` in a child's running loop; a handler that fails ends the child."""
    loop = asyncio.get_running_loop()
    loop.set_exception_handler(_end)
    carrier = ShmCarrier(plan, die, lend=lend)
    carrier.on_frame(handler)
    carrier.start(loop)
    return carrier


def _end(_loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
    print(f"a child failed: {context}", file=sys.stderr, flush=True)
    os._exit(1)


async def echo(plan: ShmPlan, *, lend: bool = False, life: int = 0) -> None:
    """`THERE` sends back every frame, and accepts none that was meant for another life."""

    def back(source: int, view: memoryview) -> None:
        of, number = check(view)
        assert of == life, (of, number)
        carrier.send(source, frame(life, number))

    carrier = serve(plan, THERE, back, lend=lend)
    await asyncio.get_running_loop().create_future()


async def flood(plan: ShmPlan, life: int) -> None:
    """`THERE` sends numbered frames as fast as they are taken."""
    carrier = serve(plan, THERE, lambda _source, _view: None)
    number = 0
    while True:
        with contextlib.suppress(Backpressure):
            carrier.send(HERE, frame(life, number))
            number += 1
        await asyncio.sleep(0)
