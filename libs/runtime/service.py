"""What every service process does: read its place from the environment, build its core, run it.

A service package provides `build(context) -> Built`; its `__main__` passes that to `main`. The
embedded pod forks instead of starting interpreters and calls `run_service` in the child, with the
model already in memory and with what the processes of a host share; nothing else differs.

An actor may have another one beside it, in the same process and on the same connection: with
`carrier: shm` the shard of the fabric that stamps what reaches its die (`libs.runtime.shortcut`).

    XDS_ACTOR        which actor of the plan this process is       decode_te.d0.dp1
    XDS_TOPOLOGY     topology file or the name of a shipped one    mini
    XDS_CARRIER      nats or shm, where not as the topology says   (as the topology says)
    XDS_NATS         broker address                                nats://127.0.0.1:4222
    XDS_EPOCH_NS     wall time of emulated zero, the same for all  0 (the Unix epoch)
    XDS_PACE         wall seconds per emulated second              1.0
    XDS_INCARNATION  number of this actor's life                   1
    XDS_LOG          log level                                     info
    XDS_VALIDATE     1 to check every invariant after each event   0
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from libs.bus.api import BusFault
from libs.bus.nats import NatsBus, NatsOptions
from libs.carrier.segment import ShmPlan
from libs.carrier.shm import ShmCarrier
from libs.clock.pod_clock import PodClock
from libs.config.plan import plan_pod
from libs.config.topology import load_topology
from libs.errors import BadInput, PeerLost, XdsError
from libs.fabric.sharding import sharding_of
from libs.fabric.superpod import superpod_of
from libs.ids import role_of
from libs.model.resources import ModelResources
from libs.runtime.asyncio_host import AsyncioHost, HostOptions
from libs.runtime.build import Builder, Built, ServiceContext
from libs.runtime.cores import pin_to_core
from libs.runtime.gc_control import GcControl
from libs.runtime.shortcut import Shortcut
from libs.telemetry.logs import LogSink, configure_logs
from libs.telemetry.metrics import FanOut


@dataclass(frozen=True, slots=True)
class ServiceSettings:
    """One process's place in the pod."""

    actor: str
    topology: str
    nats: str
    epoch_ns: int
    pace: float
    incarnation: int = 1
    carrier: str = ""
    log: str = "info"
    validate: bool = False


def settings_from_env(env: Mapping[str, str]) -> ServiceSettings:
    """Read `XDS_*`; raises `BadInput` naming the variable that is missing or malformed."""

    def text(name: str, default: str | None = None) -> str:
        value = env.get(name, default)
        if value is None:
            raise BadInput(f"{name} is not set", field=name)
        return value

    def number(name: str, default: str, kind: Callable[[str], Any]) -> Any:
        value = text(name, default)
        try:
            return kind(value)
        except ValueError as error:
            raise BadInput(f"{name}={value!r} is not a number", field=name) from error

    return ServiceSettings(
        actor=text("XDS_ACTOR"),
        topology=text("XDS_TOPOLOGY", "mini"),
        nats=text("XDS_NATS", "nats://127.0.0.1:4222"),
        epoch_ns=number("XDS_EPOCH_NS", "0", int),
        pace=number("XDS_PACE", "1.0", float),
        incarnation=number("XDS_INCARNATION", "1", int),
        carrier=text("XDS_CARRIER", ""),
        log=text("XDS_LOG", "info"),
        validate=text("XDS_VALIDATE", "0") == "1",
    )


def context_for(settings: ServiceSettings, model: ModelResources | None = None) -> ServiceContext:
    """Plan the pod and find this process's actor in it."""
    plan = plan_pod(load_topology(settings.topology, settings.carrier))
    try:
        actor = plan.actor(settings.actor)
    except KeyError:
        known = ", ".join(item.name for item in plan.actors)
        message = f"XDS_ACTOR={settings.actor!r} is not in the topology; it has {known}"
        raise BadInput(message, field="XDS_ACTOR") from None
    section = plan.topology.model
    model = model or ModelResources(section.checkpoint, section.engine)
    return ServiceContext(plan, actor, model, settings.validate, settings.incarnation)


async def run_service(
    builders: Mapping[str, Builder],
    settings: ServiceSettings,
    model: ModelResources | None = None,
    shm: ShmPlan | None = None,
) -> None:
    """Run one service until SIGTERM or SIGINT; raises what stopped its core.

    `builders` by role must have those of the actor and of what lives beside it; `shm` is the memory
    that the processes of this host share.
    """
    context = context_for(settings, model)
    if context.plan.topology.jitter.pin_cores:
        pin_to_core(context.plan, context.actor)
    built, beside = builders[context.actor.role](context), _beside(context, builders)
    sink = LogSink(settings.actor, settings.incarnation)
    process: _Process | None = None

    def closed(reason: str) -> None:
        if process is not None:
            process.fail(PeerLost(f"the broker connection ended for good: {reason}"))

    def fault(item: BusFault) -> None:
        sink.note("bus_fault", lane=item.lane, kind=item.kind, detail=item.detail)

    options = NatsOptions(settings.nats, settings.actor)
    bus = await NatsBus.connect(options, on_fault=fault, on_closed=closed)
    process = _Process(bus, settings)
    process.add(built, context, sink)
    if beside is not None:
        die = context.actor.dies[0]
        process.shorten(die, None if shm is None else ShmCarrier(shm, die))
        process.add(*beside, LogSink(beside[1].actor.name, settings.incarnation))
    await _until_stopped(process, built, sink)


