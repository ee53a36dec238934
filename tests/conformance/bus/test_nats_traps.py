"""Habits of the NATS client that were measured to hurt, each kept away from the rest of the system.

Those that a broker in memory can show as well are part of `test_bus*.py`: a handler that lets
`CancelledError` escape, order across a wildcard subscription, slow consumers, a frozen or restarted
broker, requests under way, drain.
"""

from __future__ import annotations

import asyncio
import inspect
import logging
from asyncio import selector_events
from collections.abc import Iterator

import pytest

from libs.bus import nats as carrier
from libs.bus.api import POLICIES, BusFault, BusMessage, Denied, Disconnected, Lane
from libs.bus.nats import NatsBus, NatsOptions
from libs.bus.nats_options import reconnect_wait_s
from libs.bus.server import MAX_PAYLOAD_BYTES, NatsServer, NatsServerOptions
from libs.errors import Backpressure
from tests.conformance.bus.harness import NatsKind, Recorder, begin, only, until

ROOM = carrier.HEADER_ROOM_BYTES


@pytest.mark.parametrize("beyond", [-ROOM - 1, -ROOM, -ROOM + 1, -1, 0, 1])
async def test_payloads_around_the_broker_limit_arrive_and_do_not_close(
    nats: NatsKind, beyond: int
) -> None:
    bus, seen = await nats.connect(policies=only(Lane.BULK)), Recorder()
    await bus.subscribe("t", seen, lane=Lane.BULK)
    sent = bytes(MAX_PAYLOAD_BYTES + beyond)
    bus.publish("t", sent, lane=Lane.BULK)
    assert await seen.wait_for(1) == [sent]
    assert bus.connected
    assert nats.closed == []


async def test_pieces_with_their_headers_stay_below_a_small_broker_limit() -> None:
    with NatsServer(NatsServerOptions(max_payload_bytes=64 * 1024)) as server:
        kind = NatsKind(server)
        bus, seen = await kind.connect(policies=only(Lane.BULK)), Recorder()
        await bus.subscribe("t", seen, lane=Lane.BULK)
        sent = bytes(range(256)) * 4096
        bus.publish("t", sent, lane=Lane.BULK)
        assert await seen.wait_for(1) == [sent]
        assert kind.closed == []
        await kind.close()


async def test_a_client_that_closed_for_good_tells_its_owner(nats: NatsKind) -> None:
    bus = await nats.connect(policies=only(Lane.CONTROL))
    (end,) = bus._ends.values()
    transport = end._client._transport
    assert transport is not None
    transport.write(b"PUB t 999999999\r\n")  # what the wrapper never sends: the server ends it
    await until(lambda: nats.closed != [])
    assert "maximum payload violation" in nats.closed[0]
    with pytest.raises(Disconnected):
        bus.publish("t", b"")


async def test_a_fault_handler_that_raises_does_not_deafen_the_connection(
    nats: NatsKind, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.CRITICAL)
    faults: list[BusFault] = []

    def raising(fault: BusFault) -> None:
        faults.append(fault)
        raise ValueError("a bug in the owner's code")

    policies = only(Lane.CONTROL, pending_messages=1)
    bus = await NatsBus.connect(NatsOptions(nats.server.url, "x", policies), on_fault=raising)
    release, seen = asyncio.Event(), Recorder()

    async def slow(_: BusMessage) -> None:
        await release.wait()

    await bus.subscribe("slow", slow)
    await bus.subscribe("quick", seen)
    for _ in range(20):
        bus.publish("slow", b"")
    await until(lambda: any(fault.kind == "slow_consumer" for fault in faults))
    bus.publish("quick", b"heard")
    assert await seen.wait_for(1) == [b"heard"]
    release.set()
    await bus.close()


async def test_a_publisher_is_cancelled_at_once_while_the_socket_is_full(nats: NatsKind) -> None:
    bus, seen = await nats.connect(policies=only(Lane.BULK)), Recorder()
    await bus.subscribe("t", seen, lane=Lane.BULK)
    nats.freeze()
    accepted = 0

    async def publish_forever() -> None:
        nonlocal accepted
        while True:
            try:
                bus.publish("t", accepted.to_bytes(4, "big") * 25_000, lane=Lane.BULK)
                accepted += 1
            except Backpressure:
                await asyncio.sleep(0.001)

    publisher = begin(publish_forever())
    await until(lambda: bus.statistics()[Lane.BULK].refused > 0)
    publisher.cancel()
    done, _ = await asyncio.wait({publisher}, timeout=0.5)
    assert done == {publisher}
    nats.revive()
    data = await seen.wait_for(accepted)
    assert data == [index.to_bytes(4, "big") * 25_000 for index in range(accepted)]


def _writelines_never_pauses() -> bool:
    """CPython 3.12.0-3.12.8 and 3.13.0-3.13.1: a full socket does not stop `writelines`."""
    source = inspect.getsource(selector_events)
    after = source.partition("def writelines")[2]
    return bool(after) and "_maybe_pause_protocol" not in after.partition("\n    def ")[0]


@pytest.mark.skipif(
    _writelines_never_pauses(),
    reason="this CPython's asyncio does not push back on a full socket (python/cpython#127655)",
)
async def test_a_stalled_socket_fills_the_outbox_and_no_further(nats: NatsKind) -> None:
    bus, seen = await nats.connect(policies=only(Lane.BULK, outbox_bytes=2_000_000)), Recorder()
    await bus.subscribe("t", seen, lane=Lane.BULK)
    nats.freeze()

    async def publish_until_refused() -> int:
        for accepted in range(1000):
            try:
                bus.publish("t", bytes(100_000), lane=Lane.BULK)
            except Backpressure:
                return accepted
            await asyncio.sleep(0)
        raise AssertionError("the outbox is not bounded")

    accepted = await publish_until_refused()
    assert bus.statistics()[Lane.BULK].outbox_bytes <= 2_000_000
    nats.revive()
    await seen.wait_for(accepted)


