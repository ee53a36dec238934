"""A host of one core on an in-memory broker, with a client that talks to it and listens."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from libs.actor import (
    Effect,
    Event,
    Record,
    Started,
)
from libs.bus.api import BusMessage, Lane
from libs.bus.memory import MemoryBroker, MemoryBus
from libs.clock.pod_clock import PodClock, wall_ns
from libs.errors import TransferFailed
from libs.runtime.asyncio_host import AsyncioHost, HostOptions
from libs.wire.codec import decode_frame, encode_frame
from libs.wire.envelope import Envelope
from libs.wire.expert import E2A
from libs.wire.request import Cancel
from tests.support.cores import ScriptCore

NAME = "echo.a"
LEFT = Cancel("r1", "left")
ANSWER = E2A(1, 0, 1, 0, np.zeros((1, 4), np.float32))


class Facts:
    """A sink that keeps what it is told."""

    def __init__(self) -> None:
        self.records: list[Record] = []

    def record(self, _actor: str, _at_ns: int, record: Record) -> None:
        self.records.append(record)


class Doubler:
    """Doubles numbers in whatever thread it is run; fails in two ways."""

    def __init__(self) -> None:
        self.threads: list[str] = []

    def run(self, job: Any) -> Any:
        self.threads.append(threading.current_thread().name)
        if job is None:
            raise TransferFailed("nothing to double")
        return 2 * int(job)


@dataclass(slots=True)
class World:
    """A broker, a host under test on it, and a client that listens."""

    broker: MemoryBroker
    client: MemoryBus
    hosts: list[AsyncioHost] = field(default_factory=list)
    facts: Facts = field(default_factory=Facts)
    heard: list[tuple[str, Envelope, Any]] = field(default_factory=list)

    async def host(
        self,
        react: Callable[[Event], list[Effect]],
        *,
        pace: float = 0.0,
        options: HostOptions | None = None,
        executor: Any = None,
    ) -> AsyncioHost:
        core = ScriptCore(NAME, react)
        bus = await MemoryBus.connect(self.broker)
        host = AsyncioHost(
            core, bus, PodClock(wall_ns(), pace), executor=executor or Doubler(),
            options=options, sink=self.facts,
        )  # fmt: skip
        self.hosts.append(host)
        await host.start()
        return host

    async def listen(self, subject: str, lane: Lane = Lane.CONTROL) -> None:
        async def hear(message: BusMessage) -> None:
            envelope, body = decode_frame(message.data)
            self.heard.append((message.subject, envelope, body))

        await self.client.subscribe(subject, hear, lane=lane)

    def tell(self, message: Any, at_ns: int = 0, subject: str = f"xds.act.{NAME}") -> None:
        self.client.publish(subject, encode_frame(Envelope("echo.b", 2, 1, at_ns), message))


def on_start(*effects: Effect) -> Callable[[Event], list[Effect]]:
    return lambda event: list(effects) if isinstance(event, Started) else []


def nothing(_event: Event) -> list[Effect]:
    return []


def seen(host: AsyncioHost) -> list[Event]:
    core = host.core
    assert isinstance(core, ScriptCore)
    return [event for _, event in core.seen]


async def until(condition: Callable[[], bool]) -> None:
    """Let the loop run until `condition`, at most a second."""
    async with asyncio.timeout(1.0):
        while not condition():  # noqa: ASYNC110 - conditions of synchronous cores have no event
            await asyncio.sleep(0.001)
