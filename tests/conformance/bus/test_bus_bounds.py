"""Full queues, large messages, slow handlers, a broker that freezes or dies, drain and close.

Like `test_bus.py`, on memory and on a real nats-server.
"""

from __future__ import annotations

import asyncio
import os
import random

import pytest

from libs.bus import lane_bus
from libs.bus.api import (
    BusMessage,
    DeadlineExceeded,
    Disconnected,
    Draining,
    Lane,
    PayloadTooLarge,
)
from libs.errors import Backpressure, BadInput
from tests.conformance.bus.harness import Broker, Recorder, begin, only, until


async def test_lanes_have_separate_outboxes(broker: Broker) -> None:
    bus = await broker.connect(
        policies=only(Lane.CONTROL, outbox_messages=2) | only(Lane.BULK, outbox_messages=2)
    )
    broker.freeze()
    bus.publish("t", b"", lane=Lane.BULK)
    bus.publish("t", b"", lane=Lane.BULK)
    bus.publish("t", b"", lane=Lane.CONTROL)
    with pytest.raises(BadInput, match="lane token was not opened"):
        bus.publish("t", b"", lane=Lane.TOKEN)


async def test_a_full_outbox_refuses_and_never_blocks(broker: Broker) -> None:
    bus = await broker.connect(policies=only(Lane.CONTROL, outbox_messages=10))
    sent = Recorder()
    await bus.subscribe("t", sent)
    for index in range(10):
        bus.publish("t", bytes([index]))
    with pytest.raises(Backpressure, match="outbox holds 10 messages") as caught:
        bus.publish("t", b"one too many")
    assert caught.value.definite
    assert await sent.wait_for(10) == [bytes([index]) for index in range(10)]
    statistics = bus.statistics()[Lane.CONTROL]
    assert (statistics.published, statistics.refused, statistics.outbox_messages) == (10, 1, 0)


async def test_an_outbox_is_bounded_in_bytes(broker: Broker) -> None:
    bus = await broker.connect(policies=only(Lane.BULK, outbox_bytes=1000))
    bus.publish("t", bytes(900), lane=Lane.BULK)
    with pytest.raises(Backpressure, match="outbox holds 900 bytes"):
        bus.publish("t", bytes(101), lane=Lane.BULK)


async def test_a_message_above_the_lane_limit_is_refused_with_both_numbers(broker: Broker) -> None:
    bus = await broker.connect(policies=only(Lane.TOKEN, message_bytes_max=100))
    with pytest.raises(PayloadTooLarge) as caught:
        bus.publish("t", bytes(101), lane=Lane.TOKEN)
    assert (caught.value.size, caught.value.limit) == (101, 100)


async def test_a_message_of_many_megabytes_arrives_whole_and_in_order(broker: Broker) -> None:
    sender, receiver, seen = await broker.connect(), await broker.connect(), Recorder()
    await receiver.subscribe("t", seen, lane=Lane.BULK)
    large = random.Random(1).randbytes(9 * 1024 * 1024 + 17)
    for data in (b"before", large, b"after"):
        sender.publish("t", data, lane=Lane.BULK)
    assert await seen.wait_for(3) == [b"before", large, b"after"]


async def test_a_large_answer_arrives_whole(broker: Broker) -> None:
    bus = await broker.connect()
    large = os.urandom(100) * 20_000

    async def answer(message: BusMessage) -> None:
        bus.publish(message.reply, large)

    await bus.subscribe("t", answer)
    assert await bus.request("t", b"", 5.0) == large


async def test_a_message_in_pieces_cannot_go_to_a_queue_group(broker: Broker) -> None:
    bus, seen = await broker.connect(), Recorder()
    await bus.subscribe("t", seen, queue="group", lane=Lane.BULK)
    bus.publish("t", bytes(9 * 1024 * 1024), lane=Lane.BULK)
    bus.publish("t", b"small", lane=Lane.BULK)
    assert await seen.wait_for(1) == [b"small"]
    assert (await broker.faults_of(bus).wait_for("bad_chunk")).subject == "t"


async def test_a_slow_handler_does_not_delay_another_subscription(broker: Broker) -> None:
    bus, heartbeat, release = await broker.connect(), Recorder(), asyncio.Event()

    async def slow(_: BusMessage) -> None:
        await release.wait()

    data = await bus.subscribe("data", slow)
    await bus.subscribe("heartbeat", heartbeat)
    bus.publish("data", b"")
    bus.publish("heartbeat", b"")
    await heartbeat.wait_for(1)
    assert data.pending == 1
    release.set()


async def test_a_slow_consumer_drops_beyond_its_bound_and_stays_connected(broker: Broker) -> None:
    policies = only(Lane.CONTROL, pending_messages=10)
    sender, receiver = await broker.connect(), await broker.connect(policies=policies)
    release, seen = asyncio.Event(), Recorder()

    async def slow(message: BusMessage) -> None:
        await release.wait()
        await seen(message)

    await receiver.subscribe("t", slow)
    for index in range(100):
        sender.publish("t", bytes([index]))
    await sender.flush()
    await until(lambda: receiver.statistics()[Lane.CONTROL].dropped >= 89)
    assert (await broker.faults_of(receiver).wait_for("slow_consumer")).subject == "t"
    release.set()
    await seen.wait_for(10)
    sender.publish("t", b"again")
    await until(lambda: seen.data[-1] == b"again")
    dropped = receiver.statistics()[Lane.CONTROL].dropped
    assert len(seen.messages) == 101 - dropped


