"""The prefix cache as clients and operators see it: salts, usage, metrics."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import pytest

from libs.wire.request import RequestSpec
from libs.wire.tokens import Chunk
from services.gateway.admission import cache_salt_of
from tests.unit.gateway.fake_pod import (
    Running,
    Script,
    chat_body,
    completion_body,
    gateway,
    saying,
)
from tests.unit.gateway.sse_reader import read_stream
from tests.unit.gateway.test_operators import samples


def cached(*tokens: int) -> Script:
    """The n-th choice found so many tokens of its prompt."""
    say = saying("Paris.")

    def script(spec: RequestSpec) -> Iterable[Chunk]:
        said = say(spec)
        return [found(item, tokens[spec.choice]) for item in said if isinstance(item, Chunk)]

    return script


def found(chunk: Chunk, tokens: int) -> Chunk:
    if chunk.timing is None:
        return chunk
    prefill = replace(chunk.timing.prefill, cached_tokens=tokens)
    return replace(chunk, timing=replace(chunk.timing, prefill=prefill))


def details(body: Any) -> Any:
    return body["usage"]["prompt_tokens_details"]


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions"])
async def test_usage_tells_what_of_the_prompt_was_cached(path: str) -> None:
    body = chat_body() if "chat" in path else completion_body()
    async with gateway(cached(3)) as running:
        _, answer, _ = await running.post(path, body)
    assert details(answer) == {"cached_tokens": 3}


async def test_a_streamed_usage_tells_it_too() -> None:
    async with gateway(cached(3)) as running:
        body = chat_body(stream=True, stream_options={"include_usage": True})
        url = running.url + "/v1/chat/completions"
        async with running.http.post(url, json=body) as response:
            streamed = await read_stream(response)
    assert details(streamed.events[-1]) == {"cached_tokens": 3}


async def test_what_a_prompts_other_choices_found_its_first_one_computed() -> None:
    async with gateway(cached(1, 4)) as running:
        _, answer, _ = await running.complete(prompt=["Once upon a time", "A day"], n=2)
    # Choices are numbered within their prompt: each prompt had one that found a single token.
    assert details(answer) == {"cached_tokens": 2}


async def test_tokens_looked_for_and_found_are_counted() -> None:
    async with gateway(cached(1, 4)) as running:
        await running.complete(n=2)
        counted = await samples(running)
    prompt = running.pod.submitted[0].prompt_tokens
    assert counted["xds_prefix_cache_queries_total"] == 2 * prompt
    assert counted["xds_prefix_cache_hits_total"] == 5


async def salt(running: Running, *, key: str | None = None, **fields: Any) -> str:
    """The salt under which a request is submitted."""
    headers = {} if key is None else {"Authorization": f"Bearer {key}"}
    await running.post("/v1/completions", completion_body(**fields), **headers)
    return running.pod.submitted[-1].cache_salt


async def test_requests_share_a_salt_when_key_and_salt_are_the_same() -> None:
    async with gateway() as running:
        salts = [
            await salt(running),
            await salt(running, cache_salt="s"),
            await salt(running, key="k"),
            await salt(running, key="k", cache_salt="s"),
            await salt(running, key="other", cache_salt="s"),
        ]
        again = await salt(running, key="k", cache_salt="s")
    assert len(set(salts)) == 5
    assert again == salts[3]
    assert salts[0] == ""
    assert all(len(found) == 32 for found in salts[1:]), "digests: no key travels"


def test_a_salt_cannot_be_made_to_look_like_another_tenants() -> None:
    pairs = [("ab", "c"), ("a", "bc"), ("", "abc"), ("abc", "")]
    assert len({cache_salt_of(key, given) for key, given in pairs}) == 4
