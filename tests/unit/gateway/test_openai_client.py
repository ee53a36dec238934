"""The official client, pointed at the gateway: the contract that matters to users."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import openai
import pytest

from libs.wire.request import RequestSpec
from tests.unit.gateway.fake_pod import (
    STARTING_VIEW,
    Running,
    Script,
    failing,
    gateway,
    saying,
    silent_after,
)
from tests.unit.gateway.test_answers import TOOL, calling

HI: Any = [{"role": "user", "content": "Hi"}]


@asynccontextmanager
async def client_of(
    script: Script | None = None, **options: Any
) -> AsyncIterator[tuple[openai.AsyncOpenAI, Running]]:
    async with gateway(script, **options) as running:
        client = openai.AsyncOpenAI(
            base_url=running.url + "/v1", api_key="unused", max_retries=0, timeout=5
        )
        async with client:
            yield client, running


async def test_the_official_client_chats() -> None:
    async with client_of() as (client, _):
        answer = await client.chat.completions.create(model="xds-tiny", messages=HI)
    assert answer.choices[0].message.content == "Paris."
    assert answer.choices[0].finish_reason == "stop"
    assert answer.usage is not None
    assert answer.usage.completion_tokens_details is not None
    assert answer.usage.completion_tokens_details.reasoning_tokens
    assert answer.model_extra is not None
    assert answer.model_extra["xds"]["decode_te"] == "d0"


async def test_the_official_client_streams_chat_with_usage() -> None:
    async with client_of() as (client, _):
        stream = await client.chat.completions.create(
            model="xds-tiny", messages=HI, stream=True, stream_options={"include_usage": True}
        )
        chunks = [chunk async for chunk in stream]
    parts = [chunk.choices[0] for chunk in chunks if chunk.choices]
    assert "".join(part.delta.content or "" for part in parts) == "Paris."
    assert parts[0].delta.role == "assistant"
    assert parts[-1].finish_reason == "stop"
    assert chunks[-1].usage is not None


async def test_the_official_client_completes_and_streams_completions() -> None:
    async with client_of(saying(" there was")) as (client, _):
        whole = await client.completions.create(model="xds-tiny", prompt=["a", "b"], logprobs=1)
        stream = await client.completions.create(model="xds-tiny", prompt="a", stream=True)
        text = "".join([chunk.choices[0].text async for chunk in stream])
    assert [choice.text for choice in whole.choices] == [" there was"] * 2
    assert whole.choices[0].logprobs is not None
    assert text == " there was"


async def test_the_official_clients_stream_helper_assembles_tool_calls_and_logprobs() -> None:
    tools: Any = [TOOL]
    extra = {"chat_template_kwargs": {"thinking": False}}
    async with (
        client_of(calling) as (client, _),
        client.chat.completions.stream(
            model="xds-tiny", messages=HI, tools=tools, logprobs=True, extra_body=extra
        ) as stream,
    ):
        answer = await stream.get_final_completion()
    choice = answer.choices[0]
    assert choice.finish_reason == "tool_calls"
    assert choice.message.tool_calls is not None
    function = choice.message.tool_calls[0].function
    assert (function.name, function.arguments) == ("get_weather", '{"city": "Oslo"}')
    assert choice.logprobs is not None
    assert choice.logprobs.content


async def test_the_official_client_can_answer_a_tool_call_with_its_own_message_back() -> None:
    tools: Any = [TOOL]

    def script(spec: RequestSpec) -> Any:
        return (saying("Rain.") if len(running.pod.submitted) > 1 else calling)(spec)

    async with client_of(script) as (client, running):
        first = await client.chat.completions.create(model="xds-tiny", messages=HI, tools=tools)
        message = first.choices[0].message
        assert message.tool_calls is not None
        result: Any = {
            "role": "tool", "tool_call_id": message.tool_calls[0].id, "content": "7 degrees",
        }  # fmt: skip
        conversation: Any = [*HI, message, result]
        second = await client.chat.completions.create(
            model="xds-tiny", messages=conversation, tools=tools
        )
    assert second.choices[0].message.content == "Rain."


async def test_the_official_client_lists_models() -> None:
    async with client_of() as (client, _):
        assert [model.id async for model in client.models.list()] == ["xds-tiny"]
        assert (await client.models.retrieve("xds-tiny")).id == "xds-tiny"


@pytest.mark.parametrize(
    ("script", "fields", "error", "param"),
    [
        (None, {"model": "gpt-5"}, openai.NotFoundError, "model"),
        (None, {"temperature": 3}, openai.BadRequestError, "temperature"),
        (failing("backpressure"), {}, openai.RateLimitError, None),
        (failing("peer_lost"), {}, openai.InternalServerError, None),
    ],
)
async def test_the_official_client_raises_its_own_errors(
    script: Script | None, fields: dict[str, Any], error: type[openai.APIStatusError], param: Any
) -> None:
    async with client_of(script) as (client, _):
        arguments: Any = {"model": "xds-tiny", "messages": HI, **fields}
        with pytest.raises(error) as caught:
            await client.chat.completions.create(**arguments)
    assert caught.value.param == param


async def test_the_official_client_retries_until_the_pod_is_ready() -> None:
    async with client_of(view=STARTING_VIEW) as (client, _):
        with pytest.raises(openai.InternalServerError) as caught:
            await client.chat.completions.create(model="xds-tiny", messages=HI)
    assert caught.value.status_code == 503
    assert caught.value.response.headers["Retry-After"] == "1"


async def test_the_official_client_sees_an_error_in_mid_stream() -> None:
    async with client_of(failing("peer_lost", after=2)) as (client, _):
        stream = await client.completions.create(model="xds-tiny", prompt="a", stream=True)
        chunks = aiter(stream)
        seen = [await anext(chunks), await anext(chunks)]
        with pytest.raises(openai.APIError, match="the die is on fire"):
            await anext(chunks)
    assert all(chunk.choices[0].text for chunk in seen)


async def test_closing_the_official_clients_stream_cancels_the_request() -> None:
    async with client_of(silent_after(1)) as (client, running):
        stream = await client.completions.create(model="xds-tiny", prompt="a", stream=True)
        async for _ in stream:
            break
        await stream.close()
        await running.pod.client_left()
    assert running.pod.cancelled == [running.pod.submitted[0].request_id]
