"""`xds status`: the control plane's view and the busiest links of the fabric, as tables."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from rich.console import RenderableType
from rich.table import Table

from services.pod.state import PodState


def status_tables(state: PodState, report: dict[str, Any]) -> Iterator[RenderableType]:
    """One line about the pod, then a row per actor, then the busiest links if any is busy."""
    ready = "[green]ready[/]" if report["ready"] else "[red]not ready[/]"
    held = report["kv_blocks_held"]
    yield (
        f"{state.base_url}  {ready}  topology {state.topology}  pace {state.pace}  "
        f"{report['open_requests']} open requests  {held} KV blocks held"
    )
    table = Table(box=None, padding=(0, 1, 0, 0))
    table.add_column("actor", no_wrap=True, min_width=18)  # in a narrow window, too
    for heading in ("pid", "alive", "phase", "iteration", "running", "waiting", "KV"):
        table.add_column(heading, justify="left" if heading == "phase" else "right")
    for member in report["members"]:
        kv = member.get("kv")
        blocks = "" if kv is None else f"{kv['total'] - kv['free']}/{kv['total']}"
        table.add_row(
            member["actor"],
            str(state.actors.get(member["actor"], "")),
            "yes" if member["alive"] else "[red]no[/]",
            member["phase"],
            str(member["iteration"] or ""),
            str(member["running"] or ""),
            str(member["waiting"] or ""),
            blocks,
        )
    yield table
    if report["missing"]:
        yield f"[red]missing[/]: {', '.join(report['missing'])}"
    if report["links"]["busiest"]:
        yield _links_table(report["links"])


def _links_table(links: dict[str, Any]) -> Table:
    """A row per link, in emulated time; what is not shown is counted below."""
    others = links["others"]
    caption = f"and {others} more" if others else None
    table = Table(box=None, padding=(0, 2, 0, 0), caption=caption, caption_justify="left")
    for heading in ("link", "direction", "busy", "GB/s", "frames/s"):
        table.add_column(heading, justify="left" if heading in ("link", "direction") else "right")
    for link in links["busiest"]:
        table.add_row(
            f"{link['plane']} {link['link']}",
            link["direction"],
            f"{100 * link['utilization']:.3f} %",
            f"{link['bytes_per_s'] / 1e9:.3f}",
            f"{link['frames_per_s']:,.0f}",
        )
    return table
