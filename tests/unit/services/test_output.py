from __future__ import annotations

from typing import Any

import pytest

from libs.actor import Record, Send, SetTimer
from libs.model.resources import checkpoint_dir
from libs.model.tokenizer import Tokenizer
from libs.wire.control import Heartbeat, HeartbeatReply
from libs.wire.request import Cancel, OutputOptions, RequestFailed
from libs.wire.tokens import (
    Chunk,
    CloseStream,
    OpenStream,
    RequestTiming,
    StopMatched,
    StreamChunks,
    TokenRow,
    TokensCommitted,
)
from services.output import core as module
from services.output.core import OutputCore
from tests.support.bench import Bench, Effects
from tests.support.requests import TIMING

DP, GATEWAY = "decode_te.d0.dp0", "xds.act.gateway.0"


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.load(checkpoint_dir("xds-tiny"))


class OutputBench(Bench):
    def __init__(self, tokenizer: Tokenizer) -> None:
        self.core = OutputCore("output.d0.dp0", "d0", tokenizer)
        self.tokenizer = tokenizer
        super().__init__(self.core)

    def open(self, request_id: str = "r1", gateway: str = "gateway.0", **options: Any) -> Effects:
        output = OutputOptions(raw=True, reasoning_open=False, **options)
        return self.take(OpenStream(request_id, DP, gateway, output, RequestTiming(TIMING)))

    def commit(self, *rows: TokenRow) -> Effects:
        return self.take(TokensCommitted(DP, 1, rows))

    def say(self, text: str, request_id: str = "r1", last: str | None = None) -> list[TokenRow]:
        ids = self.tokenizer.encode(text)
        ends = [None] * (len(ids) - 1) + [last]
        return [
            TokenRow(request_id, index, token, 100 + index, end, -0.5, ((token, -0.5),))
            for index, (token, end) in enumerate(zip(ids, ends, strict=True))
        ]


@pytest.fixture
def bench(tokenizer: Tokenizer) -> OutputBench:
    return OutputBench(tokenizer)


def chunks(effects: Effects) -> list[Chunk]:
    return [
        chunk for send in effects.all(Send, message=StreamChunks) for chunk in send.message.chunks
    ]


TEXT = "The sea was calm, and the ship was old."


def test_tokens_become_text_for_the_gateway_of_the_request(bench: OutputBench) -> None:
    bench.open()
    effects = bench.commit(*bench.say(TEXT, last="stop"))
    assert effects.one(Send).subject == GATEWAY
    got = chunks(effects)
    assert "".join(chunk.content for chunk in got) == TEXT
    assert [chunk.index for chunk in got] == list(range(len(got)))
    assert [chunk.at_ns for chunk in got] == [100 + index for index in range(len(got))]
    assert [chunk.finish_reason for chunk in got] == [None] * (len(got) - 1) + ["stop"]


def test_the_timing_travels_with_the_last_chunk_only(bench: OutputBench) -> None:
    bench.open()
    got = chunks(bench.commit(*bench.say(TEXT, last="length")))
    assert [chunk.timing is not None for chunk in got] == [False] * (len(got) - 1) + [True]


def test_one_iteration_is_one_message_per_gateway(bench: OutputBench) -> None:
    for request_id, gateway in (("r1", "gateway.0"), ("r2", "gateway.1"), ("r3", "gateway.0")):
        bench.open(request_id, gateway)
    rows = [bench.say("The", request_id)[0] for request_id in ("r1", "r2", "r3")]
    effects = bench.commit(*rows)
    by_gateway = {
        send.subject: [chunk.request_id for chunk in send.message.chunks]
        for send in effects.all(Send)
    }
    assert by_gateway == {GATEWAY: ["r1", "r3"], "xds.act.gateway.1": ["r2"]}


def test_a_repeated_token_is_told_once(bench: OutputBench) -> None:
    bench.open()
    first = bench.say(TEXT)[0]
    assert len(chunks(bench.commit(first))) == 1
    assert bench.commit(first) == []


