"""The running pod through the official OpenAI client."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from typing import Any

import aiohttp
import openai
import pytest

from libs.model.reference import Reference
from libs.model.resources import ModelResources
from libs.wire.fabric import FaultArm
from services.cli.chat import ChatAnswer, ChatQuestion, ask
from services.cli.client import PodClient
from services.cli.demo import reference_tokens
from services.cli.verify_pod import verify_pod
from services.pod.state import PodState

pytestmark = pytest.mark.pod

CAPITAL: list[Any] = [{"role": "user", "content": "What is the capital of France?"}]


@pytest.fixture
def client(pod: PodState) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{pod.base_url}/v1", api_key="any", max_retries=0) as made:
        yield made


async def blocks_held(base_url: str, wait_s: float = 5.0) -> int:
    held = -1
    async with PodClient(base_url) as client:
        for _ in range(round(wait_s / 0.1)):
            _, status = await client.get("/xds/status")
            held = status["kv_blocks_held"]
            if held == 0 and status["open_requests"] == 0:
                break
            await asyncio.sleep(0.1)
    return held


def test_a_question_is_answered_with_its_reasoning_apart(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(model="xds-tiny", messages=CAPITAL, temperature=0)
    message = answer.choices[0].message
    assert message.content == "The capital of France is Paris."
    assert "Paris" in message.model_dump()["reasoning_content"]
    assert answer.choices[0].finish_reason == "stop"
    assert answer.usage is not None
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + answer.usage.completion_tokens


def test_a_stream_adds_up_to_the_same_answer(client: openai.OpenAI) -> None:
    whole = client.chat.completions.create(model="xds-tiny", messages=CAPITAL, temperature=0)
    with client.chat.completions.create(
        model="xds-tiny",
        messages=CAPITAL,
        temperature=0,
        stream=True,
        stream_options={"include_usage": True},
    ) as stream:
        events = list(stream)
    text = "".join(e.choices[0].delta.content or "" for e in events if e.choices)
    assert text == whole.choices[0].message.content
    assert events[-1].usage is not None
    assert whole.usage is not None
    assert events[-1].usage.completion_tokens == whole.usage.completion_tokens
    assert [e.choices[0].finish_reason for e in events if e.choices][-1] == "stop"


def test_a_tool_is_called_and_its_result_used(client: openai.OpenAI) -> None:
    messages: list[Any] = [{"role": "user", "content": "What is the weather in Paris?"}]
    first = client.chat.completions.create(model="xds-tiny", messages=messages, temperature=0)
    choice = first.choices[0]
    assert choice.finish_reason == "tool_calls"
    assert choice.message.tool_calls
    call = choice.message.tool_calls[0]
    assert call.type == "function"
    assert call.function.name == "get_weather"
    assert json.loads(call.function.arguments) == {"city": "Paris"}
    result = json.dumps({"temperature": 21, "condition": "sunny"})
    messages += [
        {"role": "assistant", "content": None, "tool_calls": [call.model_dump()]},
        {"role": "tool", "tool_call_id": call.id, "content": result},
    ]
    second = client.chat.completions.create(model="xds-tiny", messages=messages, temperature=0)
    assert second.choices[0].message.content is not None
    assert "21 degrees" in second.choices[0].message.content


def test_completions_with_choices_seed_and_stop(client: openai.OpenAI) -> None:
    def create(seed: int) -> list[str]:
        answer = client.completions.create(
            model="xds-tiny", prompt="Emma was", max_tokens=12, n=3, seed=seed, temperature=0.9
        )
        return [choice.text for choice in sorted(answer.choices, key=lambda c: c.index)]

    assert create(5) == create(5)
    assert len(set(create(5))) == 3, "choices of one request differ"
    assert create(5) != create(6)
    stopped = client.completions.create(
        model="xds-tiny", prompt="Emma was", max_tokens=64, temperature=0, stop=[" the", "."]
    )
    assert stopped.choices[0].finish_reason == "stop"
    assert " the" not in stopped.choices[0].text
    assert "." not in stopped.choices[0].text


def test_bad_requests_name_their_field(client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        client.chat.completions.create(model="xds-tiny", messages=CAPITAL, temperature=3)
    assert caught.value.param == "temperature"
    with pytest.raises(openai.NotFoundError) as missing:
        client.chat.completions.create(model="gpt-4", messages=CAPITAL)
    assert missing.value.code == "model_not_found"


def test_the_model_is_listed(client: openai.OpenAI) -> None:
    assert [model.id for model in client.models.list()] == ["xds-tiny"]


async def test_32_concurrent_streams_are_all_correct(pod: PodState, model: ModelResources) -> None:
    questions = [
        ChatQuestion(
            [{"role": "user", "content": text}], max_tokens=24, temperature=temperature, seed=seed
        )
        for seed, (text, temperature) in enumerate(
            [
                ("What is the capital of Japan?", 0.0),
                ("Tell me a story.", 0.8),
                ("What is the weather in Lyon?", 0.0),
                ("Hello, my name is Harriet.", 1.0),
            ]
            * 8
        )
    ]
    async with PodClient(pod.base_url) as client:
        answers: list[ChatAnswer] = await asyncio.gather(
            *(ask(client, question, show=False) for question in questions)
        )
    reference = Reference(model.engine())
    for question, answer in zip(questions, answers, strict=True):
        assert answer.token_ids == reference_tokens(answer, question, model, reference)
    assert await blocks_held(pod.base_url) == 0


async def test_a_client_that_leaves_a_stream_frees_its_blocks(pod: PodState) -> None:
    body = {"model": "xds-tiny", "prompt": "Emma", "max_tokens": 900, "ignore_eos": True}
    async with PodClient(pod.base_url) as client:
        seen = 0
        async for _ in client.stream("/v1/completions", body):
            seen += 1
            if seen == 3:
                break
    assert await blocks_held(pod.base_url) == 0


async def test_a_client_that_leaves_before_its_answer_frees_its_blocks(pod: PodState) -> None:
    body = {"model": "xds-tiny", "prompt": "Emma", "max_tokens": 900, "ignore_eos": True}
    timeout = aiohttp.ClientTimeout(total=0.5)
    async with aiohttp.ClientSession(timeout=timeout) as session:
        with pytest.raises(TimeoutError):
            await session.post(f"{pod.base_url}/v1/completions", json=body)
    assert await blocks_held(pod.base_url) == 0


async def test_random_requests_equal_the_reference(pod: PodState, model: ModelResources) -> None:
    report = await verify_pod(pod, model, requests=20, seed=1)
    assert report["examples"] == []
    assert report["ok"]
    assert report["completed"] + report["cancelled"] == 20
    assert report["kv_blocks_held"] == 0


@pytest.mark.parametrize("kind", ["corruption", "duplicate"])
async def test_tokens_are_right_while_frames_are_damaged_or_doubled(
    pod: PodState, model: ModelResources, kind: str
) -> None:
    arm = FaultArm(f"all-{kind}", kind, 0.02, seed=3)
    report = await verify_pod(pod, model, requests=6, seed=2, faults=[arm])
    assert report["examples"] == []
    assert report["ok"]
    assert report["faults"][arm.fault_id]["touched"] > 0, "the fault was never there"


async def test_every_planned_process_is_alive_and_measured(pod: PodState) -> None:
    async with PodClient(pod.base_url) as client:
        status_code, _ = await client.get("/ready")
        _, status = await client.get("/xds/status")
    assert status_code == 200
    assert status["missing"] == []
    # The gateway itself and the control plane complete the list.
    assert {m["actor"] for m in status["members"]} | {"control_plane.0"} == set(pod.actors)
    async with (
        aiohttp.ClientSession() as session,
        session.get(f"{pod.base_url}/metrics") as response,
    ):
        text = await response.text()
    assert "xds_time_to_first_token_seconds_count" in text
