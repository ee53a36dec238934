"""What every bus promises, whatever carries it: run on memory and on a real nats-server."""

from __future__ import annotations

import asyncio

import pytest

from libs.bus.api import (
    BusMessage,
    DeadlineExceeded,
    Lane,
    NoResponders,
)
from libs.errors import BadInput, OperatingError, RemoteProtocolError, StaleEpoch
from tests.conformance.bus.harness import Broker, Recorder, until


async def test_a_message_reaches_every_subscriber_of_its_subject(broker: Broker) -> None:
    sender, receiver = await broker.connect(), await broker.connect()
    first, second, other = Recorder(), Recorder(), Recorder()
    await receiver.subscribe("t.a", first)
    await sender.subscribe("t.a", second)
    await receiver.subscribe("t.b", other)
    sender.publish("t.a", b"x", reply="back.here")
    assert await first.wait_for(1) == await second.wait_for(1) == [b"x"]
    assert first.messages == [BusMessage("t.a", b"x", "back.here")]
    assert other.messages == []


@pytest.mark.parametrize(
    ("pattern", "hits"),
    [
        ("t.*", ["t.a", "t.b"]),
        ("t.>", ["t.a", "t.a.x", "t.b"]),
        ("t.*.x", ["t.a.x"]),
        ("*.a", ["t.a"]),
        (">", ["t.a", "t.a.x", "t.b", "u"]),
    ],
)
async def test_wildcards_match_as_in_nats(broker: Broker, pattern: str, hits: list[str]) -> None:
    bus, seen = await broker.connect(), Recorder()
    await bus.subscribe(pattern, seen)
    for subject in ("t.a", "t.a.x", "t.b", "u"):
        bus.publish(subject, b"")
    await seen.wait_for(len(hits))
    await bus.flush()
    found = [message.subject for message in seen.messages]
    assert [subject for subject in found if not subject.startswith("_INBOX")] == hits


async def test_order_is_kept_across_the_subjects_of_one_wildcard_subscription(
    broker: Broker,
) -> None:
    sender, receiver, seen = await broker.connect(), await broker.connect(), Recorder()
    await receiver.subscribe("t.*", seen)
    sent = [f"{index}".encode() for index in range(500)]
    for index, data in enumerate(sent):
        sender.publish(f"t.{index % 7}", data)
    assert await seen.wait_for(500) == sent


async def test_one_member_of_a_queue_group_gets_each_message(broker: Broker) -> None:
    sender, receiver = await broker.connect(), await broker.connect()
    members = [Recorder(), Recorder(), Recorder()]
    for member in members:
        await receiver.subscribe("work", member, queue="je")
    watcher = Recorder()
    await receiver.subscribe("work", watcher)
    for _ in range(90):
        sender.publish("work", b"job")
    await watcher.wait_for(90)
    await until(lambda: sum(len(member.messages) for member in members) >= 90)
    assert sum(len(member.messages) for member in members) == 90
    assert all(len(member.messages) > 5 for member in members)


async def test_an_unsubscribed_handler_hears_nothing(broker: Broker) -> None:
    bus, gone, kept = await broker.connect(), Recorder(), Recorder()
    subscription = await bus.subscribe("t", gone)
    await bus.subscribe("t", kept)
    await subscription.unsubscribe()
    await subscription.unsubscribe()
    bus.publish("t", b"")
    await kept.wait_for(1)
    assert gone.messages == []


async def test_a_request_gets_its_own_answer(broker: Broker) -> None:
    client, server = await broker.connect(), await broker.connect()

    async def double(message: BusMessage) -> None:
        server.publish(message.reply, message.data * 2)

    await server.subscribe("double", double)
    asked = [f"{index}".encode() for index in range(50)]
    answers = await asyncio.gather(*(client.request("double", data, 5.0) for data in asked))
    assert answers == [data * 2 for data in asked]


async def test_a_request_to_nobody_fails_at_once_and_definitely(broker: Broker) -> None:
    bus = await broker.connect()
    with pytest.raises(NoResponders, match="nobody listens") as caught:
        await bus.request("t.nobody", b"", 30.0)
    assert caught.value.definite


async def test_a_request_without_an_answer_ends_at_its_deadline(broker: Broker) -> None:
    bus, silent = await broker.connect(), Recorder()
    await bus.subscribe("t", silent)
    with pytest.raises(DeadlineExceeded, match=r"no answer from t within 0\.1 s") as caught:
        await bus.request("t", b"", 0.1)
    assert not caught.value.definite
    bus.publish(silent.messages[0].reply, b"late")
    await bus.flush()


@pytest.mark.parametrize(
    ("raised", "expected", "text", "definite"),
    [
        (StaleEpoch("epoch 3 is over"), StaleEpoch, "epoch 3 is over", True),
        (RemoteProtocolError("no frame"), BadInput, "no frame", True),
        (KeyError("secret"), OperatingError, "internal: handler raised KeyError", False),
        (asyncio.CancelledError(), OperatingError, "handler raised CancelledError", False),
    ],
)
async def test_a_handler_that_raises_answers_with_a_typed_error_and_lives_on(
    broker: Broker, raised: BaseException, expected: type[OperatingError], text: str, definite: bool
) -> None:
    client, server = await broker.connect(), await broker.connect()
    raising = [raised]

    async def handler(message: BusMessage) -> None:
        if raising:
            raise raising.pop()
        server.publish(message.reply, b"fine")

    await server.subscribe("t", handler)
    with pytest.raises(expected, match=text) as caught:
        await client.request("t", b"", 5.0)
    assert caught.value.definite is definite
    assert await client.request("t", b"", 5.0) == b"fine"
    assert server.statistics()[Lane.CONTROL].handler_errors == 1


async def test_a_probe_calls_back_only_when_nobody_listens(broker: Broker) -> None:
    bus, seen, called = await broker.connect(), Recorder(), asyncio.Event()
    await bus.subscribe("t.here", seen)
    bus.probe("t.here", b"", lambda: pytest.fail("somebody listens"))
    bus.probe("t.gone", b"", called.set)
    await asyncio.wait_for(called.wait(), 5.0)
    await seen.wait_for(1)


@pytest.mark.parametrize(
    "subject", ["", "a b", "a..b", ".a", "a.", "a.*", ">", "a\r\nPUB b 0", "x" * 256]
)
async def test_a_malformed_subject_is_bad_input(broker: Broker, subject: str) -> None:
    bus = await broker.connect()
    with pytest.raises(BadInput) as caught:
        bus.publish(subject, b"")
    assert caught.value.field == "subject"


@pytest.mark.parametrize("pattern", ["", "a b", "a..b", "a.>.b", "a*", "a.b>"])
async def test_a_malformed_pattern_is_bad_input(broker: Broker, pattern: str) -> None:
    bus = await broker.connect()
    with pytest.raises(BadInput, match="malformed pattern"):
        await bus.subscribe(pattern, Recorder())
