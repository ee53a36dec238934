"""Every refusal is one OpenAI error object with the right status and the field named."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from libs.config.topology import LimitsSection
from services.gateway.edge import EdgeOptions
from tests.unit.gateway.fake_pod import (
    STARTING_VIEW,
    chat_body,
    completion_body,
    failing,
    gateway,
    silent_after,
)

CHAT, PLAIN = "/v1/chat/completions", "/v1/completions"

BAD_CHATS: list[tuple[dict[str, Any], str]] = [
    ({"model": None}, "model"),
    ({"model": 7}, "model"),
    ({"messages": None}, "messages"),
    ({"messages": "hi"}, "messages"),
    ({"messages": []}, "messages"),
    ({"messages": [{"role": "user"}]}, "messages[0].content"),
    ({"messages": [{"role": "robot", "content": "x"}]}, "messages[0].role"),
    (
        {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": "x"}]}]},
        "messages[0].content[0].type",
    ),
    ({"messages": [{"role": "user", "content": "\ud800"}]}, "messages[0].content"),
    ({"max_tokens": "5"}, "max_tokens"),
    ({"max_tokens": 5.0}, "max_tokens"),
    ({"max_tokens": True}, "max_tokens"),
    ({"max_tokens": 0}, "max_tokens"),
    ({"max_tokens": 1025}, "max_tokens"),
    ({"max_completion_tokens": -1}, "max_completion_tokens"),
    ({"max_completion_tokens": 9999}, "max_completion_tokens"),
    ({"max_tokens": 5, "max_completion_tokens": 6}, "max_tokens"),
    ({"temperature": 2.1}, "temperature"),
    ({"temperature": "hot"}, "temperature"),
    ({"temperature": True}, "temperature"),
    ({"top_p": -0.1}, "top_p"),
    ({"top_k": -2}, "top_k"),
    ({"n": 0}, "n"),
    ({"n": 17}, "n"),
    ({"n": 1.5}, "n"),
    ({"stop": 5}, "stop"),
    ({"stop": ""}, "stop"),
    ({"stop": ["a", ""]}, "stop[1]"),
    ({"stop": ["a", "b", "c", "d", "e"]}, "stop"),
    ({"stop": ["\udcff"]}, "stop[0]"),
    ({"stop_token_ids": [99999]}, "stop_token_ids"),
    ({"stop_token_ids": ["a"]}, "stop_token_ids[0]"),
    ({"seed": "x"}, "seed"),
    ({"seed": 1 << 64}, "seed"),
    ({"stream": "yes"}, "stream"),
    ({"stream_options": {"include_usage": True}}, "stream_options"),
    ({"stream": True, "stream_options": {"include_usage": 1}}, "stream_options.include_usage"),
    ({"logprobs": 3}, "logprobs"),
    ({"top_logprobs": 3}, "top_logprobs"),
    ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
    ({"presence_penalty": 3}, "presence_penalty"),
    ({"frequency_penalty": -3}, "frequency_penalty"),
    ({"repetition_penalty": 0}, "repetition_penalty"),
    ({"logit_bias": {"x": 1}}, "logit_bias"),
    ({"logit_bias": {"5": 101}}, "logit_bias.5"),
    ({"logit_bias": {"99999": 1}}, "logit_bias"),
    ({"logit_bias": {"5": "1"}}, "logit_bias.5"),
    ({"min_tokens": -1}, "min_tokens"),
    ({"min_tokens": 9, "max_tokens": 8}, "min_tokens"),
    ({"tools": "hammer"}, "tools"),
    ({"tools": [{"type": "retrieval"}]}, "tools[0].type"),
    ({"tool_choice": "required"}, "tool_choice"),
    ({"tool_choice": {"type": "function", "function": {"name": "f"}}}, "tool_choice"),
    ({"tool_choice": "auto"}, "tool_choice"),
    ({"reasoning_effort": "extreme"}, "reasoning_effort"),
    ({"chat_template_kwargs": {"thinking": "on"}}, "chat_template_kwargs.thinking"),
    ({"chat_template_kwargs": {"style": 1}}, "chat_template_kwargs.style"),
    ({"response_format": {"type": "json_schema", "json_schema": {}}}, "response_format"),
    ({"response_format": {"type": "json_object"}}, "response_format"),
    ({"modalities": ["text", "audio"]}, "modalities"),
    ({"audio": {"voice": "alloy"}}, "audio"),
    ({"functions": [{"name": "f"}]}, "functions"),
    ({"prompt_logprobs": 1}, "prompt_logprobs"),
    ({"min_p": 0.1}, "min_p"),
    ({"min_p": False}, "min_p"),
    ({"use_beam_search": True}, "use_beam_search"),
    ({"return_token_ids": "yes"}, "return_token_ids"),
    ({"cache_salt": ""}, "cache_salt"),
    ({"cache_salt": 7}, "cache_salt"),
    ({"cache_salt": "s" * 257}, "cache_salt"),
    ({"cache_salt": "\udfff"}, "cache_salt"),
]

BAD_COMPLETIONS: list[tuple[dict[str, Any], str]] = [
    ({"prompt": None}, "prompt"),
    ({"prompt": 5}, "prompt"),
    ({"prompt": []}, "prompt"),
    ({"prompt": ["a", [5]]}, "prompt[1]"),
    ({"prompt": [5, -1]}, "prompt[1]"),
    ({"prompt": [5, True]}, "prompt[1]"),
    ({"prompt": [[5], [2048]]}, "prompt[1][0]"),
    ({"prompt": [[5], []]}, "prompt[1]"),
    ({"prompt": [None]}, "prompt[0]"),
    ({"prompt": ["a"] * 9, "n": 2}, "prompt"),
    ({"prompt": "\udfff"}, "prompt"),
    ({"logprobs": True}, "logprobs"),
    ({"logprobs": 21}, "logprobs"),
    ({"logprobs": -1}, "logprobs"),
    ({"best_of": 3}, "best_of"),
    ({"echo": True}, "echo"),
    ({"suffix": "the end"}, "suffix"),
]


@pytest.mark.parametrize(("fields", "param"), BAD_CHATS)
async def test_a_bad_chat_body_is_refused_by_its_field(fields: dict[str, Any], param: str) -> None:
    async with gateway() as running:
        status, body, _ = await running.post(CHAT, chat_body(**fields))
    assert (status, body["error"]["param"]) == (400, param), body
    assert body["error"]["type"] == "invalid_request_error"
    assert body["error"]["code"] == "bad_input"
    assert body["error"]["message"].startswith(param.split(".")[0].split("[")[0])
    assert running.pod.submitted == []


@pytest.mark.parametrize(("fields", "param"), BAD_COMPLETIONS)
async def test_a_bad_completion_body_is_refused_by_its_field(
    fields: dict[str, Any], param: str
) -> None:
    async with gateway() as running:
        status, body, _ = await running.post(PLAIN, completion_body(**fields))
    assert (status, body["error"]["param"]) == (400, param), body
    assert running.pod.submitted == []


@pytest.mark.parametrize(
    ("data", "says"),
    [
        (b"", "not valid JSON"),
        (b"{", "not valid JSON"),
        (b"[1]", "must be a JSON object, not an array"),
        (b"null", "must be a JSON object, not null"),
        (b'"\xff"', "not UTF-8"),
        (b'{"temperature": NaN}', "NaN is not JSON"),
        (b"[" * 100_000, "not valid JSON"),
        (b'{"seed": ' + b"9" * 5000 + b"}", "not valid JSON"),
    ],
)
async def test_what_is_no_json_object_is_refused(data: bytes, says: str) -> None:
    async with (
        gateway() as running,
        running.http.post(running.url + CHAT, data=data) as response,
    ):
        error = (await response.json())["error"]
    assert response.status == 400
    assert error["param"] is None
    assert says in error["message"]


async def test_an_unknown_model_is_not_found_and_short_in_the_message() -> None:
    async with gateway() as running:
        status, body, _ = await running.chat(model="gpt-" + "9" * 5000)
    assert (status, body["error"]["param"], body["error"]["code"]) == (
        404, "model", "model_not_found",
    )  # fmt: skip
    assert "'xds-tiny'" in body["error"]["message"]
    assert len(body["error"]["message"]) < 300


LONG = LimitsSection(
    context_max_tokens=64, prompt_max_tokens=48, output_max_tokens=40, output_default_tokens=16
)


async def test_a_prompt_over_the_limit_is_refused_with_limit_and_found() -> None:
    async with gateway(limits=LONG) as running:
        status, body, _ = await running.complete(prompt=[5] * 49)
    assert (status, body["error"]["code"]) == (400, "context_length_exceeded")
    assert body["error"]["message"] == "prompt: the prompt has 49 tokens, the limit is 48"


async def test_a_prompt_that_cannot_fit_is_refused_by_its_bytes() -> None:
    async with gateway(limits=LONG) as running:
        _, plain, _ = await running.complete(prompt=["a", "x" * 10_000])
        message = {"role": "user", "content": "x" * 10_000}
        _, chat, _ = await running.chat(messages=[message])
    assert plain["error"]["param"] == "prompt[1]"
    assert chat["error"]["param"] == "messages"
    for body in (plain, chat):
        assert body["error"]["code"] == "context_length_exceeded"
        assert "at least 312 tokens" in body["error"]["message"]


async def test_prompt_and_answer_must_fit_the_context_together() -> None:
    async with gateway(limits=LONG) as running:
        status, body, _ = await running.complete(prompt=[5] * 40, max_tokens=25)
        fits, _, _ = await running.complete(prompt=[5] * 40, max_tokens=24)
    assert (status, fits) == (400, 200)
    assert body["error"]["code"] == "context_length_exceeded"
    assert "maximum context length is 64 tokens, but 65 were requested" in body["error"]["message"]


async def test_a_body_over_the_limit_is_refused_whether_its_length_is_told_or_not() -> None:
    async def chunked() -> Any:
        for _ in range(20):
            yield b"x" * 100

    limits = LimitsSection(body_max_bytes=1024)
    async with gateway(limits=limits) as running:
        for data in (b"x" * 2000, chunked()):
            async with running.http.post(running.url + CHAT, data=data) as response:
                error = (await response.json())["error"]
            assert (response.status, error["code"]) == (413, "body_too_large")
            assert "1024 bytes" in error["message"]


async def test_a_body_that_never_ends_is_given_up() -> None:
    async with gateway(options=EdgeOptions(body_s=0.02)) as running:
        host, port = running.url.removeprefix("http://").split(":")
        reader, writer = await asyncio.open_connection(host, int(port))
        writer.write(f"POST {CHAT} HTTP/1.1\r\nHost: x\r\nContent-Length: 99\r\n\r\n{{".encode())
        head = await reader.readuntil(b"\r\n")
        writer.close()
    assert head == b"HTTP/1.1 408 Request Timeout\r\n"


@pytest.mark.parametrize(
    ("method", "path", "status", "code"),
    [
        ("GET", "/v1/embeddings", 404, "unknown_url"),
        ("POST", "/", 404, "unknown_url"),
        ("GET", CHAT, 405, "method_not_allowed"),
        ("DELETE", "/v1/models", 405, "method_not_allowed"),
        ("GET", "/v1/models/gpt-5", 404, "model_not_found"),
    ],
)
async def test_an_unknown_route_or_method_is_an_error_object_too(
    method: str, path: str, status: int, code: str
) -> None:
    async with (
        gateway() as running,
        running.http.request(method, running.url + path) as response,
    ):
        error = (await response.json())["error"]
    assert (response.status, error["code"]) == (status, code)
    assert error["type"] == "invalid_request_error"
    assert ("Allow" in response.headers) == (status == 405)


async def test_requests_wait_outside_until_the_pod_has_been_ready_once() -> None:
    async with gateway(view=STARTING_VIEW) as running:
        status, body, headers = await running.chat()
    assert (status, headers["Retry-After"], body["error"]["code"]) == (503, "1", "not_ready")
    assert "expert_die.d0.e1" in body["error"]["message"]
    assert running.pod.submitted == []


async def test_a_member_lost_later_does_not_close_the_door() -> None:
    async with gateway() as running:
        first, _, _ = await running.chat()
        running.pod.receive(STARTING_VIEW, "control_plane.0")
        second, _, _ = await running.chat()
    assert (first, second) == (200, 200)


async def test_a_full_gateway_says_when_to_come_back_and_admits_all_choices_or_none() -> None:
    limits = LimitsSection(requests_in_flight_max=3)
    async with gateway(silent_after(1), limits=limits) as running:
        body = completion_body(stream=True, n=2)
        async with running.http.post(running.url + PLAIN, json=body) as open_stream:
            await open_stream.content.readuntil(b"\n\n")
            status, refused, headers = await running.complete(n=2)
            assert len(running.pod.submitted) == 2
    assert (status, headers["Retry-After"]) == (429, "1")
    assert refused["error"]["type"] == "rate_limit_error"
    assert refused["error"]["code"] == "backpressure"
    assert "2 of 3 requests are open, 2 more do not fit" in refused["error"]["message"]


@pytest.mark.parametrize(
    ("code", "status", "kind"),
    [
        ("backpressure", 429, "rate_limit_error"),
        ("capacity_exceeded", 400, "invalid_request_error"),
        ("deadline_exceeded", 504, "timeout_error"),
        ("peer_lost", 500, "server_error"),
        ("transfer_failed", 500, "server_error"),
        ("never_heard_of", 500, "server_error"),
    ],
)
async def test_a_failure_in_the_pod_has_its_status(code: str, status: int, kind: str) -> None:
    async with gateway(failing(code)) as running:
        found, body, _ = await running.complete()
    assert (found, body["error"]["type"]) == (status, kind)
    assert "the die is on fire (stage: decode)" in body["error"]["message"]


@pytest.mark.parametrize(
    ("definite", "says"), [(True, "a retry is safe"), (False, "may have been executed in part")]
)
async def test_a_server_error_says_whether_anything_happened(definite: bool, says: str) -> None:
    async with gateway(failing("peer_lost", definite=definite)) as running:
        _, body, _ = await running.complete()
    assert body["error"]["message"].endswith(says)


async def test_a_bug_of_ours_is_an_error_object_and_is_noted(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def broken(*_: object) -> None:
        raise ZeroDivisionError

    async with gateway() as running:
        monkeypatch.setattr("services.gateway.edge.parse_chat", broken)
        status, body, _ = await running.chat()
    assert (status, body["error"]["type"]) == (500, "server_error")
    assert "ZeroDivisionError" in body["error"]["message"]
    assert running.notes.events == ["http_handler_failed"]
