"""`xds chat`: one question, the answer as it streams, and who served it when."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from rich.table import Table

from services.cli.client import PodClient
from services.cli.console import out


@dataclass(slots=True)
class ChatAnswer:
    """What came back: text, reasoning, calls, and the pod's account of the request."""

    content: str = ""
    reasoning: str = ""
    tool_calls: list[dict[str, str]] = field(default_factory=list)
    finish_reason: str | None = None
    usage: dict[str, Any] = field(default_factory=dict)
    xds: dict[str, Any] = field(default_factory=dict)
    token_ids: list[int] = field(default_factory=list)
    prompt_token_ids: list[int] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class ChatQuestion:
    """A conversation to continue, and how."""

    messages: list[dict[str, Any]]
    max_tokens: int = 128
    temperature: float = 0.0
    seed: int = 0
    thinking: bool = True

    def body(self) -> dict[str, Any]:
        """The request as JSON of the OpenAI API."""
        return {
            "model": "xds-tiny",
            "messages": self.messages,
            "max_tokens": self.max_tokens,
            "temperature": self.temperature,
            "seed": self.seed,
            "chat_template_kwargs": {"thinking": self.thinking},
            "stream_options": {"include_usage": True},
            "return_token_ids": True,
        }


async def ask(client: PodClient, question: ChatQuestion, *, show: bool) -> ChatAnswer:
    """Stream one answer; with `show` it is written to the terminal as it comes."""
    answer = ChatAnswer()
    async for event in client.stream("/v1/chat/completions", question.body()):
        answer.usage = event.get("usage") or answer.usage
        answer.xds = event.get("xds") or answer.xds
        answer.prompt_token_ids += event.get("prompt_token_ids") or []
        for choice in event.get("choices", ()):
            _take(answer, choice, show)
    if show:
        out.print()
    return answer


def _take(answer: ChatAnswer, choice: dict[str, Any], show: bool) -> None:
    delta = choice.get("delta", {})
    answer.token_ids += choice.get("token_ids") or []
    reasoning = delta.get("reasoning_content") or ""
    content = delta.get("content") or ""
    answer.reasoning += reasoning
    answer.content += content
    if show and reasoning:
        out.print(reasoning, style="dim italic", end="", markup=False)
    if show and content:
        if answer.reasoning and answer.content == content:
            out.print()
        out.print(content, end="", markup=False)
    for call in delta.get("tool_calls") or ():
        _take_call(answer, call, show)
    answer.finish_reason = choice.get("finish_reason") or answer.finish_reason


def _take_call(answer: ChatAnswer, call: dict[str, Any], show: bool) -> None:
    function = call.get("function", {})
    if function.get("name"):
        answer.tool_calls.append(
            {"id": call.get("id", ""), "name": function["name"], "arguments": ""}
        )
        if show:
            out.print(f"\n[yellow]tool call[/] {function['name']}", end="")
    arguments = function.get("arguments") or ""
    answer.tool_calls[-1]["arguments"] += arguments
    if show and arguments:
        out.print(arguments, style="yellow", end="", markup=False)


def timing_table(xds: dict[str, Any]) -> Table:
    """Who served the request, and where its time went on the emulated timeline."""
    table = Table(box=None, show_header=False, padding=(0, 2, 0, 0))
    table.add_row("prefill", f"{xds.get('prefill_te')}, {xds.get('prefill_dp')}")
    table.add_row("decode", f"{xds.get('decode_te')}, {xds.get('decode_dp')}")
    dies = ", ".join(str(die) for die in xds.get("expert_dies", ()))
    table.add_row("expert dies", dies)
    emulated = xds.get("emulated_ms", {})
    parts = [
        f"{name.replace('_', ' ')} [bold]{emulated[name]:.1f}[/] ms"
        for name in ("queue", "prefill", "kv_transfer", "first_token", "per_token", "total")
        if emulated.get(name) is not None
    ]
    table.add_row("emulated time", ", ".join(parts))
    return table
