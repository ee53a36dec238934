"""`xds bench xccl`: XCCL's own machines on the emulated fabric, beside the published figures.

Nothing of a pod runs: the protocol cores, the fabric emulator and virtual time, in this process.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from rich.table import Table

from libs.errors import BadInput
from services.cli.console import err, out
from services.superpod import bench_collectives, bench_p2p

#: What can be measured; each run gives headline figures by name, and `grid` (and `paths`) by point.
PARTS: dict[str, Callable[[], dict[str, Any]]] = {
    "p2p": bench_p2p.run,
    "collectives": bench_collectives.run,
}

#: What the paper says of each figure that a run reports (P037, P041, P047).
PUBLISHED = {
    "p2p_us_1mib_2aiv": "below 20",
    "p2p_ratio_9mb": "more than 2.5",
    "p2p_us_max": "140, the axis of Fig. 5",
    "crossover_batch": "about 32",
    "a2e_us": "172",
    "e2a_us": "193",
    "trampoline_breakeven_us": "-",
    "trampoline_breakeven_e2a_us": "-",
    "same_under_sim_host": "-",
}
_LISTS = ("grid", "paths", "by_construction")


def chosen_parts(part: str | None) -> tuple[str, ...]:
    """The parts to run, all without a name; raises `BadInput` for one that is not in `PARTS`."""
    if part is None:
        return tuple(PARTS)
    if part not in PARTS:
        raise BadInput(f"part is one of {', '.join(PARTS)}, not {part!r}", field="part")
    return (part,)


def bench_xccl(parts: tuple[str, ...]) -> dict[str, Any]:
    """One report of all `parts`: their headlines side by side, their points in one list."""
    report: dict[str, Any] = {}
    lists: dict[str, list[Any]] = {}
    for part in parts:
        with err.status(f"measuring {part}, less than a minute"):
            measured = PARTS[part]()
        for name, value in measured.items():
            if name in _LISTS:
                lists[name] = [*lists.get(name, ()), *value]
            else:
                report[name] = value
    return report | {name: lists[name] for name in reversed(_LISTS) if name in lists}


def show(report: dict[str, Any]) -> None:
    """The headline figures; the points are for `--json`."""
    fitted = report["by_construction"]
    table = Table("figure", "measured", "published", "")
    for name, published in PUBLISHED.items():
        if name in report:
            note = "by construction" if name in fitted else ""
            value = "none found" if report[name] is None else str(report[name])
            table.add_row(name, value, published, note)
    out.print(table)
    points = len(report["grid"]) + len(report.get("paths", []))
    out.print(f"{points} points; --json prints them")
