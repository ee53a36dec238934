"""The figures of XCCL: measured lines, with what the paper says of them marked on the same axes."""

from __future__ import annotations

from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Any

from services.cli import plots
from services.cli.plots import BLUE, GREEN, GREY, ORANGE, PUBLISHED, PURPLE

if TYPE_CHECKING:
    from matplotlib.axes import Axes

Rows = list[dict[str, Any]]
_MIB = 1 << 20
#: P037, P041, P047.
LATENCY_MAX_US, RATIO_MIN, AXIS_MAX_US = 20, 2.5, 140
CROSSOVER_BATCH = 32
EXCHANGE_US = {"a2e": 172, "e2a": 193}
_FOOT = "xds bench xccl: the protocol's own machines over the emulated links, in virtual time"


def draw_xccl(report: dict[str, Any], folder: Path) -> list[str]:
    """The figures whose rows the report has; returns the files written."""
    return plots.draw_all(report, folder, (p2p, all_to_all, trampolines))


def _rows(report: dict[str, Any], **wanted: Any) -> Rows:
    return [row for row in report["grid"] if all(row.get(key) == wanted[key] for key in wanted)]


def p2p(report: dict[str, Any], folder: Path) -> list[str]:
    """Fig. 5: latency over message size, a line per number of AIV cores."""
    rows = _rows(report, figure="5")
    if not rows:
        return []
    sizes = sorted({row["bytes"] for row in rows})
    counts = sorted({row["aivs"] for row in rows})
    us = {(row["bytes"], row["aivs"]): row["us"] for row in rows}
    lines = [([us[size, count] for size in sizes], count) for count in counts]
    with plots.figure(1, 8.4, 5.2) as (drawn, (axis,)):
        colors = iter((ORANGE, PURPLE, BLUE, GREEN, GREY))
        for line, same in groupby(lines, key=lambda item: item[0]):
            each = [count for _, count in same]
            label = (
                f"{each[0]} AIV cores"
                if len(each) == 1
                else f"{each[0]} to {each[-1]} AIV cores, alike"
            )
            axis.plot(sizes, line, "o-", ms=4, label=label, color=next(colors, GREY))
        laws = [(row["bytes"], row["law_us"]) for row in rows if row["aivs"] in (2, 4, 48)]
        axis.plot(*zip(*laws, strict=True), "_", ms=12, color=GREY, label="law fitted to Fig. 5")
        _published_p2p(axis, report, us[sizes[-1], counts[0]], us[sizes[-1], counts[-1]])
        plots.sizes_axis(axis, sizes)
        axis.set(ylim=(0, AXIS_MAX_US + 6), xlabel="message size", ylabel="latency (µs)")
        axis.set_title("XCCL send/receive between dies of different servers (Fig. 5)")
        axis.legend(loc="upper left")
        plots.footnote(drawn, _FOOT)
        return plots.save(drawn, folder, "fig5_p2p")


def _published_p2p(axis: Axes, report: dict[str, Any], slow: float, fast: float) -> None:
    """What P037 says in words, at its place."""
    small = report["p2p_us_1mib_2aiv"]
    axis.hlines(LATENCY_MAX_US, 36 << 10, _MIB, colors=PUBLISHED, linestyles="--", lw=1.5)
    text = f"published: below {LATENCY_MAX_US} µs up to 1 MiB with 2 cores"
    plots.note(axis, text, (36 << 10, LATENCY_MAX_US), PUBLISHED, xytext=(0, 5))
    axis.plot([_MIB], [small], "D", color=ORANGE, ms=7, mec="white")
    text = f"1 MiB: {small} µs"
    plots.note(axis, text, (_MIB, small), ORANGE, xytext=(0, 21), ha="right")
    at = (9216 << 10) * 1.15
    axis.set_xlim(30 << 10, at * 2.4)
    axis.annotate("", (at, slow), (at, fast), arrowprops={"arrowstyle": "<->", "color": GREY})
    middle = at, (slow + fast) / 2
    plots.note(axis, f"{report['p2p_ratio_9mb']:.2f}x faster", middle, GREY, xytext=(6, 4))
    text = f"published:\nmore than {RATIO_MIN}x"
    plots.note(axis, text, middle, PUBLISHED, xytext=(6, -2), va="top")


