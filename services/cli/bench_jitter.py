"""`xds bench jitter` for people: a row per way of collecting garbage."""

from __future__ import annotations

from typing import Any

from rich.table import Table

from services.cli.console import out

COLUMNS = {
    "gc": "garbage collection",
    "iterations": "iterations",
    "first_dispatch_ms": "first dispatch ms",
    "first_dispatch_ms_p99": "p99",
    "first_dispatch_ms_max": "max",
    "pauses_in_iterations": "pauses",
    "pause_ms_longest": "longest ms",
}


def show(report: dict[str, Any]) -> None:
    """One table."""
    table = Table(*COLUMNS.values(), caption="real time, both ways in turn within one run")
    for row in report["rows"]:
        table.add_row(*(str(row[key]) for key in COLUMNS))
    out.print(table)
