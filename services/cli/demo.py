"""`xds demo`: the main job from start to end, in under a minute.

It starts a pod of its own (its own state directory and port, so it disturbs none that runs), asks a
question, lets the model call a tool and use the result, asks for prose with sampling, and
compares every token with the monolithic reference computed here. Then it stops what it started.
"""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from libs.clock.pod_clock import monotonic_s
from libs.config.topology import load_topology
from libs.model.reference import Reference
from libs.model.resources import ModelResources
from libs.model.sampling import SamplingParams, sample
from services.cli.chat import ChatAnswer, ChatQuestion, ask, timing_table
from services.cli.client import PodClient
from services.cli.console import out
from services.cli.lifecycle import free_port, own_pod
from services.pod.options import UpOptions

WEATHER = {"temperature": 21, "condition": "sunny"}


@dataclass(frozen=True, slots=True)
class Scene:
    """One step of the demo."""

    title: str
    question: ChatQuestion


def run_demo(topology: str, port: int, *, show: bool) -> dict[str, Any]:
    """Play the scenes; the report says whether every token was equal."""
    started_s = monotonic_s()
    pod = load_topology(topology)
    model = ModelResources(pod.model.checkpoint, pod.model.engine)
    _say(show, f"[bold]Starting[/] a pod of topology {topology}: {pod.description}")
    with own_pod(UpOptions(topology, pace=1.0, http_port=port or free_port())) as state:
        ready_s = monotonic_s() - started_s
        count = state.num_processes
        _say(show, f"{count} processes and a broker are ready after {ready_s:.1f} s\n")
        scenes = asyncio.run(_play(state.base_url, model, show))
    ok = all(scene["equal"] for scene in scenes)
    total_s = monotonic_s() - started_s
    tokens = sum(scene["tokens"] for scene in scenes)
    if show:
        _conclude(ok, tokens, total_s)
    return {"ok": ok, "tokens": tokens, "ready_s": round(ready_s, 2), "scenes": scenes}


async def _play(base_url: str, model: ModelResources, show: bool) -> list[dict[str, Any]]:
    reference = Reference(model.engine())
    results = []
    async with PodClient(base_url) as client:
        question = ChatQuestion([_user("What is the capital of France?")])
        scene = Scene("A question, answered with reasoning", question)
        results.append(await _scene(client, scene, model, reference, show))
        weather = [_user("What is the weather in Paris?")]
        scene = Scene("A question that needs a tool", ChatQuestion(weather))
        called = await _scene(client, scene, model, reference, show)
        results.append(called)
        follow_up = [*weather, _called(called["tool_calls"]), _tool_result(called["tool_calls"])]
        scene = Scene("The tool's result, put into words", ChatQuestion(follow_up))
        results.append(await _scene(client, scene, model, reference, show))
        prose = [_user("Tell me a story.")]
        scene = Scene(
            "Prose, sampled at temperature 0.8",
            ChatQuestion(prose, max_tokens=64, temperature=0.8, seed=7, thinking=False),
        )
        results.append(await _scene(client, scene, model, reference, show))
    return results


async def _scene(
    client: PodClient, scene: Scene, model: ModelResources, reference: Reference, show: bool
) -> dict[str, Any]:
    _say(show, f"[bold]{scene.title}[/]")
    last = scene.question.messages[-1]
    _say(show, f"[cyan]{last['role']}:[/] {last['content']}")
    answer = await ask(client, scene.question, show=show)
    expected = reference_tokens(answer, scene.question, model, reference)
    equal = answer.token_ids == expected
    if show:
        out.print(timing_table(answer.xds))
        count = len(answer.token_ids)
        verdict = f"[green]{count} of {count} tokens equal the reference[/]"
        out.print((verdict if equal else "[red]tokens differ from the reference[/]") + "\n")
    return {
        "title": scene.title,
        "content": answer.content,
        "reasoning": answer.reasoning,
        "tool_calls": answer.tool_calls,
        "tokens": len(answer.token_ids),
        "equal": equal,
        "xds": answer.xds,
    }


def reference_tokens(
    answer: ChatAnswer, question: ChatQuestion, model: ModelResources, reference: Reference
) -> list[int]:
    """What the monolith generates for the same conversation."""
    prompt = list(model.template.render(question.messages, thinking=question.thinking).ids)
    eos = model.tokenizer.control.eos
    params = SamplingParams(
        temperature=question.temperature, seed=question.seed, stop_token_ids=(eos,)
    )

    def choose(logits: np.ndarray, position: int, before: Sequence[int]) -> int:
        return sample(logits, params, before[len(prompt) :], prompt, position, 0).token

    return reference.generate(prompt, choose, question.max_tokens, (eos,))


def command_name() -> str:
    """How this person calls `xds`: by name where it is on PATH, by its place otherwise."""
    if shutil.which("xds"):
        return "xds"
    return os.path.relpath(Path(sys.prefix) / "bin" / "xds")


def _user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


def _called(calls: list[dict[str, str]]) -> dict[str, Any]:
    functions = [
        {
            "id": call["id"],
            "type": "function",
            "function": {"name": call["name"], "arguments": call["arguments"]},
        }
        for call in calls
    ]
    return {"role": "assistant", "content": None, "tool_calls": functions}


def _tool_result(calls: list[dict[str, str]]) -> dict[str, Any]:
    call_id = calls[0]["id"] if calls else "call_none"
    return {"role": "tool", "tool_call_id": call_id, "content": json.dumps(WEATHER)}


def _say(show: bool, text: str) -> None:
    if show:
        out.print(text)


def _conclude(ok: bool, tokens: int, total_s: float) -> None:
    if ok:
        out.print(f"[bold green]All {tokens} tokens equal the monolithic reference.[/] ", end="")
    out.print(f"Everything is stopped again after {total_s:.1f} s.\n")
    xds = command_name()
    out.print(f"Keep a pod up:    [bold]{xds} up --detach[/]   (then: {xds} status, {xds} down)")
    out.print(f'Talk to it:       [bold]{xds} chat "What is the capital of Japan?"[/]')
    out.print(f"Prove it:         [bold]{xds} verify --host pod --requests 20[/]")
    out.print(f"See its shape:    [bold]{xds} topology[/]   and the model: {xds} model info")
    out.print("Use any client:   OpenAI base URL http://127.0.0.1:8000/v1, any API key")
