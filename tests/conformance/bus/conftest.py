"""Brokers for the conformance suite and for the tests against a real server."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator

import pytest

from libs.bus.server import NatsServer
from tests.conformance.bus.harness import Broker, MemoryKind, NatsKind


@pytest.fixture(scope="session")
def nats_server() -> Iterator[NatsServer]:
    with NatsServer() as server:
        yield server


@pytest.fixture
async def nats(nats_server: NatsServer) -> AsyncIterator[NatsKind]:
    kind = NatsKind(nats_server)
    yield kind
    kind.revive()
    await kind.close()


@pytest.fixture(params=["memory", "nats"])
async def broker(request: pytest.FixtureRequest, nats_server: NatsServer) -> AsyncIterator[Broker]:
    kind = MemoryKind() if request.param == "memory" else NatsKind(nats_server)
    yield kind
    kind.revive()
    await kind.close()