def _beside(
    context: ServiceContext, builders: Mapping[str, Builder]
) -> tuple[Built, ServiceContext] | None:
    """What lives in this process beside its actor."""
    actors = context.plan.beside(context.actor.name)
    if not actors:
        return None
    [actor] = actors
    if actor.role not in builders:
        raise BadInput(
            f"{actor.name} has to live beside {context.actor.name} (fabric.carrier is shm), which"
            f" only the pod can do: python -m services.pod.group {context.actor.name}",
            field="fabric.carrier",
        )
    own = replace(context, actor=actor)
    return builders[actor.role](own), own


class _Process:
    """The hosts of one process on one bus: its actor's, and that of the shard beside it if any."""

    def __init__(self, bus: NatsBus, settings: ServiceSettings) -> None:
        self._bus = bus
        self._settings = settings
        self._clock = PodClock(settings.epoch_ns, settings.pace)
        self._shortcut: Shortcut | None = None
        self._gc: GcControl | None = None
        self._hosts: list[AsyncioHost] = []

    @property
    def host(self) -> AsyncioHost:
        """The host of the process's own actor."""
        return self._hosts[0]

    def shorten(self, die: int, carrier: ShmCarrier | None) -> None:
        """Frames from and to `die` take the short way."""
        self._shortcut = Shortcut(die, carrier)
        self.host.shortcut = self._shortcut

    def add(self, built: Built, context: ServiceContext, sink: LogSink) -> None:
        """One more actor."""
        options = HostOptions(
            dies=context.actor.dies,
            incarnation=self._settings.incarnation,
            sharding=sharding_of(context.plan.topology),
            pod=superpod_of(context.plan),
            validate=self._settings.validate,
            inline=built.inline,
        )
        host = AsyncioHost(
            built.core,
            self._bus,
            self._clock,
            executor=built.executor,
            options=options,
            sink=sink if built.sink is None else FanOut(sink, built.sink),
        )
        host.shortcut = self._shortcut
        if built.executor is not None:
            host.gc = self._gc = GcControl(context.plan.topology.jitter.gc_every)
        self._hosts.append(host)

    async def start(self) -> None:
        for host in self._hosts:
            await host.start()
        if self._gc is not None:
            self._gc.begin(asyncio.get_running_loop())
        if self._shortcut is not None:
            owner, shard = self._hosts
            self._shortcut.start(owner, shard, asyncio.get_running_loop())

    async def wait(self) -> None:
        """Return never; raise what stopped one of the cores."""
        await asyncio.gather(*(host.wait() for host in self._hosts))

    def fail(self, error: Exception) -> None:
        for host in self._hosts:
            host.fail(error)

    def facts(self) -> dict[str, Any]:
        """What is worth a line at the end: the shared memory, the collector."""
        facts: dict[str, Any] = {} if self._shortcut is None else {**self._shortcut.counters()}
        if self._gc is not None:
            pauses = self._gc.pauses
            facts["gc_collections"] = pauses.collections
            facts["gc_longest_ms"] = round(1e3 * pauses.longest_s, 3)
        return facts

    async def stop(self) -> None:
        if self._gc is not None:
            self._gc.end()
        if self._shortcut is not None:
            self._shortcut.close()
        for host in self._hosts[1:]:
            host.halt()
        await self.host.stop()


async def _until_stopped(process: _Process, built: Built, sink: LogSink) -> None:
    stopped = asyncio.Event()
    loop = asyncio.get_running_loop()
    for name in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(name, stopped.set)
    await process.start()
    sink.note("service_started", pid=os.getpid())
    waits: list[asyncio.Task[Any]] = [
        asyncio.create_task(stopped.wait()),
        asyncio.create_task(process.wait()),
    ]
    if built.edge is not None:
        waits.append(asyncio.create_task(built.edge(process.host, sink)))
    try:
        done, _ = await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
        for task in done:
            task.result()
    finally:
        for task in waits:
            task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await asyncio.gather(*waits, return_exceptions=True)
        sink.note("service_stopping", **process.facts())
        await process.stop()


def main(build: Builder) -> None:
    """Entry point of `python -m services.<name>`; exit code 2 for bad input, 1 for a failure."""
    try:
        settings = settings_from_env(os.environ)
        configure_logs(settings.log)
        asyncio.run(run_service({role_of(settings.actor): build}, settings))
    except BadInput as error:
        print(f"error: {error.message}", file=sys.stderr)
        sys.exit(2)
    except XdsError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(1)
