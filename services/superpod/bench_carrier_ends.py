"""Two processes and every way of carrying a frame between them, for `bench_carrier`.

    near side  --frame-->  far side      by shm, shm_lent, unix or nats
               <--stamp--                by the same way: the moment at which the frame was there

Both ends read CLOCK_MONOTONIC, which is one clock for all processes of a host, so the stamp minus
the moment of sending is a one-way latency; what the answer costs on its way back is not in it.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import struct
import sys
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Self

import numpy as np

from libs.bus.api import BusMessage, Lane
from libs.bus.nats import NatsBus, NatsOptions
from libs.carrier.api import Buffer
from libs.carrier.segment import ShmPlan
from libs.carrier.shm import ShmCarrier
from libs.clock.pod_clock import monotonic_s
from libs.errors import DeadlineExceeded, PeerLost

#: Dies of the two processes; the far one serves a second die, whose carrier lends its frames.
NEAR, FAR, FAR_LENDING = DIES = 0, 1, 2
ANSWER_S = 30.0

_STAMP = struct.Struct("<d")
_LENGTH = struct.Struct("<Q")
#: Starts one frame on its way.
Send = Callable[[bytes], None]


@dataclass(frozen=True, slots=True)
class Places:
    """Where the two processes meet."""

    shm: ShmPlan
    socket: Path
    broker: str


def _stamp() -> bytes:
    return _STAMP.pack(monotonic_s())


# ---------------------------------------------------------------- ways


def _open_carrier(
    places: Places, die: int, handler: Callable[[ShmCarrier, int, memoryview], None]
) -> ShmCarrier:
    carrier = ShmCarrier(places.shm, die, lend=die == FAR_LENDING)
    carrier.on_frame(lambda source, view: handler(carrier, source, view))
    carrier.start(asyncio.get_running_loop())
    return carrier


async def _open_bus(
    places: Places, name: str, handler: Callable[[NatsBus, bytes], None]
) -> NatsBus:
    bus = await NatsBus.connect(NatsOptions(places.broker, name))

    async def receive(message: BusMessage) -> None:
        handler(bus, message.data)

    await bus.subscribe(f"bench.{name}", receive, lane=Lane.BULK)
    return bus


class _Socket(asyncio.BufferedProtocol):
    """Length-prefixed frames, received straight into memory of their own: no copy but the kernel's.

    The best that a stream can do in an event loop, so that the comparison is with a good one.
    """

    def __init__(self, handler: Callable[[_Socket, memoryview], None]) -> None:
        self._handler = handler
        self._transport: asyncio.Transport | None = None
        self._length = memoryview(bytearray(_LENGTH.size))
        self._target = self._length
        self._filled = 0

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport

    def get_buffer(self, sizehint: int) -> memoryview:
        return self._target[self._filled :]

    def buffer_updated(self, nbytes: int) -> None:
        self._filled += nbytes
        if self._filled < self._target.nbytes:
            return
        done, self._filled = self._target, 0
        if done is self._length:
            (size,) = _LENGTH.unpack(done)
            self._target = np.empty(size, np.uint8).data
        else:
            self._target = self._length
            self._handler(self, done)

    def send(self, frame: bytes) -> None:
        """Start one frame on its way."""
        assert self._transport is not None
        self._transport.write(_LENGTH.pack(len(frame)))
        self._transport.write(frame)


# ---------------------------------------------------------------- far side


@contextlib.contextmanager
def far_side(places: Places) -> Iterator[None]:
    """The other process, from the moment it listens until it is killed."""
    ours, theirs = socket.socketpair()
    pid = os.fork()
    if pid == 0:
        ours.close()
        _run_far_side(places, theirs)
    theirs.close()
    try:
        ours.settimeout(ANSWER_S)
        if not ours.recv(1):
            raise PeerLost("the second process of the benchmark could not start")
        yield
    finally:
        ours.close()
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)


def _run_far_side(places: Places, parent: socket.socket) -> None:
    """The whole life of the forked process; it never returns."""
    try:
        asyncio.run(_answer_for_ever(places, parent))
    except BaseException as error:  # noqa: BLE001 - a child must never return into the parent
        print(f"far side: {type(error).__name__}: {error}", file=sys.stderr, flush=True)
    finally:
        os._exit(1)


async def _answer_for_ever(places: Places, parent: socket.socket) -> None:
    loop = asyncio.get_running_loop()
    for die in (FAR, FAR_LENDING):
        _open_carrier(places, die, lambda carrier, source, _: carrier.send(source, _stamp()))
    bus = await _open_bus(
        places, "far", lambda bus, _: bus.publish("bench.near", _stamp(), lane=Lane.BULK)
    )
    await bus.flush()  # now the broker knows of the subscription
    await loop.create_unix_server(
        lambda: _Socket(lambda near, _: near.send(_stamp())), str(places.socket)
    )
    parent.setblocking(False)
    await loop.sock_sendall(parent, b"1")
    await loop.sock_recv(parent, 1)  # nothing is ever sent: the parent is dead
    os._exit(1)  # without the farewell to a broker that died with it


# ---------------------------------------------------------------- near side


class NearSide:
    """This process's end of every way; sends one frame at a time and waits for its stamp."""

    def __init__(self) -> None:
        self.ways: dict[str, Send] = {}
        self._stamp: asyncio.Future[float] | None = None
        self._ends = contextlib.AsyncExitStack()

    @classmethod
    @contextlib.asynccontextmanager
    async def opened(cls, places: Places) -> AsyncIterator[Self]:
        """Open every way, and close them again."""
        near = cls()
        async with near._ends:
            await near._open(places)
            yield near

    async def _open(self, places: Places) -> None:
        carrier = _open_carrier(places, NEAR, lambda _carrier, _source, view: self._take(view))
        self._ends.callback(carrier.close)
        bus = await _open_bus(places, "near", lambda _, data: self._take(data))
        self._ends.push_async_callback(bus.close)
        await bus.flush()
        transport, stream = await asyncio.get_running_loop().create_unix_connection(
            lambda: _Socket(lambda _, view: self._take(view)), str(places.socket)
        )
        self._ends.callback(transport.close)
        self.ways = {
            "shm": lambda frame: carrier.send(FAR, frame),
            "shm_lent": lambda frame: carrier.send(FAR_LENDING, frame),
            "unix": stream.send,
            "nats": lambda frame: bus.publish("bench.far", frame, lane=Lane.BULK),
        }

    def _take(self, stamp: Buffer) -> None:
        assert self._stamp is not None, "one frame at a time"
        self._stamp.set_result(_STAMP.unpack(stamp)[0])

    async def latency_s(self, way: str, frame: bytes) -> float:
        """From before `send` until the handler there had the whole frame."""
        send = self.ways[way]
        self._stamp = asyncio.get_running_loop().create_future()
        begin_s = monotonic_s()
        send(frame)
        try:
            async with asyncio.timeout(ANSWER_S):
                return await self._stamp - begin_s
        except TimeoutError:
            text = f"no answer by {way} to {len(frame)} bytes within {ANSWER_S} s"
            raise DeadlineExceeded(text) from None
