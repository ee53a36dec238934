"""Builds the gateway and its HTTP server.

    XDS_HTTP_HOST   address to listen on   127.0.0.1
    XDS_HTTP_PORT   port to listen on      8000

Several gateways of one host share the port: the kernel spreads connections over them, and a client
that retries reaches one that lives.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass

from aiohttp import web

from libs.errors import BadInput, OperatingError
from libs.runtime.asyncio_host import AsyncioHost
from libs.runtime.build import Built, ServiceContext
from libs.telemetry.logs import LogSink
from services.gateway.admission import Admission
from services.gateway.core import GatewayConfig, GatewayCore
from services.gateway.edge import HttpEdge
from services.gateway.metrics import GatewayMetrics

#: How long open handlers may take to say goodbye when the gateway stops.
STOP_S = 2.0


@dataclass(frozen=True, slots=True)
class HttpAddress:
    """Where to listen; `shared` lets other gateways of this host listen there too."""

    host: str = "127.0.0.1"
    port: int = 8000
    shared: bool = False


class CannotListen(OperatingError):
    """The address is taken or not ours."""

    code = "cannot_listen"


def address_from_env(env: Mapping[str, str], *, shared: bool) -> HttpAddress:
    """Read `XDS_HTTP_*`; raises `BadInput` naming the variable."""
    text = env.get("XDS_HTTP_PORT", "8000")
    if not (text.isascii() and text.isdigit() and int(text) <= 65535):
        message = f"XDS_HTTP_PORT={text!r} is not a port number from 0 to 65535"
        raise BadInput(message, field="XDS_HTTP_PORT")
    return HttpAddress(env.get("XDS_HTTP_HOST", "127.0.0.1"), int(text), shared)


def build(context: ServiceContext) -> Built:
    """The core, its metrics, and the HTTP server beside it."""
    plan, name = context.plan, context.actor.name
    limits = plan.topology.limits
    address = address_from_env(os.environ, shared=len(plan.of_role("gateway")) > 1)
    core = GatewayCore(GatewayConfig(name, limits.requests_in_flight_max))
    admission = Admission(context.model, limits, name)
    metrics = GatewayMetrics(context.model.name)

    async def serve(host: AsyncioHost, log: LogSink) -> None:
        edge = HttpEdge(core, host, admission, metrics, log)
        async with listening(edge, address) as port:
            log.note("http_listening", host=address.host, port=port)
            await asyncio.Event().wait()

    return Built(core, edge=serve, sink=metrics)


@asynccontextmanager
async def listening(edge: HttpEdge, address: HttpAddress) -> AsyncIterator[int]:
    """Serve `edge` within the context, which is given the port; raises `CannotListen`."""
    # A handler is cancelled when its client disconnects, also while it waits for a token.
    runner = web.AppRunner(
        edge.app(), handler_cancellation=True, access_log=None, shutdown_timeout=STOP_S
    )
    await runner.setup()
    try:
        site = web.TCPSite(
            runner, address.host, address.port, reuse_port=True if address.shared else None
        )
        try:
            await site.start()
        except OSError as error:
            where = f"{address.host}:{address.port}"
            raise CannotListen(f"cannot listen on {where}: {error.strerror}") from error
        yield int(runner.addresses[0][1])
    finally:
        await runner.cleanup()
