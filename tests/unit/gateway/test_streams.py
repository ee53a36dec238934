"""Streams: framing, deltas, usage, and every way in which one can end."""

from __future__ import annotations

import asyncio
import contextlib
from typing import Any

import aiohttp
import pytest

from libs.wire.request import RequestSpec
from libs.wire.tokens import Chunk
from services.gateway.edge import EdgeOptions
from tests.unit.gateway.fake_pod import (
    EOS,
    TOKENIZER,
    Running,
    chat_body,
    chunks_of,
    completion_body,
    failing,
    gateway,
    saying,
    silent_after,
)
from tests.unit.gateway.sse_reader import Streamed, read_stream

CHAT, PLAIN = "/v1/chat/completions", "/v1/completions"


async def stream(running: Running, path: str, body: dict[str, Any]) -> Streamed:
    async with running.http.post(running.url + path, json={**body, "stream": True}) as response:
        return await read_stream(response)


async def test_a_chat_stream_has_one_role_then_thought_then_text_then_done() -> None:
    async with gateway() as running:
        streamed = await stream(running, CHAT, chat_body())
    deltas = [part["delta"] for part in streamed.of_choice(0)]
    assert streamed.done
    assert deltas[0]["role"] == "assistant"
    assert not any("role" in delta for delta in deltas[1:])
    assert streamed.text(channel="reasoning_content") == "Hmm, well."
    assert streamed.text() == "Paris."
    assert streamed.finish_reason() == "stop"
    assert {event["object"] for event in streamed.events} == {"chat.completion.chunk"}
    assert {event["id"] for event in streamed.events} == {running.pod.submitted[0].request_id}
    assert not any("usage" in event for event in streamed.events)


async def test_a_completion_stream_carries_plain_text() -> None:
    async with gateway(saying("a b c", finish="length")) as running:
        streamed = await stream(running, PLAIN, completion_body())
    assert streamed.text() == "a b c"
    assert streamed.finish_reason() == "length"
    assert {event["object"] for event in streamed.events} == {"text_completion"}


async def test_tokens_that_add_no_text_make_no_event_unless_they_finish() -> None:
    async with gateway(saying("😀")) as running:
        streamed = await stream(running, PLAIN, completion_body())
    assert len(TOKENIZER.encode("😀")) > 1
    assert [part["text"] for part in streamed.of_choice(0)] == ["😀", ""]


async def test_a_first_event_that_finishes_still_has_a_role() -> None:
    async with gateway(lambda spec: chunks_of(spec, [EOS], "stop")) as running:
        streamed = await stream(running, CHAT, chat_body(chat_template_kwargs={"thinking": False}))
    assert [part["delta"] for part in streamed.of_choice(0)] == [
        {"role": "assistant", "content": ""}
    ]


async def test_the_finishing_event_says_who_served() -> None:
    async with gateway() as running:
        streamed = await stream(running, CHAT, chat_body())
    assert [("xds" in event) for event in streamed.events[:-1]] == [False] * (
        len(streamed.events) - 1
    )
    assert streamed.events[-1]["xds"]["decode_dp"] == "decode_te.d0.dp1"
    assert streamed.events[-1]["xds"]["emulated_ms"]["first_token"] == 900.0


async def test_usage_comes_in_a_last_event_without_choices_and_is_null_before() -> None:
    async with gateway() as running:
        body = chat_body(stream_options={"include_usage": True})
        streamed = await stream(running, CHAT, body)
        _, whole, _ = await running.chat()
    assert streamed.done
    assert streamed.events[-1]["choices"] == []
    assert streamed.events[-1]["usage"] == whole["usage"]
    assert all(event["usage"] is None for event in streamed.events[:-1])


async def test_token_ids_arrive_one_by_one_with_their_index_and_the_prompt_once() -> None:
    async with gateway() as running:
        streamed = await stream(running, CHAT, chat_body(return_token_ids=True))
        plain = await stream(running, PLAIN, completion_body(return_token_ids=True, n=2))
    parts = streamed.of_choice(0)
    prompts = [spec.prompt_ids.tolist() for spec in running.pod.submitted]
    assert [part["token_index"] for part in parts] == list(range(len(parts)))
    assert parts[-1]["token_ids"] == [EOS]
    assert [e["prompt_token_ids"] for e in streamed.events if "prompt_token_ids" in e] == [
        prompts[0]
    ]
    for index in range(2):
        first, *rest = plain.of_choice(index)
        assert first["prompt_token_ids"] == prompts[1]
        assert not any("prompt_token_ids" in part for part in rest)
        assert [t for p in plain.of_choice(index) for t in p["token_ids"]] == [
            *TOKENIZER.encode("Paris."), EOS,
        ]  # fmt: skip


async def test_streamed_logprobs_are_the_whole_answers_cut_in_pieces() -> None:
    async with gateway(saying("one two")) as running:
        streamed = await stream(running, PLAIN, completion_body(logprobs=2))
        _, whole, _ = await running.complete(logprobs=2)
    for name in ("tokens", "token_logprobs", "top_logprobs", "text_offset"):
        pieces = [item for part in streamed.of_choice(0) for item in part["logprobs"][name]]
        assert pieces == whole["choices"][0]["logprobs"][name]


