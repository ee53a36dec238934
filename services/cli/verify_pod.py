"""`xds verify --host pod`: the seeded workload through HTTP, compared with the reference.

Clients arrive as the workload says (emulated time x pace), stream or not, and some leave in
mid-stream by closing the connection. Token ids come back with `return_token_ids`, each with its
index, so that a lost or doubled token cannot hide behind equal text.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from libs import units
from libs.clock.pod_clock import monotonic_s
from libs.errors import OperatingError
from libs.model.output_parser import ToolCallPiece
from libs.model.resources import ModelResources
from libs.wire.fabric import FaultArm
from libs.workload.requests import ClientRequest, make_workload, spec_of
from libs.workload.verdict import Progress, Seen, judge, untold
from services.cli.client import PodClient
from services.cli.pod_faults import armed
from services.pod.state import PodState

#: How long blocks may still be held after the last client has gone, in real seconds.
SETTLE_S = 10.0


async def verify_pod(
    state: PodState,
    model: ModelResources,
    *,
    requests: int,
    seed: int,
    faults: Sequence[FaultArm] = (),
    progress: Progress = untold,
) -> dict[str, Any]:
    """Run and judge; the result is ready for `--json`. `faults` are armed meanwhile."""
    workload = make_workload(seed, requests)
    seen: dict[int, Seen] = {}
    started_s = monotonic_s()

    async def one(client: PodClient, request: ClientRequest) -> None:
        await asyncio.sleep(units.to_s(request.arrive_ns) * state.pace)
        seen[request.index] = await _ask(client, model.name, request)
        progress("pod", len(seen), requests)

    async with PodClient(state.base_url) as client:
        async with armed(state, faults) as done:
            await asyncio.gather(*(one(client, request) for request in workload))
        duration_s = monotonic_s() - started_s
        held = await _blocks_held(client)
    answers = (
        (
            f"request {request.index}",
            spec_of(request, f"verify-{seed}-{request.index}", 0, model),
            seen[request.index],
        )
        for request in workload
    )
    verdict = judge(answers, model, progress)
    return {
        "host": "pod",
        "carrier": state.carrier,
        "seed": seed,
        "ok": verdict.ok and held == 0,
        **asdict(verdict),
        "kv_blocks_held": held,
        "faults": done,
        "wall_s": round(duration_s, 3),
    }


async def _ask(client: PodClient, model: str, request: ClientRequest) -> Seen:
    seen = Seen()
    path = "/v1/chat/completions" if request.chat else "/v1/completions"
    body = body_of(request, model)
    try:
        if request.stream:
            async for event in client.stream(path, body):
                _take_event(seen, event)
                leaves = request.cancel_after
                if leaves is not None and len(seen.tokens) >= leaves and seen.ended is None:
                    seen.left = True
                    break
        else:
            _take_body(seen, await client.post(path, body))
    except OperatingError as error:
        seen.ended = f"failed: {error.message}"
    return seen


def body_of(request: ClientRequest, model: str) -> dict[str, Any]:
    """The request as JSON of the OpenAI API."""
    sampling = request.sampling
    body: dict[str, Any] = {
        "model": model,
        "max_tokens": request.max_tokens,
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "top_k": sampling.top_k,
        "seed": sampling.seed,
        "presence_penalty": sampling.presence_penalty,
        "frequency_penalty": sampling.frequency_penalty,
        "ignore_eos": sampling.ignore_eos,
        "return_token_ids": True,
    }
    if request.stops:
        body["stop"] = list(request.stops)
    if request.chat:
        body["messages"] = [{"role": "user", "content": request.text}]
        body["chat_template_kwargs"] = {"thinking": request.thinking}
    else:
        body["prompt"] = request.text
    return body


def _take_event(seen: Seen, event: dict[str, Any]) -> None:
    for choice in event.get("choices", ()):
        delta = choice.get("delta") or {"content": choice.get("text")}
        first = choice.get("token_index", 0)
        for offset, token in enumerate(choice.get("token_ids") or ()):
            seen.indices.append(first + offset)
            seen.tokens.append(token)
        _take_text(seen, delta)
        seen.ended = choice.get("finish_reason") or seen.ended


def _take_body(seen: Seen, body: dict[str, Any]) -> None:
    choice = body["choices"][0]
    tokens = choice["token_ids"]
    seen.indices += range(len(tokens))
    seen.tokens += tokens
    _take_text(seen, choice.get("message") or {"content": choice.get("text")})
    seen.ended = choice["finish_reason"]


def _take_text(seen: Seen, part: dict[str, Any]) -> None:
    seen.content += part.get("content") or ""
    seen.reasoning += part.get("reasoning_content") or ""
    for position, call in enumerate(part.get("tool_calls") or ()):
        index = call.get("index", position)
        function = call.get("function", {})
        name, arguments = function.get("name"), function.get("arguments") or ""
        if name is not None:
            # The id is made from the request's, which is not ours to know here.
            seen.tool_calls.append(ToolCallPiece(index, None, name, arguments))
        elif seen.tool_calls:
            last = seen.tool_calls[-1]
            joined = last.arguments + arguments
            seen.tool_calls[-1] = ToolCallPiece(last.index, None, last.name, joined)


async def _blocks_held(client: PodClient) -> int:
    held = -1
    for _ in range(round(SETTLE_S / 0.25)):
        _, status = await client.get("/xds/status")
        held = status["kv_blocks_held"]
        if held == 0:
            break
        await asyncio.sleep(0.25)
    return held
