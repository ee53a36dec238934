"""`xds bench ...`: each prints what it measured, and says on what."""

from __future__ import annotations

import asyncio
from typing import Annotated

import typer

from services.cli.client import running_pod
from services.cli.console import out, print_json, reporting
from services.cli.options import Json

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


@bench_app.command("xccl")
def xccl(
    part: Annotated[str, typer.Argument(help="p2p (Fig. 5) or collectives (Fig. 6, A2E, E2A).")],
    as_json: Json = False,
) -> None:
    """Latencies of XCCL over the emulated fabric in virtual time, beside the published ones."""
    from services.cli.bench_xccl import bench_xccl, show

    with reporting(as_json):
        report = bench_xccl(part)
        if as_json:
            print_json(report)
        else:
            show(report)