async def test_a_handler_that_does_not_come_back_is_reported_once(
    broker: Broker, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lane_bus, "SWEEP_S", 0.02)
    bus = await broker.connect(policies=only(Lane.CONTROL, handler_stuck_s=0))

    async def stuck(_: BusMessage) -> None:
        await asyncio.Event().wait()

    await bus.subscribe("first", stuck)
    await bus.subscribe("second", stuck)
    bus.publish("first", b"")
    faults = broker.faults_of(bus)
    await faults.wait_for("handler_stuck")
    bus.publish("second", b"")
    await faults.wait_for("handler_stuck", 2)
    assert [fault.subject for fault in faults.faults] == ["first", "second"]


async def test_flush_tells_when_a_frozen_broker_does_not_answer(broker: Broker) -> None:
    bus = await broker.connect()
    await bus.flush()
    broker.freeze()
    with pytest.raises(DeadlineExceeded, match="not flushed"):
        await bus.flush(0.2)


async def test_a_timed_out_flush_does_not_harm_the_connection(broker: Broker) -> None:
    bus, seen = await broker.connect(), Recorder()
    await bus.subscribe("t", seen)
    broker.freeze()
    with pytest.raises(DeadlineExceeded):
        await bus.flush(0.2)
    broker.revive()
    bus.publish("t", b"x")
    await bus.flush()
    assert await seen.wait_for(1) == [b"x"]
    assert [fault.kind for fault in broker.faults_of(bus).faults] == []


async def test_after_a_crash_data_is_refused_and_a_little_control_is_held(broker: Broker) -> None:
    policies = only(Lane.CONTROL, hold_messages=2) | only(Lane.BULK)
    bus, seen = await broker.connect(policies=policies), Recorder()
    await bus.subscribe("t", seen)
    broker.crash()
    await until(lambda: not bus.connected)
    with pytest.raises(Disconnected) as caught:
        bus.publish("t", b"", lane=Lane.BULK)
    assert caught.value.definite
    bus.publish("t", b"1")
    bus.publish("t", b"2")
    with pytest.raises(Backpressure, match="holds all it may"):
        bus.publish("t", b"3")
    with pytest.raises(Disconnected):
        await bus.request("t", b"", 5.0)
    with pytest.raises(Disconnected):
        await bus.subscribe("u", seen)
    broker.revive()
    assert await seen.wait_for(2) == [b"1", b"2"]
    await broker.faults_of(bus).wait_for("reconnected", 2)
    assert bus.connected


async def test_a_crash_fails_the_requests_under_way_as_indefinite(broker: Broker) -> None:
    bus, silent = await broker.connect(), Recorder()
    await bus.subscribe("t", silent)
    asked = begin(bus.request("t", b"", 30.0))
    await silent.wait_for(1)
    broker.crash()
    with pytest.raises(Disconnected) as caught:
        await asked
    assert not caught.value.definite
    broker.revive()
    await until(lambda: bus.connected)


async def test_drain_lets_handlers_finish_and_sends_what_they_answer(broker: Broker) -> None:
    client, server, answers = await broker.connect(), await broker.connect(), Recorder()
    await client.subscribe("answer", answers)

    async def work(message: BusMessage) -> None:
        await asyncio.sleep(0)
        server.publish("answer", message.data)

    await server.subscribe("t", work)
    for index in range(100):
        client.publish("t", bytes([index]))
    await client.flush()
    await until(lambda: server.statistics()[Lane.CONTROL].delivered > 0)
    assert await server.drain(5.0) == 0
    assert await answers.wait_for(100) == [bytes([index]) for index in range(100)]
    with pytest.raises(Draining):
        server.publish("t", b"")
    with pytest.raises(Draining):
        await server.subscribe("t", work)


async def test_drain_counts_what_it_had_to_leave(broker: Broker) -> None:
    client, server, started = await broker.connect(), await broker.connect(), asyncio.Event()

    async def never(_: BusMessage) -> None:
        started.set()
        await asyncio.Event().wait()

    await server.subscribe("t", never)
    for _ in range(5):
        client.publish("t", b"")
    await client.flush()
    await asyncio.wait_for(started.wait(), 5.0)
    await server.flush()
    assert await server.drain(0.2) == 5


async def test_a_closed_bus_refuses_and_fails_what_waits(broker: Broker) -> None:
    bus, silent = await broker.connect(), Recorder()
    await bus.subscribe("t", silent)
    asked = begin(bus.request("t", b"", 30.0))
    await silent.wait_for(1)
    await bus.close()
    await bus.close()
    with pytest.raises(Draining) as caught:
        await asked
    assert not caught.value.definite
    with pytest.raises(Draining):
        bus.publish("t", b"")