async def test_a_stopped_server_is_detected_within_three_ping_intervals(nats: NatsKind) -> None:
    options = NatsOptions(nats.server.url, "x", only(Lane.CONTROL), detect_s=0.6)
    bus = await NatsBus.connect(options)
    nats.freeze()
    loop = asyncio.get_running_loop()
    begun = loop.time()
    await until(lambda: not bus.connected)
    assert loop.time() - begun < 2.0
    nats.revive()
    await until(lambda: bus.connected)
    await bus.close()


async def test_subscriptions_hear_again_after_a_kill_and_restart(nats: NatsKind) -> None:
    bus, other, seen = await nats.connect("a"), await nats.connect("b"), Recorder()
    await bus.subscribe("t.*", seen)
    for life in range(3):
        nats.crash()
        await until(lambda: not bus.connected and not other.connected)
        await nats.faults_of(bus).wait_for("client_error", 12 * (life + 1))  # attempts in vain
        nats.revive()
        await until(lambda: bus.connected and other.connected)
        await other.flush()
        await bus.flush()
        other.publish("t.x", bytes([life]))
        await seen.wait_for(life + 1)
    assert seen.data == [b"\x00", b"\x01", b"\x02"]
    assert bus.statistics()[Lane.CONTROL].disconnects == 3
    assert nats.closed == []


async def test_requests_leave_nothing_behind(nats: NatsKind) -> None:
    bus, silent = await nats.connect(policies=only(Lane.CONTROL)), Recorder()
    await bus.subscribe("t", silent)
    asked = [begin(bus.request("t", b"", 60.0)) for _ in range(10)]
    await silent.wait_for(10)
    for task in asked:
        task.cancel()
    await asyncio.wait(asked)
    (end,) = bus._ends.values()
    assert len(end.requests) == 0


async def test_no_broker_is_said_at_start_with_what_to_do() -> None:
    options = NatsOptions("nats://127.0.0.1:1", "x", POLICIES, connect_s=0.5)
    with pytest.raises(Disconnected, match=r"no broker at nats://127\.0\.0\.1:1: .*nats-server"):
        await NatsBus.connect(options)


def test_reconnect_waits_differ_between_clients() -> None:
    waits = {reconnect_wait_s(NatsOptions("", name), Lane.BULK) for name in ("a", "b", "c")}
    assert len(waits) == 3
    assert all(0.25 <= wait <= 0.75 for wait in waits)


# ---------------------------------------------------------------- permissions


PERMISSIONS = """
authorization {
  users = [
    { user: free, password: x }
    { user: bound, password: x, permissions: {
        publish: { allow: ["open.>", "_INBOX.>"] }
        subscribe: { allow: ["open.>", "_INBOX.bound.>"] } } }
  ]
}
"""


@pytest.fixture(scope="module")
def guarded_server() -> Iterator[NatsServer]:
    with NatsServer(NatsServerOptions(extra=PERMISSIONS)) as server:
        yield server


async def test_a_forbidden_publish_is_counted_and_reported(guarded_server: NatsServer) -> None:
    kind = NatsKind(guarded_server)
    bus = await kind.connect("bound", user="bound", password="x")
    bus.publish("Closed.subject", b"")
    fault = await kind.faults_of(bus).wait_for("denied")
    assert fault.subject == "closed.subject"
    assert bus.statistics()[Lane.CONTROL].denied == 1
    assert bus.connected
    await kind.close()


async def test_a_forbidden_request_fails_at_once(guarded_server: NatsServer) -> None:
    kind = NatsKind(guarded_server)
    bus = await kind.connect("bound", user="bound", password="x")
    with pytest.raises(Denied, match=r"forbids closed\.subject"):
        await bus.request("Closed.subject", b"", 30.0)
    await kind.close()


async def test_a_forbidden_subscription_is_refused(guarded_server: NatsServer) -> None:
    kind = NatsKind(guarded_server)
    bus, seen = await kind.connect("bound", user="bound", password="x"), Recorder()
    with pytest.raises(Denied, match="listening on Closed"):
        await bus.subscribe("Closed.>", seen)
    await bus.subscribe("open.>", seen)
    bus.publish("open.x", b"")
    await seen.wait_for(1)
    await kind.close()


async def test_an_inbox_of_ones_own_is_enough_to_ask(guarded_server: NatsServer) -> None:
    kind = NatsKind(guarded_server)
    server = await kind.connect("server", user="free", password="x")
    client = await kind.connect("bound", user="bound", password="x")

    async def echo(message: BusMessage) -> None:
        server.publish(message.reply, b"echo")

    await server.subscribe("open.echo", echo)
    assert await client.request("open.echo", b"", 5.0) == b"echo"
    await kind.close()


async def test_a_wrong_password_is_denied_at_start(guarded_server: NatsServer) -> None:
    options = NatsOptions(
        guarded_server.url, "x", connect_s=0.5, credentials={"user": "free", "password": "wrong"}
    )
    with pytest.raises(Denied, match=r"(?i)authorization violation"):
        await NatsBus.connect(options)