async def test_choices_of_one_stream_are_told_apart_by_index() -> None:
    def script(spec: RequestSpec) -> list[Chunk]:
        return chunks_of(spec, [*TOKENIZER.encode(f"choice {spec.choice}"), EOS], "stop")

    async with gateway(script) as running:
        body = completion_body(n=3, stream_options={"include_usage": True})
        streamed = await stream(running, PLAIN, body)
    assert [streamed.text(i) for i in range(3)] == ["choice 0", "choice 1", "choice 2"]
    assert [streamed.finish_reason(i) for i in range(3)] == ["stop"] * 3
    served = [event["xds"]["request_id"] for event in streamed.events if "xds" in event]
    assert served == [spec.request_id for spec in running.pod.submitted]
    assert running.pod.gone == []


async def test_an_error_before_the_first_token_is_a_plain_http_error() -> None:
    async with gateway(failing("backpressure")) as running:
        status, body, headers = await running.chat(stream=True)
    assert (status, headers["Retry-After"]) == (429, "1")
    assert body["error"]["code"] == "backpressure"


async def test_an_error_in_mid_stream_is_the_last_event_and_nothing_is_done() -> None:
    async with gateway(failing("transfer_failed", after=2)) as running:
        streamed = await stream(running, PLAIN, completion_body())
    assert not streamed.done
    assert [("error" in event) for event in streamed.events] == [False, False, True]
    error = streamed.events[-1]["error"]
    assert error["code"] == "transfer_failed"
    assert error["type"] == "server_error"
    assert "the die is on fire" in error["message"]
    assert "may have been executed" in error["message"]


async def test_one_failed_choice_ends_the_others() -> None:
    def script(spec: RequestSpec) -> Any:
        return failing("peer_lost", after=1)(spec) if spec.choice else silent_after(1)(spec)

    async with gateway(script) as running:
        body = completion_body(n=3, stream=True)
        async with running.http.post(running.url + PLAIN, json=body) as response:
            text = await response.text()
    ids = [spec.request_id for spec in running.pod.submitted]
    assert '"peer_lost"' in text.split("\n\n")[-2]
    assert ids[0] in running.pod.gone
    assert running.pod.core.open_requests == 0


@pytest.mark.parametrize("tokens", [0, 2])
@pytest.mark.parametrize("streams", [True, False])
async def test_a_client_that_disconnects_is_gone_at_once(tokens: int, streams: bool) -> None:
    async with gateway(silent_after(tokens)) as running:
        body = completion_body(stream=streams, n=2)
        task = asyncio.ensure_future(running.http.post(running.url + PLAIN, json=body))
        await running.pod.answered(2)
        if streams and tokens:
            response = await task
            await response.content.readuntil(b"\n\n")
            response.close()
        else:
            task.cancel()
        await running.pod.client_left()
        ids = [spec.request_id for spec in running.pod.submitted]
        assert running.pod.gone == ids
        assert running.pod.cancelled == ids
        assert running.pod.core.open_requests == 0


async def test_a_reader_slower_than_its_tokens_is_cut_off_and_cancelled() -> None:
    options = EdgeOptions(stream_items_max=4)
    async with gateway(silent_after(6), options=options) as running:
        ids = TOKENIZER.encode("one two three four five six")
        running.pod.script = lambda spec: chunks_of(spec, ids)
        streamed = await stream(running, PLAIN, completion_body())
        await running.pod.client_left()
    assert not streamed.done
    assert [("error" in event) for event in streamed.events] == [False] * 4 + [True]
    assert streamed.events[-1]["error"]["code"] == "slow_reader"
    assert running.pod.gone == [running.pod.submitted[0].request_id]


async def test_a_reader_that_stops_reading_is_disconnected_after_the_time_limit() -> None:
    """More bytes than socket buffers hold, to a client that takes none of them."""

    def flood(spec: RequestSpec) -> list[Chunk]:
        text = "x" * (1 << 20)
        return [Chunk(spec.request_id, index, 5, index, text, "", (), None) for index in range(16)]

    async with gateway(flood, options=EdgeOptions(write_s=0.05)) as running:
        host, port = running.url.removeprefix("http://").split(":")
        reader, writer = await asyncio.open_connection(host, int(port), limit=1024)
        body = b'{"model": "xds-tiny", "prompt": "x", "stream": true}'
        head = f"POST {PLAIN} HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n\r\n"
        writer.write(head.encode() + body)
        await running.pod.client_left()
        received = b""
        with contextlib.suppress(ConnectionError):
            while data := await reader.read(1 << 20):
                received += data
        writer.transport.abort()
    assert received.startswith(b"HTTP/1.1 200 OK")
    assert len(received) < 16 << 20
    assert running.pod.gone == [running.pod.submitted[0].request_id]


async def test_a_stopping_gateway_tells_its_streams() -> None:
    async with aiohttp.ClientSession() as patient:
        async with gateway(silent_after(1)) as running:
            body = completion_body(stream=True)
            response = await patient.post(running.url + PLAIN, json=body)
            await response.content.readuntil(b"\n\n")
        text = await response.text()
    assert '"peer_lost"' in text
    assert "[DONE]" not in text
    assert running.pod.core.open_requests == 0
