"""`xds bench ...`: each prints what it measured, and says on what."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import typer

from services.cli.client import running_pod
from services.cli.console import out, print_json, reporting
from services.cli.options import Json
from services.cli.plots import prepare

Plot = Annotated[
    Path | None, typer.Option("--plot", metavar="DIR", help="Draw the figures into DIR.")
]
bench_app = typer.Typer(no_args_is_help=True, help="Benchmarks.")


@bench_app.command("pace")
def pace(
    streams: Annotated[int, typer.Option(min=1, help="Concurrent streams.")] = 4,
    tokens: Annotated[int, typer.Option(min=2, help="Tokens per stream.")] = 128,
    as_json: Json = False,
) -> None:
    """Time between tokens at the client against the emulated one, on the running pod."""
    from services.cli.bench_pace import bench_pace

    with reporting(as_json):
        state = running_pod()
        report = asyncio.run(bench_pace(state.base_url, state.pace, streams=streams, tokens=tokens))
        if as_json:
            print_json(report)
        else:
            seen, charged = report["client_tpot_ms"], report["emulated_tpot_ms"]
            out.print(f"client {seen} ms, emulated {charged} ms per token, ratio {report['ratio']}")


@bench_app.command("carrier")
def carrier(
    rounds: Annotated[int, typer.Option(min=1, help="Frames per size and way.")] = 200,
    as_json: Json = False,
) -> None:
    """Latency of a UB frame between two processes: shared memory, socket, NATS, plain copy."""
    from services.cli.bench_carrier import show
    from services.superpod.bench_carrier import run

    with reporting(as_json):
        report = run(rounds=rounds)
        if as_json:
            print_json(report)
        else:
            show(report)


@bench_app.command("xccl")
def xccl(
    part: Annotated[
        str | None,
        typer.Argument(help="p2p (Fig. 5) or collectives (Fig. 6, A2E, E2A); default both."),
    ] = None,
    as_json: Json = False,
    plot: Plot = None,
) -> None:
    """Latencies of XCCL over the emulated fabric in virtual time, beside the published ones."""
    from services.cli.bench_xccl import bench_xccl, chosen_parts, show
    from services.cli.plots_xccl import draw_xccl

    with reporting(as_json):
        parts = chosen_parts(part)
        _report(lambda: bench_xccl(parts), show, draw_xccl, as_json=as_json, plot=plot)


@bench_app.command("sched")
def sched(
    groups: Annotated[int, typer.Option(min=2, help="Decode DP groups.")] = 32,
    requests: Annotated[int, typer.Option(min=100, help="Requests of the workload.")] = 4_000,
    seed: Annotated[int, typer.Option(help="Seed of the workload.")] = 1,
    as_json: Json = False,
) -> None:
    """Decode routing by KV against the usual ways: spread of KV, wait at the dispatch barrier."""
    from services.cli.bench_sched import show
    from services.superpod.bench_sched import Case, run

    with reporting(as_json):
        _report(lambda: run(Case(groups, requests, seed=seed)), show, as_json=as_json)


@bench_app.command("jitter")
def jitter(
    tokens: Annotated[int, typer.Option(min=32, help="Tokens per stream.")] = 256,
    as_json: Json = False,
) -> None:
    """Garbage collection at any moment against between iterations: time to the first dispatch."""
    from services.cli.bench_jitter import show
    from services.superpod.bench_jitter import run

    with reporting(as_json):
        _report(lambda: run(tokens), show, as_json=as_json)


@bench_app.command("fabric")
def fabric(as_json: Json = False, plot: Plot = None) -> None:
    """Latency, bandwidth, sharing and queueing of the emulated links, and the emulator's speed."""
    from services.cli.bench_fabric import show
    from services.cli.plots_fabric import draw_fabric
    from services.superpod.bench_fabric import run

    with reporting(as_json):
        _report(run, show, draw_fabric, as_json=as_json, plot=plot)


def _report(
    run: Callable[[], dict[str, Any]],
    show: Callable[[dict[str, Any]], None],
    draw: Callable[[dict[str, Any], Path], list[str]] | None = None,
    *,
    as_json: bool,
    plot: Path | None = None,
) -> None:
    """Measure, draw if asked to, and print; a folder that cannot be used stops it first."""
    folder = None if plot is None else prepare(plot)
    report = run()
    figures = [] if folder is None or draw is None else draw(report, folder)
    if folder is not None:
        report["figures"] = figures
    if as_json:
        print_json(report)
        return
    show(report)
    for path in figures:
        out.print(f"drawn {path}", soft_wrap=True)
