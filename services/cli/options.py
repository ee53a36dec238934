"""Options that several commands share."""

from __future__ import annotations

from typing import Annotated

import typer

Json = Annotated[bool, typer.Option("--json", help="One JSON document instead of text.")]
TopologyOption = Annotated[
    str, typer.Option("--topology", "-t", help="Topology file, or the name of a shipped one.")
]
CarrierOption = Annotated[
    str, typer.Option(help="What carries UB frames: nats or shm; empty: as the topology says.")
]