def test_tokens_of_unknown_and_closed_streams_are_dropped(bench: OutputBench) -> None:
    assert bench.commit(*bench.say(TEXT)) == []
    bench.open()
    bench.take(CloseStream("r1"))
    assert bench.commit(*bench.say(TEXT)) == []
    assert bench.take(CloseStream("r1")) == []


def test_a_lost_token_ends_the_stream_with_an_error_at_once(bench: OutputBench) -> None:
    bench.open()
    rows = bench.say(TEXT)
    bench.commit(rows[0])
    effects = bench.commit(rows[2])
    failed = effects.one(Send, message=RequestFailed)
    assert failed.subject == GATEWAY
    assert (failed.message.code, failed.message.definite) == ("peer_lost", False)
    assert bench.commit(rows[1]) == [], "nothing is shown behind a gap"


def test_a_stream_that_nobody_ends_is_forgotten(bench: OutputBench) -> None:
    armed = bench.open().one(SetTimer, name="r1")
    assert armed.delay_ns > 0
    bench.fire("r1")
    assert bench.commit(*bench.say(TEXT)) == []


def test_a_stop_string_ends_the_text_and_the_group_is_told_where(bench: OutputBench) -> None:
    bench.open(stops=(" calm",))
    rows = bench.say(TEXT)
    effects = bench.commit(*rows)
    got = chunks(effects)
    assert "".join(chunk.content for chunk in got) == "The sea was"
    assert got[-1].finish_reason == "stop"
    assert len(got) < len(rows), "what came after in the same iteration is not shown"
    stop = effects.one(Send, message=StopMatched)
    assert (stop.subject, stop.message.index) == (f"xds.act.{DP}", got[-1].index)
    assert bench.commit(*rows[len(got) :]) == []


def test_a_stop_string_on_the_last_token_needs_no_message(bench: OutputBench) -> None:
    bench.open(stops=("old.",))
    effects = bench.commit(*bench.say(TEXT, last="length"))
    assert chunks(effects)[-1].finish_reason == "stop"
    assert not effects.has(Send, message=StopMatched)


def test_a_stream_that_has_ended_is_not_opened_again(bench: OutputBench) -> None:
    bench.open()
    bench.commit(*bench.say("The", last="stop"))
    bench.open()
    assert bench.commit(*bench.say("The")) == []


def test_opening_twice_keeps_the_parser(bench: OutputBench) -> None:
    bench.open()
    rows = bench.say(TEXT)
    bench.commit(rows[0])
    bench.open()
    assert [chunk.index for chunk in chunks(bench.commit(rows[1]))] == [1]


def test_log_probabilities_are_given_when_asked_for(bench: OutputBench) -> None:
    bench.open("plain")
    bench.open("asked", logprobs=True)
    plain, asked = chunks(bench.commit(bench.say("The", "plain")[0], bench.say("The", "asked")[0]))
    assert (plain.chosen, plain.top) == (None, ())
    assert asked.chosen is not None
    assert (asked.chosen.text, asked.chosen.logprob) == ("The", -0.5)
    assert [entry.text for entry in asked.top] == ["The"]


def test_two_processes_agree_on_every_chunk(bench: OutputBench, tokenizer: Tokenizer) -> None:
    other = OutputBench(tokenizer)
    rows = bench.say("Größe – 船 and more", last="length")
    bench.open()
    other.open()
    whole = chunks(bench.commit(*rows))
    apart = [chunk for row in rows for chunk in chunks(other.commit(row))]
    assert whole == apart


def test_streams_beyond_the_bound_are_refused(
    bench: OutputBench, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "STREAMS_MAX", 1)
    bench.open("r1")
    assert bench.open("r2").one(Record).name == "stream_refused"


def test_it_says_how_many_streams_are_open(bench: OutputBench) -> None:
    bench.open()
    reply = bench.take(Heartbeat(1), sender="te_shell.d0").one(Send, message=HeartbeatReply)
    assert reply.message.state.running == 1
    assert bench.take(Cancel("r1", "lost")).one(Record).fields == {"kind": "Cancel"}