def all_to_all(report: dict[str, Any], folder: Path) -> list[str]:
    """Fig. 6: dispatch and combine over the batch of a die."""
    if not _rows(report, figure="6"):
        return []
    with plots.figure(1, 8.4, 5.0) as (drawn, (axis,)):
        for what, color, marker in (("dispatch", BLUE, "o"), ("combine", ORANGE, "s")):
            even = _rows(report, figure="6", what=what, routing="even")
            batches, us = [row["batch"] for row in even], [row["us"] for row in even]
            axis.plot(batches, us, f"{marker}-", ms=5, color=color, label=f"{what}, even routing")
            other = _rows(report, figure="6", what=what, routing="uniform")
            points = [row["batch"] for row in other], [row["us"] for row in other]
            label = f"{what}, random experts"
            axis.plot(*points, marker, ms=8, mfc="white", mec=color, color=color, label=label)
            plots.note(axis, f"{us[-1]:.1f} µs", (batches[-1], us[-1]), color)
        axis.axvline(CROSSOVER_BATCH, color=PUBLISHED, ls="--", lw=1.5)
        text = f"published: they cross at about {CROSSOVER_BATCH}"
        plots.note(axis, text, (CROSSOVER_BATCH, 128), PUBLISHED)
        text = f"measured: {report['crossover_batch']}"
        plots.note(axis, text, (CROSSOVER_BATCH, 120), GREY)
        axis.set_xticks(batches)
        axis.set(xlim=(0, 144), ylim=(0, AXIS_MAX_US), ylabel="latency (µs)")
        axis.set_xlabel("tokens per die")
        axis.set_title("Dispatch and combine of DeepSeek-R1 over 128 dies (Fig. 6)")
        axis.legend(loc="lower right")
        plots.footnote(drawn, _FOOT)
        return plots.save(drawn, folder, "fig6_dispatch_combine")


def trampolines(report: dict[str, Any], folder: Path) -> list[str]:
    """A2E and E2A with and without trampolines over what announcing to one peer costs."""
    if not _rows(report, what="trampoline_ablation"):
        return []
    names = {"a2e": "A2E, attention to experts", "e2a": "E2A, experts to attention"}
    breakeven = {
        "a2e": report["trampoline_breakeven_us"],
        "e2a": report["trampoline_breakeven_e2a_us"],
    }
    with plots.figure(2, 11.0, 4.9) as (drawn, axes):
        for axis, direction in zip(axes, ("a2e", "e2a"), strict=True):
            rows = _rows(report, what="trampoline_ablation", direction=direction)
            costs = [row["metadata_ns"] / 1000 for row in rows]
            for key, label, color in (
                ("straight_us", "every peer directly", ORANGE),
                ("trampoline_us", "through trampolines", BLUE),
            ):
                axis.plot(costs, [row[key] for row in rows], "o-", ms=5, color=color, label=label)
            us = EXCHANGE_US[direction]
            axis.axhline(us, color=PUBLISHED, ls="--", lw=1.5, label=f"published: {us} µs")
            _mark_breakeven(axis, breakeven[direction], costs[-1])
            axis.set(ylim=(0, 330), xlabel="metadata cost per peer (µs)", ylabel="latency (µs)")
            axis.set_title(names[direction])
            axis.legend(loc="lower right")
        plots.footnote(
            drawn, f"{_FOOT}; 160 attention dies, 288 expert dies, 96 tokens each, the way there"
            " and the way back"
        )  # fmt: skip
        return plots.save(drawn, folder, "a2e_e2a_trampolines")


def _mark_breakeven(axis: Axes, at: float | None, last: float) -> None:
    if at is None:
        text = f"without trampolines is faster up to {last} µs per peer"
        axis.text(0.02, 0.97, text, color=GREY, transform=axis.transAxes, va="top", fontsize=9)
        return
    axis.axvline(at, color=GREEN, ls=":", lw=1.8)
    plots.note(axis, f"trampolines pay off\nfrom {at} µs per peer", (at, 290), GREEN,
               xytext=(-8, 0), ha="right")  # fmt: skip
