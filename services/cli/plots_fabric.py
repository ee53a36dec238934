"""The figures of the fabric: what a frame costs, who gets how much, how long frames queue."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from services.cli import plots
from services.cli.plots import BLUE, GREEN, GREY, ORANGE, PUBLISHED

_FOOT = "xds bench fabric: frames through the emulator's core, checked, in virtual time"
_COLORS = {"ub": BLUE, "roce": ORANGE, "vpc": GREEN}
_NAMES = {"ub": "UB", "roce": "RoCE", "vpc": "VPC"}
_MARKS = {"ub": "o", "roce": "s", "vpc": "^"}


def draw_fabric(report: dict[str, Any], folder: Path) -> list[str]:
    """Every figure; returns the files written."""
    return plots.draw_all(report, folder, (latency, sharing))


def _rows(report: dict[str, Any], what: str) -> list[dict[str, Any]]:
    return [row for row in report["grid"] if row["what"] == what]


def latency(report: dict[str, Any], folder: Path) -> list[str]:
    """Latency of a frame and what a train of frames carries, by plane and size."""
    rows = _rows(report, "latency")
    sizes = sorted({row["bytes"] for row in rows})
    with plots.figure(2, 11.0, 4.9) as (drawn, (left, right)):
        for plane, color in _COLORS.items():
            own = [row for row in rows if row["plane"] == plane]
            link, idle = own[0]["link_gb_per_s"], own[0]["link_latency_us"]
            about: dict[str, Any] = {"color": color, "marker": _MARKS[plane], "ms": 5}
            label = f"{_NAMES[plane]} ({idle} µs)"
            left.plot(sizes, [row["us"] for row in own], label=label, **about)
            label = f"{_NAMES[plane]} ({link:g} GB/s)"
            right.plot(sizes, [row["train_gb_per_s"] for row in own], label=label, **about)
            right.axhline(link, color=PUBLISHED, ls="--", lw=1.2)
        right.plot([], [], "--", color=PUBLISHED, lw=1.2, label="published bandwidth")
        for axis in (left, right):
            plots.sizes_axis(axis, sizes)
            axis.tick_params(axis="x", labelsize=8.5)
            axis.set_xlabel("frame size")
        plots.plain_log(left, (2, 5, 10, 20, 50, 100, 200, 400))
        plots.plain_log(right, (0.5, 1, 2, 5, 10, 25, 50, 100, 196))
        left.set_title("One frame over idle links")
        left.set_ylabel("latency (µs)")
        left.legend(loc="upper left", title="plane (latency of the link)")
        right.set_title("Frames one after the other")
        right.set_ylabel("throughput (GB/s)")
        right.legend(loc="lower right", title="plane (bandwidth of the link)")
        plots.footnote(drawn, f"{_FOOT}; two dies of different servers")
        return plots.save(drawn, folder, "fabric_latency")


def sharing(report: dict[str, Any], folder: Path) -> list[str]:
    """The shares of an incast and of a fan-out, and queueing under random load."""
    with plots.figure(2, 11.0, 4.9) as (drawn, (left, right)):
        for what, label, color, marker in (
            ("incast", "incast: one sender's share", BLUE, "o"),
            ("fan_out", "fan-out: one target's share", ORANGE, "x"),
        ):
            rows = _rows(report, what)
            dies = [row["dies"] for row in rows]
            least = [row["share_min_gb_per_s"] for row in rows]
            most = [row["share_max_gb_per_s"] for row in rows]
            left.fill_between(dies, least, most, color=color, alpha=0.25, lw=0)
            left.plot(dies, least, marker, ms=8, color=color, label=label)
        total = [row["total_gb_per_s"] for row in _rows(report, "incast")]
        left.plot(dies, total, "s-", ms=5, color=GREEN, label="all together")
        link = _rows(report, "latency")[0]["link_gb_per_s"]
        even = [link / number for number in dies]
        left.plot(dies, even, "--", lw=1.2, color=GREY, label=f"{link:g} GB/s divided evenly")
        left.set_xscale("log", base=2)
        left.set_yscale("log", base=2)
        left.set_xticks(dies, [str(number) for number in dies])
        left.set_yticks(even, [f"{share:g}" for share in even])
        left.set(xlabel="dies that share one link", ylabel="throughput (GB/s)")
        left.set_title("Each gets its share")
        left.legend(loc="lower left")
        load = _rows(report, "load")
        offered = [100 * row["offered"] for row in load]
        right.plot(offered, [row["wait_formula_us"] for row in load], "--", color=GREY,
                   label="mean by the M/D/1 formula of queueing")  # fmt: skip
        right.plot(offered, [row["wait_mean_us"] for row in load], "o", ms=8, color=BLUE,
                   label="mean, measured")  # fmt: skip
        right.plot(offered, [row["wait_p99_us"] for row in load], "^-", ms=6, color=ORANGE,
                   label="99 of 100 wait less, measured")  # fmt: skip
        right.set(xlabel="load of the target's link (%)", ylabel="wait in queues (µs)")
        right.set(xlim=(0, 100), ylim=(0, None))
        right.set_title("Random frames of 64 KB to one die")
        right.legend(loc="upper left")
        plots.footnote(drawn, _FOOT)
        return plots.save(drawn, folder, "fabric_sharing")
