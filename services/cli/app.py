"""The commands of `xds`, each a few lines around the module that does the work.

    xds up [--topology F] [--pace X] [--port P] [--detach]     xds chat PROMPT
    xds down                                                   xds verify --requests N --seed S
    xds status                                                 xds topology [--topology F]
    xds logs SERVICE [--follow]                                xds model info
    xds demo

Every command has `--json`. Exit codes: 0 ok, 1 failed, 2 bad input.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import time
from typing import Annotated, Any

import typer

from libs.config.plan import plan_pod
from libs.config.topology import load_topology
from libs.errors import BadInput, OperatingError
from libs.model.info import model_info
from libs.model.resources import ModelResources
from services.cli.bench_pace import bench_pace
from services.cli.chat import ChatQuestion, ask, timing_table
from services.cli.client import PodClient, running_pod
from services.cli.console import Bars, out, print_json, reporting
from services.cli.demo import run_demo
from services.cli.lifecycle import start_pod, stop_pod
from services.cli.status_view import status_tables
from services.cli.topology_view import topology_data, topology_tree
from services.cli.verify_pod import verify_pod
from services.pod.state import PodState, log_path, read_state, state_dir
from services.pod.supervisor import UpOptions
from services.superpod.verify import verify_sim

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    help="Run, watch and verify a disaggregated MoE serving pod.",
    pretty_exceptions_enable=False,
)
model_app = typer.Typer(no_args_is_help=True, help="The served model.")
app.add_typer(model_app, name="model")
bench_app = typer.Typer(no_args_is_help=True, help="Benchmarks.")
app.add_typer(bench_app, name="bench")

Json = Annotated[bool, typer.Option("--json", help="One JSON document instead of text.")]
TopologyOption = Annotated[
    str, typer.Option("--topology", "-t", help="Topology file, or the name of a shipped one.")
]


@app.command()
def up(
    topology: TopologyOption = "mini",
    pace: Annotated[
        float, typer.Option(help="Wall seconds per emulated second; 0 = as fast as possible.")
    ] = 1.0,
    port: Annotated[int, typer.Option(help="HTTP port on 127.0.0.1.")] = 8000,
    detach: Annotated[bool, typer.Option("--detach", "-d", help="Return when ready.")] = False,
    log: Annotated[str, typer.Option(help="Log level: debug, info, warning, error.")] = "info",
    as_json: Json = False,
) -> None:
    """Start the embedded pod and wait until it is ready."""
    with reporting(as_json):
        if log not in ("debug", "info", "warning", "error"):
            raise BadInput(f"--log must be debug, info, warning or error, not {log!r}", field="log")
        state = start_pod(UpOptions(topology, pace, port, log))
        _show_started(state, as_json)
        if not detach:
            _watch(state)


def _show_started(state: PodState, as_json: bool) -> None:
    if as_json:
        print_json({"ok": True, **_state_data(state)})
        return
    count = len(state.actors)
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
        "pid": state.supervisor_pid,
        "processes": state.actors,
    }


@app.command()
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


@app.command()
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


@app.command()
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


@app.command()
def verify(
    requests: Annotated[int, typer.Option(min=1, max=100_000, help="How many requests.")] = 20,
    seed: Annotated[int, typer.Option(help="Seed of workload and simulation.")] = 1,
    host: Annotated[str, typer.Option(help="sim: one process; pod: the running pod.")] = "sim",
    topology: TopologyOption = "mini",
    as_json: Json = False,
) -> None:
    """Send random requests and compare every token with the monolithic reference."""
    with reporting(as_json), Bars() as bars:
        match host:
            case "sim":
                pod = load_topology(topology)
                model = ModelResources(pod.model.checkpoint, pod.model.engine)
                report = verify_sim(pod, model, requests=requests, seed=seed, progress=bars.update)
            case "pod":
                state = running_pod()
                pod = load_topology(state.topology)
                model = ModelResources(pod.model.checkpoint, pod.model.engine)
                report = asyncio.run(
                    verify_pod(
                        state.base_url,
                        model,
                        requests=requests,
                        seed=seed,
                        pace=state.pace,
                        progress=bars.update,
                    )
                )
            case _:
                raise BadInput(f"--host must be sim or pod, not {host!r}", field="host")
    _show_verdict(report, as_json)


def _show_verdict(report: dict[str, Any], as_json: bool) -> None:
    if as_json:
        print_json(report)
    else:
        colour = "green" if report["ok"] else "red"
        verdict = "every token equals the reference" if report["ok"] else "NOT equal"
        out.print(f"[{colour}]{verdict}[/]")
        for key, value in report.items():
            if key not in ("ok", "examples"):
                out.print(f"  {key:<16} {value}")
        for example in report["examples"]:
            out.print(f"  [red]{example}[/]", markup=True)
    if not report["ok"]:
        raise typer.Exit(1)


@app.command()
def topology(
    topology: TopologyOption = "mini",
    as_json: Json = False,
) -> None:
    """Draw the pod of a topology file."""
    with reporting(as_json):
        loaded = load_topology(topology)
        plan = plan_pod(loaded)
        model = ModelResources(loaded.model.checkpoint, loaded.model.engine)
        if as_json:
            print_json(topology_data(plan, model))
        else:
            out.print(topology_tree(plan, model))


@app.command()
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


@model_app.command("info")
def info(
    checkpoint: Annotated[str, typer.Option(help="Name of a shipped checkpoint, or a folder.")] = (
        "xds-tiny"
    ),
    as_json: Json = False,
) -> None:
    """What the served model is made of."""
    with reporting(as_json):
        report = model_info(ModelResources(checkpoint).checkpoint)
        if as_json:
            print_json(report)
        else:
            _print_nested(report, "")


def _print_nested(value: Any, indent: str) -> None:
    for key, item in value.items():
        if isinstance(item, dict):
            out.print(f"{indent}[bold]{key}[/]")
            _print_nested(item, indent + "  ")
        else:
            text = (
                f"{item:,}" if isinstance(item, int) and not isinstance(item, bool) else str(item)
            )
            out.print(f"{indent}{key:<28} {text}", soft_wrap=True)


@bench_app.command("pace")
def pace(
    streams: Annotated[int, typer.Option(min=1, help="Concurrent streams.")] = 4,
    tokens: Annotated[int, typer.Option(min=2, help="Tokens per stream.")] = 128,
    as_json: Json = False,
) -> None:
    """Time between tokens at the client against the emulated one, on the running pod."""
    with reporting(as_json):
        state = running_pod()
        report = asyncio.run(bench_pace(state.base_url, state.pace, streams=streams, tokens=tokens))
        if as_json:
            print_json(report)
        else:
            seen, charged = report["client_tpot_ms"], report["emulated_tpot_ms"]
            out.print(f"client {seen} ms, emulated {charged} ms per token, ratio {report['ratio']}")


@app.command()
def demo(
    topology: TopologyOption = "mini",
    port: Annotated[int, typer.Option(help="HTTP port; 0 takes a free one.")] = 0,
    as_json: Json = False,
) -> None:
    """Start a pod, ask it things, compare every token with the reference, stop it."""
    with reporting(as_json):
        report = run_demo(topology, port, show=not as_json)
        if as_json:
            print_json(report)
        if not report["ok"]:
            raise OperatingError("an answer differed from the reference")
