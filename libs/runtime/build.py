"""How a service is put together: what a builder gets, and what it returns.

Each service package has a `shell.py` with `build(context) -> Built`. A process runs one of them
(`libs.runtime.service`), a simulation all of them (`services.superpod.wiring`).
"""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from typing import Any

from libs.actor import Core, Executor
from libs.config.plan import ActorPlan, PodPlan
from libs.model.resources import ModelResources
from libs.runtime.asyncio_host import AsyncioHost, RecordSink
from libs.telemetry.logs import LogSink


@dataclass(frozen=True, slots=True)
class ServiceContext:
    """What a service needs to build its core, in which life of the actor; `validate` asks for every
    check there is.
    """

    plan: PodPlan
    actor: ActorPlan
    model: ModelResources
    validate: bool = False
    incarnation: int = 1


#: Something that runs beside the core for as long as the process lives, such as an HTTP server.
Edge = Callable[[AsyncioHost, LogSink], Coroutine[Any, Any, None]]


@dataclass(frozen=True, slots=True)
class Built:
    """A core, its executor if it computes, and its edge if it faces people.

    `inline` runs the executor in the loop (`HostOptions.inline` says when that is right); `sink`
    sees every record beside the log, to make metrics of them.
    """

    core: Core
    executor: Executor | None = None
    edge: Edge | None = None
    inline: bool = False
    sink: RecordSink | None = None


Builder = Callable[[ServiceContext], Built]
