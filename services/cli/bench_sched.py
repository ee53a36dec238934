"""`xds bench sched` for people: a row per policy."""

from __future__ import annotations

from typing import Any

from rich.table import Table

from services.cli.console import out

COLUMNS = {
    "policy": "routing",
    "kv_stdev_tokens": "KV spread",
    "dispatch_wait_us": "wait us",
    "dispatch_wait_us_p99": "p99",
    "tpot_ms": "TPOT ms",
    "queue_ms_mean": "queue ms",
    "queue_ms_p99": "p99",
}


def show(report: dict[str, Any]) -> None:
    """One table."""
    table = Table(
        *COLUMNS.values(),
        title=f"{report['groups']} decode DP groups at load {report['load']}",
        caption="KV spread in tokens; wait of a group for the slowest one, per layer",
    )
    for row in report["decode"]:
        table.add_row(*(str(row[key]) for key in COLUMNS))
    out.print(table)
