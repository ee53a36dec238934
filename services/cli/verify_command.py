"""`xds verify`: random requests through a pod, every token compared with the monolithic reference.

    --host sim     a simulation in this process and in virtual time (the default)
    --host pod     the pod that runs in this folder
    --host own     a pod of real processes, started for this run and stopped after it

`--carrier` names what carries the frames of the fabric. Alone it asks for a pod of its own, because
only real processes have memory to share; a simulation takes the carrier's way of stamping.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import Annotated, Any

import typer

from libs.config.topology import load_topology
from libs.errors import BadInput
from services.cli.client import running_pod
from services.cli.console import Bars, out, print_json, reporting
from services.cli.lifecycle import free_port, own_pod
from services.cli.options import CarrierOption, Json, TopologyOption
from services.pod.options import UpOptions
from services.pod.state import PodState

#: A pod of its own runs ten times faster than a SuperPod: two cores keep up with the workload.
OWN_PACE = 0.1


@dataclass(frozen=True, slots=True)
class Asked:
    """What is to be verified; `fault` is a class (empty for none) and its probability."""

    requests: int
    seed: int
    topology: str
    carrier: str
    fault: tuple[str, float]


def verify(
    requests: Annotated[int, typer.Option(min=1, max=100_000, help="How many requests.")] = 20,
    seed: Annotated[int, typer.Option(help="Seed of workload, simulation and faults.")] = 1,
    host: Annotated[
        str,
        typer.Option(help="sim: in this process; pod: the running pod; own: one just for this."),
    ] = "",
    topology: TopologyOption = "mini",
    carrier: CarrierOption = "",
    faults: Annotated[
        str, typer.Option(help="Fault class on every link and its probability: jitter=0.05.")
    ] = "",
    as_json: Json = False,
) -> None:
    """Send random requests and compare every token with the monolithic reference."""
    with reporting(as_json), Bars() as bars:
        asked = Asked(requests, seed, topology, carrier, _fault_asked(faults))
        match host or ("own" if carrier else "sim"):
            case "sim":
                report = _verify_sim(asked, bars)
            case "pod":
                report = _verify_pod(_running(asked), asked, bars)
            case "own":
                options = UpOptions(topology, OWN_PACE, free_port(), "warning", carrier)
                with own_pod(options) as state:
                    report = _verify_pod(state, asked, bars)
            case _:
                raise BadInput(f"--host must be sim, pod or own, not {host!r}", field="host")
    _show_verdict(report, as_json)


def _fault_asked(text: str) -> tuple[str, float]:
    """`corruption=0.1` as a class and a probability; a class alone means 5 %."""
    kind, _, rate = text.partition("=")
    try:
        return kind, float(rate or 0.05)
    except ValueError:
        message = f"--faults must be CLASS=PROBABILITY, not {text!r}"
        raise BadInput(message, field="faults") from None


def _running(asked: Asked) -> PodState:
    state = running_pod()
    if asked.carrier and asked.carrier != state.carrier:
        raise BadInput(
            f"the running pod's carrier is {state.carrier}; for another: xds down, then xds up"
            f" --carrier {asked.carrier}, or verify with --host own",
            field="carrier",
        )
    return state


def _verify_sim(asked: Asked, bars: Bars) -> dict[str, Any]:
    from libs.fabric.faults.active import fault_named
    from libs.model.resources import ModelResources
    from services.superpod.verify import verify_sim

    pod = load_topology(asked.topology, asked.carrier)
    kind, rate = asked.fault
    rules = [fault_named(kind, rate, asked.seed)] if kind else []
    model = ModelResources(pod.model.checkpoint, pod.model.engine)
    return verify_sim(
        pod, model, requests=asked.requests, seed=asked.seed, faults=rules, progress=bars.update
    )


def _verify_pod(state: PodState, asked: Asked, bars: Bars) -> dict[str, Any]:
    from libs.fabric.faults.active import fault_named
    from libs.model.resources import ModelResources
    from services.cli.pod_faults import arm_of
    from services.cli.verify_pod import verify_pod

    pod = load_topology(state.topology)
    kind, rate = asked.fault
    arms = [arm_of(fault_named(kind, rate, asked.seed))] if kind else []
    model = ModelResources(pod.model.checkpoint, pod.model.engine)
    return asyncio.run(
        verify_pod(
            state, model, requests=asked.requests, seed=asked.seed, faults=arms,
            progress=bars.update,
        )
    )  # fmt: skip


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
