"""`xds bench carrier`: the report of `services.superpod.bench_carrier` for a person."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rich.table import Table

from services.cli.console import out
from services.superpod.bench_carrier import COLUMNS, KIB


def show(report: Mapping[str, Any]) -> None:
    """The rows as a table, then what is asked of them."""
    table = Table(title="one-way latency, median/p99 in microseconds")
    for heading in ("KiB", *COLUMNS):
        table.add_column(heading, justify="right")
    for row in report["rows"]:
        cells = [f"{row[f'{name}_us']:.0f}/{row[f'{name}_p99_us']:.0f}" for name in COLUMNS]
        table.add_row(str(row["bytes"] // KIB), *cells)
    out.print(table)
    for target in report["targets"]:
        verdict = "[green]met[/]" if target["met"] else "[yellow]not met in this run[/]"
        size = target["bytes"] // KIB
        out.print(f"{size} KiB: {target['target']}: {target['measured']}, {verdict}")
