"""Commands that need no pod and change nothing: topology, model info, verify, demo.

What they stand on is heavy (numpy, the model, every service), so it is imported when they run: the
other commands of `xds` should answer at once.
"""

from __future__ import annotations

import asyncio
from typing import Annotated, Any

import typer

from libs.config.plan import plan_pod
from libs.config.topology import load_topology
from libs.errors import BadInput, OperatingError
from services.cli.client import running_pod
from services.cli.console import Bars, out, print_json, reporting
from services.cli.options import Json, TopologyOption


def verify(
    requests: Annotated[int, typer.Option(min=1, max=100_000, help="How many requests.")] = 20,
    seed: Annotated[int, typer.Option(help="Seed of workload, simulation and faults.")] = 1,
    host: Annotated[str, typer.Option(help="sim: one process; pod: the running pod.")] = "sim",
    topology: TopologyOption = "mini",
    faults: Annotated[
        str, typer.Option(help="Fault class on every link and its probability: jitter=0.05.")
    ] = "",
    as_json: Json = False,
) -> None:
    """Send random requests and compare every token with the monolithic reference."""
    with reporting(as_json), Bars() as bars:
        match host:
            case "sim":
                report = _verify_sim(requests, seed, topology, _fault_asked(faults), bars)
            case "pod":
                report = _verify_pod(requests, seed, _fault_asked(faults), bars)
            case _:
                raise BadInput(f"--host must be sim or pod, not {host!r}", field="host")
    _show_verdict(report, as_json)


def _fault_asked(text: str) -> tuple[str, float]:
    """`corruption=0.1` as a class and a probability; a class alone means 5 %."""
    kind, _, rate = text.partition("=")
    try:
        return kind, float(rate or 0.05)
    except ValueError:
        message = f"--faults must be CLASS=PROBABILITY, not {text!r}"
        raise BadInput(message, field="faults") from None


def _verify_sim(
    requests: int, seed: int, topology: str, faults: tuple[str, float], bars: Bars
) -> dict[str, Any]:
    from libs.fabric.faults.active import fault_named
    from libs.model.resources import ModelResources
    from services.superpod.verify import verify_sim

    pod = load_topology(topology)
    kind, rate = faults
    rules = [fault_named(kind, rate, seed)] if kind else []
    model = ModelResources(pod.model.checkpoint, pod.model.engine)
    return verify_sim(pod, model, requests=requests, seed=seed, faults=rules, progress=bars.update)


def _verify_pod(requests: int, seed: int, faults: tuple[str, float], bars: Bars) -> dict[str, Any]:
    from libs.model.resources import ModelResources
    from libs.wire.fabric import FaultArm
    from services.cli.verify_pod import verify_pod

    state = running_pod()
    pod = load_topology(state.topology)
    kind, rate = faults
    arms = [FaultArm(f"all-{kind}", kind, rate, seed)] if kind else []
    model = ModelResources(pod.model.checkpoint, pod.model.engine)
    return asyncio.run(
        verify_pod(state, model, requests=requests, seed=seed, faults=arms, progress=bars.update)
    )


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


def topology(
    topology: TopologyOption = "mini",
    as_json: Json = False,
) -> None:
    """Draw the pod of a topology file."""
    from libs.model.resources import ModelResources
    from services.cli.topology_view import topology_data, topology_tree

    with reporting(as_json):
        loaded = load_topology(topology)
        plan = plan_pod(loaded)
        model = ModelResources(loaded.model.checkpoint, loaded.model.engine)
        if as_json:
            print_json(topology_data(plan, model))
        else:
            out.print(topology_tree(plan, model))


def info(
    checkpoint: Annotated[str, typer.Option(help="Name of a shipped checkpoint, or a folder.")] = (
        "xds-tiny"
    ),
    as_json: Json = False,
) -> None:
    """What the served model is made of."""
    from libs.model.info import model_info
    from libs.model.resources import ModelResources

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


def demo(
    topology: TopologyOption = "mini",
    port: Annotated[int, typer.Option(help="HTTP port; 0 takes a free one.")] = 0,
    as_json: Json = False,
) -> None:
    """Start a pod, ask it things, compare every token with the reference, stop it."""
    from services.cli.demo import run_demo

    with reporting(as_json):
        report = run_demo(topology, port, show=not as_json)
        if as_json:
            print_json(report)
        if not report["ok"]:
            raise OperatingError("an answer differed from the reference")
