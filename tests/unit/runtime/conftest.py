from __future__ import annotations

from collections.abc import AsyncIterator

import pytest

from libs.bus.memory import MemoryBroker, MemoryBus
from tests.support.world import World


@pytest.fixture
async def world() -> AsyncIterator[World]:
    broker = MemoryBroker()
    made = World(broker, await MemoryBus.connect(broker))
    yield made
    for host in made.hosts:
        await host.stop()
    await made.client.close()
