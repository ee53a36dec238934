"""Commands about a running pod: up, down, status, chat, logs."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import time
from typing import Annotated, Any

import typer

from libs.errors import BadInput
from services.cli.chat import ChatQuestion, ask, timing_table
from services.cli.client import PodClient, running_pod
from services.cli.console import out, print_json, reporting
from services.cli.lifecycle import start_pod, stop_pod
from services.cli.options import CarrierOption, Json, TopologyOption
from services.cli.status_view import status_tables
from services.pod.options import UpOptions
from services.pod.state import PodState, log_path, read_state, state_dir


def up(
    topology: TopologyOption = "mini",
    pace: Annotated[
        float, typer.Option(help="Wall seconds per emulated second; 0 = as fast as possible.")
    ] = 1.0,
    port: Annotated[int, typer.Option(help="HTTP port on 127.0.0.1.")] = 8000,
    detach: Annotated[bool, typer.Option("--detach", "-d", help="Return when ready.")] = False,
    log: Annotated[str, typer.Option(help="Log level: debug, info, warning, error.")] = "info",
    carrier: CarrierOption = "",
    as_json: Json = False,
) -> None:
    """Start the embedded pod and wait until it is ready."""
    with reporting(as_json):
        if log not in ("debug", "info", "warning", "error"):
            raise BadInput(f"--log must be debug, info, warning or error, not {log!r}", field="log")
        state = start_pod(UpOptions(topology, pace, port, log, carrier))
        _show_started(state, as_json)
        if not detach:
            _watch(state)


def _show_started(state: PodState, as_json: bool) -> None:
    if as_json:
        print_json({"ok": True, **_state_data(state)})
        return
    count = state.num_processes
    out.print(
        f"[green]ready[/]: {state.base_url}/v1  ({count} processes, logs in {state_dir()}/logs)"
    )


def _watch(state: PodState) -> None:
    """Stay in the foreground until Ctrl-C or the pod's own end."""
    out.print("Ctrl-C stops the pod.")
    with contextlib.suppress(KeyboardInterrupt):
        while read_state() is not None:
            time.sleep(0.2)
    # A second Ctrl-C must not leave half a pod behind.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    if read_state() is not None:
        stop_pod(state)


def _state_data(state: PodState) -> dict[str, Any]:
    return {
        "url": state.base_url,
        "nats": state.nats_url,
        "topology": state.topology,
        "pace": state.pace,
        "carrier": state.carrier,
        "pid": state.supervisor_pid,
        "processes": state.actors,
    }


def down(as_json: Json = False) -> None:
    """Stop the embedded pod; stopping none is fine."""
    with reporting(as_json):
        state = read_state()
        if state is not None:
            stop_pod(state)
        if as_json:
            print_json({"ok": True, "stopped": state is not None})
        else:
            out.print("stopped" if state is not None else "no pod was running here")


def status(as_json: Json = False) -> None:
    """Who is alive, what runs, and where every KV block is."""
    with reporting(as_json):
        state = running_pod()
        report = asyncio.run(_get(state.base_url, "/xds/status"))
        if as_json:
            print_json({**_state_data(state), **report})
        else:
            for table in status_tables(state, report):
                out.print(table)
        if not report["ready"]:
            raise typer.Exit(1)


async def _get(base_url: str, path: str) -> Any:
    async with PodClient(base_url, timeout_s=10.0) as client:
        _, body = await client.get(path)
        return body


def chat(
    prompt: Annotated[str, typer.Argument(help="What to say.")],
    max_tokens: Annotated[int, typer.Option(help="Most tokens to generate.")] = 128,
    temperature: Annotated[float, typer.Option(help="0 is greedy.")] = 0.0,
    seed: Annotated[int, typer.Option(help="Seed of the sampling.")] = 0,
    thinking: Annotated[bool, typer.Option(help="Let the model reason first.")] = True,
    as_json: Json = False,
) -> None:
    """Ask the running pod one question and stream the answer."""
    with reporting(as_json):
        state = running_pod()
        messages = [{"role": "user", "content": prompt}]
        question = ChatQuestion(messages, max_tokens, temperature, seed, thinking)
        answer = asyncio.run(_ask(state.base_url, question, show=not as_json))
        if as_json:
            print_json(
                {
                    "content": answer.content,
                    "reasoning_content": answer.reasoning,
                    "tool_calls": answer.tool_calls,
                    "finish_reason": answer.finish_reason,
                    "usage": answer.usage,
                    "xds": answer.xds,
                }
            )
        else:
            out.print(timing_table(answer.xds))


async def _ask(base_url: str, question: ChatQuestion, *, show: bool) -> Any:
    async with PodClient(base_url) as client:
        return await ask(client, question, show=show)


def logs(
    service: Annotated[str, typer.Argument(help="An actor name or its beginning, or supervisor.")],
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Keep printing.")] = False,
    lines: Annotated[int, typer.Option("--lines", "-n", min=1, help="How many last lines.")] = 40,
    as_json: Json = False,
) -> None:
    """Print the log of one service (of this folder's last pod)."""
    with reporting(as_json):
        folder = log_path("supervisor").parent
        names = sorted(path.stem for path in folder.glob("*.log"))
        matching = [name for name in names if name.startswith(service)]
        if not matching:
            known = ", ".join(names) or "none; no pod was ever started here"
            raise BadInput(f"no log of {service!r}; there are: {known}", field="service")
        for name in matching:
            text = log_path(name).read_text(encoding="utf-8", errors="replace")
            tail = text.splitlines()[-lines:]
            if as_json:
                print_json({"service": name, "lines": tail})
            else:
                prefix = f"{name}: " if len(matching) > 1 else ""
                for line in tail:
                    out.print(prefix + line, markup=False, soft_wrap=True)
        if follow:
            paths = [str(log_path(name)) for name in matching]
            os.execvp("tail", ["tail", "-n", "0", "-F", *paths])
