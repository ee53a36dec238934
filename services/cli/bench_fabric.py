"""`xds bench fabric`: what the emulated links do, as a table for people."""

from __future__ import annotations

from typing import Any

from rich.table import Column, Table

from services.cli.console import out

#: Headline, its unit, and what is published or given for it.
_HEADLINES = (
    ("ub_us_512b", "us", "1.2, and under 1 more"),
    ("ub_gb_per_s", "GB/s", "196 per die"),
    ("ub_over_roce", "x", "several times"),
    ("uniform_spread_percent", "%", "near uniform"),
    ("incast_total_gb_per_s", "GB/s", "the link's 196"),
    ("incast_fairness", "", "1 is even"),
    ("fan_out_total_gb_per_s", "GB/s", "the link's 196"),
    ("in_flight_frames", "", "bound 64 (assumed)"),
    ("frames_per_s", "/s", "in real time, here"),
    ("frames_per_s_checked", "/s", "checker on"),
)


def show(report: dict[str, Any]) -> None:
    """The headlines, latency by plane and size, and queueing; the rest is for `--json`."""
    table = Table(Column("figure", no_wrap=True), "measured", "published, given", "")
    for name, unit, published in _HEADLINES:
        note = "by construction" if name in report["by_construction"] else ""
        table.add_row(name, f"{report[name]:,} {unit}".rstrip(), published, note)
    out.print(table)
    rows = [row for row in report["grid"] if row["what"] == "latency"]
    planes = sorted({row["plane"] for row in rows}, key=[row["plane"] for row in rows].index)
    table = Table("bytes", *(f"{plane} us" for plane in planes), *(f"{p} GB/s" for p in planes))
    for nbytes in sorted({row["bytes"] for row in rows}):
        own = [row for row in rows if row["bytes"] == nbytes]
        us, rates = ([str(row[key]) for row in own] for key in ("us", "train_gb_per_s"))
        table.add_row(f"{nbytes:,}", *us, *rates)
    out.print(table)
    table = Table("load of a link", "busy", "mean wait us", "by M/D/1")
    for row in report["grid"]:
        if row["what"] == "load":
            waits = str(row["wait_mean_us"]), str(row["wait_formula_us"])
            table.add_row(f"{row['offered']:.0%}", f"{row['busy']:.1%}", *waits)
    out.print(table)
    out.print(f"{len(report['grid'])} points; --json prints them")
