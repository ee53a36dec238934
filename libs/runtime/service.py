"""What every service process does: read its place from the environment, build its core, run it.

A service package provides `build(context) -> Built`; its `__main__` passes that to `main`. The
embedded pod forks instead of starting interpreters and calls `run_service` in the child, with the
model already in memory; nothing else differs.

    XDS_ACTOR        which actor of the plan this process is       decode_te.d0.dp1
    XDS_TOPOLOGY     topology file or the name of a shipped one    mini
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
from dataclasses import dataclass
from typing import Any

from libs.bus.api import BusFault
from libs.bus.nats import NatsBus, NatsOptions
from libs.clock.pod_clock import PodClock
from libs.config.plan import plan_pod
from libs.config.topology import load_topology
from libs.errors import BadInput, PeerLost, XdsError
from libs.fabric.superpod import superpod_of
from libs.model.resources import ModelResources
from libs.runtime.asyncio_host import AsyncioHost, HostOptions
from libs.runtime.build import Builder, Built, ServiceContext
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
        log=text("XDS_LOG", "info"),
        validate=text("XDS_VALIDATE", "0") == "1",
    )


def context_for(settings: ServiceSettings, model: ModelResources | None = None) -> ServiceContext:
    """Plan the pod and find this process's actor in it."""
    plan = plan_pod(load_topology(settings.topology))
    try:
        actor = plan.actor(settings.actor)
    except KeyError:
        known = ", ".join(item.name for item in plan.actors)
        message = f"XDS_ACTOR={settings.actor!r} is not in the topology; it has {known}"
        raise BadInput(message, field="XDS_ACTOR") from None
    section = plan.topology.model
    model = model or ModelResources(section.checkpoint, section.engine)
    return ServiceContext(plan, actor, model, settings.validate)


async def run_service(
    build: Builder, settings: ServiceSettings, model: ModelResources | None = None
) -> None:
    """Run one service until SIGTERM or SIGINT; raises what stopped its core."""
    context = context_for(settings, model)
    built = build(context)
    sink = LogSink(settings.actor, settings.incarnation)
    host: AsyncioHost | None = None

    def closed(reason: str) -> None:
        if host is not None:
            host.fail(PeerLost(f"the broker connection ended for good: {reason}"))

    def fault(item: BusFault) -> None:
        sink.note("bus_fault", lane=item.lane, kind=item.kind, detail=item.detail)

    options = NatsOptions(settings.nats, settings.actor)
    bus = await NatsBus.connect(options, on_fault=fault, on_closed=closed)
    host = AsyncioHost(
        built.core,
        bus,
        PodClock(settings.epoch_ns, settings.pace),
        executor=built.executor,
        options=HostOptions(
            dies=context.actor.dies,
            incarnation=settings.incarnation,
            shards=context.plan.topology.fabric.shards,
            pod=superpod_of(context.plan),
            validate=settings.validate,
            inline=built.inline,
        ),
        sink=sink if built.sink is None else FanOut(sink, built.sink),
    )
    await _until_stopped(host, built, sink)


async def _until_stopped(host: AsyncioHost, built: Built, sink: LogSink) -> None:
    stopped = asyncio.Event()
    loop = asyncio.get_running_loop()
    for name in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(name, stopped.set)
    await host.start()
    sink.note("service_started", pid=os.getpid())
    waits: list[asyncio.Task[Any]] = [
        asyncio.create_task(stopped.wait()),
        asyncio.create_task(host.wait()),
    ]
    if built.edge is not None:
        waits.append(asyncio.create_task(built.edge(host, sink)))
    try:
        done, _ = await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
        for task in done:
            task.result()
    finally:
        for task in waits:
            task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await asyncio.gather(*waits, return_exceptions=True)
        sink.note("service_stopping")
        await host.stop()


def main(build: Builder) -> None:
    """Entry point of `python -m services.<name>`; exit code 2 for bad input, 1 for a failure."""
    try:
        settings = settings_from_env(os.environ)
        configure_logs(settings.log)
        asyncio.run(run_service(build, settings))
    except BadInput as error:
        print(f"error: {error.message}", file=sys.stderr)
        sys.exit(2)
    except XdsError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(1)
