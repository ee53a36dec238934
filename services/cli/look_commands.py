"""Commands that need no pod and change nothing: topology, model info, demo.

What they stand on is heavy (numpy, the model, every service), so it is imported when they run: the
other commands of `xds` should answer at once.
"""

from __future__ import annotations

from typing import Annotated, Any

import typer

from libs.config.plan import plan_pod
from libs.config.topology import load_topology
from libs.errors import OperatingError
from services.cli.console import out, print_json, reporting
from services.cli.options import Json, TopologyOption


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
