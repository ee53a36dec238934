"""Brokers and buses for the conformance suite and for the tests against a real server."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Mapping
from dataclasses import replace
from typing import Any, Protocol, TypeVar

from libs.bus.api import POLICIES, Bus, BusFault, BusMessage, Lane, LanePolicy
from libs.bus.memory import MemoryBroker, MemoryBus
from libs.bus.nats import NatsBus, NatsOptions
from libs.bus.server import NatsServer

T = TypeVar("T")
PATIENCE_S = 10.0


class Recorder:
    """A handler that remembers, and waits for what a test expects."""

    def __init__(self) -> None:
        self.messages: list[BusMessage] = []
        self._changed = asyncio.Event()

    async def __call__(self, message: BusMessage) -> None:
        self.messages.append(message)
        self._changed.set()

    @property
    def data(self) -> list[bytes]:
        return [message.data for message in self.messages]

    async def wait_for(self, count: int) -> list[bytes]:
        async with asyncio.timeout(PATIENCE_S):
            while len(self.messages) < count:
                self._changed.clear()
                await self._changed.wait()
        return self.data


class FaultLog:
    """A fault handler that remembers, and waits for a kind."""

    def __init__(self) -> None:
        self.faults: list[BusFault] = []
        self._changed = asyncio.Event()

    def __call__(self, fault: BusFault) -> None:
        self.faults.append(fault)
        self._changed.set()

    async def wait_for(self, kind: str, count: int = 1) -> BusFault:
        async with asyncio.timeout(PATIENCE_S):
            while len(found := [fault for fault in self.faults if fault.kind == kind]) < count:
                self._changed.clear()
                await self._changed.wait()
        return found[count - 1]


Policies = Mapping[Lane, LanePolicy]


class Broker(Protocol):
    """What the conformance suite may do to either kind of broker."""

    async def connect(self, name: str = "client", policies: Policies = POLICIES) -> Bus: ...

    def freeze(self) -> None: ...

    def crash(self) -> None: ...

    def revive(self) -> None: ...

    def faults_of(self, bus: Bus) -> FaultLog: ...


class _Clients:
    def __init__(self) -> None:
        self.open: list[tuple[Bus, FaultLog]] = []

    def faults_of(self, bus: Bus) -> FaultLog:
        return next(log for known, log in self.open if known is bus)

    async def close(self) -> None:
        for bus, _ in self.open:
            await bus.close()


class MemoryKind(_Clients):
    def __init__(self) -> None:
        super().__init__()
        self._broker = MemoryBroker(seed=1)
        self.freeze, self.crash = self._broker.freeze, self._broker.crash
        self.revive = self._broker.revive

    async def connect(self, name: str = "client", policies: Policies = POLICIES) -> Bus:
        log = FaultLog()
        bus = await MemoryBus.connect(self._broker, policies=policies, on_fault=log)
        self.open.append((bus, log))
        return bus


class NatsKind(_Clients):
    def __init__(self, server: NatsServer) -> None:
        super().__init__()
        self.server = server
        self.closed: list[str] = []  # reasons of connections that ended for good
        self.freeze, self.crash, self.revive = server.pause, server.kill, self._revive

    async def connect(
        self, name: str = "client", policies: Policies = POLICIES, **credentials: str
    ) -> NatsBus:
        log = FaultLog()
        options = NatsOptions(
            self.server.url, name, policies, detect_s=3.0, reconnect_wait_s=0.1,
            credentials=credentials,
        )  # fmt: skip
        bus = await NatsBus.connect(options, on_fault=log, on_closed=self.closed.append)
        self.open.append((bus, log))
        return bus

    def _revive(self) -> None:
        if self.server.pid is None:
            self.server.start()
        else:
            self.server.resume()


def only(lane: Lane, **changes: int) -> dict[Lane, LanePolicy]:
    """The policy of one lane with some bounds changed, and no other lane."""
    return {lane: replace(POLICIES[lane], **changes)}


async def until(condition: Callable[[], bool]) -> None:
    """Wait for a condition that no event announces."""
    async with asyncio.timeout(PATIENCE_S):
        while not condition():  # noqa: ASYNC110 - some facts are announced by no event
            await asyncio.sleep(0.01)


def begin(call: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
    """Start something whose outcome the test looks at later."""
    return asyncio.get_running_loop().create_task(call)
