"""The bridge between host and handlers, without HTTP: order, bounds, and who is told what."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from libs.config.topology import LimitsSection
from libs.errors import DeadlineExceeded
from libs.wire.tokens import Chunk
from services.gateway.admission import Admission, Arrival, Ask
from services.gateway.core import ClientGone, ClientSubmit, Failure
from services.gateway.schemas import parse_completion
from services.gateway.stream import SlowReader, Streams
from tests.unit.gateway.fake_pod import MODEL, completion_body


def an_ask(choices: int = 1) -> Ask:
    body = parse_completion(completion_body(n=choices))
    return Admission(MODEL, LimitsSection(), "gateway.0").completion(body, Arrival("r", 0, 0))


def chunk(request_id: str, index: int, finish: str | None = None) -> Chunk:
    return Chunk(request_id, index, 5, index, "x", "", (), finish)


class Told:
    """What the core was told."""

    def __init__(self) -> None:
        self.messages: list[Any] = []
        self.streams = Streams(self.messages.append)

    @property
    def gone(self) -> list[str]:
        return [m.request_id for m in self.messages if isinstance(m, ClientGone)]


async def test_chunks_come_out_in_order_until_the_last_choice_has_ended() -> None:
    told = Told()
    answer = told.streams.submit(an_ask(2), 10)
    for item in (chunk("r", 0), chunk("r.1", 0), chunk("r", 1, "stop"), chunk("r.1", 1, "length")):
        told.streams.present(item.request_id, item, item.at_ns)
    shown = [(item.choice, item.chunk.index) async for item in answer]
    assert shown == [(0, 0), (1, 0), (0, 1), (1, 1)]
    assert [type(message) for message in told.messages] == [ClientSubmit, ClientSubmit]


async def test_a_waiting_reader_wakes_with_the_next_chunk() -> None:
    told = Told()
    answer = told.streams.submit(an_ask(), 10)
    reading = asyncio.ensure_future(anext(aiter(answer)))
    await asyncio.sleep(0)
    assert not reading.done()
    told.streams.present("r", chunk("r", 0), 7)
    assert (await reading).at_ns == 7


async def test_a_failure_is_raised_after_the_chunks_before_it() -> None:
    told = Told()
    answer = told.streams.submit(an_ask(), 10)
    told.streams.present("r", chunk("r", 0), 0)
    told.streams.present("r", Failure("r", "deadline_exceeded", "late", False, "gateway"), 1)
    shown = aiter(answer)
    assert (await anext(shown)).chunk.index == 0
    with pytest.raises(DeadlineExceeded, match="late"):
        await anext(shown)


async def test_overflow_cancels_the_request_without_waiting_for_its_reader() -> None:
    told = Told()
    answer = told.streams.submit(an_ask(2), 3)
    for index in range(5):
        told.streams.present("r", chunk("r", index), index)
    assert told.gone == [], "the core is in the middle of an event"
    await asyncio.sleep(0)
    assert told.gone == ["r", "r.1"]
    shown = aiter(answer)
    assert [(await anext(shown)).chunk.index for _ in range(3)] == [0, 1, 2]
    with pytest.raises(SlowReader):
        await anext(shown)


async def test_leaving_tells_only_of_choices_that_run_and_only_once() -> None:
    told = Told()
    answer = told.streams.submit(an_ask(3), 10)
    told.streams.present("r.1", chunk("r.1", 0, "stop"), 0)
    told.streams.leave(answer)
    told.streams.leave(answer)
    assert told.gone == ["r", "r.2"]


async def test_what_was_on_its_way_to_a_client_that_left_is_dropped() -> None:
    told = Told()
    answer = told.streams.submit(an_ask(), 10)
    told.streams.leave(answer)
    told.streams.present("r", chunk("r", 0), 0)
    told.streams.present("stranger", chunk("stranger", 0), 0)
    assert told.gone == ["r"]
