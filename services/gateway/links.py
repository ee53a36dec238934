"""What the links of the pod carry, put together from the reports of all shards of the fabric.

Of an egress link several shards tell a part each, so a link's load is the sum over reporters: of
what each carried, divided by the length of its own window. A reporter that falls silent is
forgotten after a while, so that nothing looks busy for ever; what it has carried stays counted.
"""

from __future__ import annotations

from dataclasses import dataclass

from libs import units
from libs.actor import CancelTimer, Effect, Record, SetTimer
from libs.fabric.planes import Plane
from libs.wire.fabric import LinkReport, LinkRow, PlaneTotal

TIMER = "links"
#: Five times the period of the reports.
SILENT_NS = units.s(5)
#: A shard for every die of a SuperPod and of a row of 910B servers beside it.
REPORTERS_MAX = 2048
_DIRECTIONS = ("egress", "ingress")


@dataclass(frozen=True, slots=True)
class LinkLoad:
    """One link now; rates are per second of the emulated timeline."""

    plane: str
    link: int
    direction: str
    utilization: float
    bytes_per_s: float
    frames_per_s: float


@dataclass(slots=True)
class _Reporter:
    """One shard in one life: its last report while it is fresh, and what it has carried in all."""

    incarnation: int
    report: LinkReport | None
    totals: dict[str, PlaneTotal]


class LinkBook:
    """The last report of every shard, and the totals of all planes since this gateway started."""

    def __init__(self) -> None:
        self._reporters: dict[str, _Reporter] = {}
        self._carried: dict[str, PlaneTotal] = {}

    def take(self, sender: str, incarnation: int, report: LinkReport) -> list[Effect]:
        """Take a report; it counts until the next one of the same shard, or until it is stale."""
        reporter = self._reporters.get(sender)
        if not _is_sound(report) or (reporter is None and len(self._reporters) >= REPORTERS_MAX):
            return [Record("link_report_refused", {"reporter": sender})]
        if reporter is None or reporter.incarnation < incarnation:
            reporter = self._reporters[sender] = _Reporter(incarnation, None, {})
        elif reporter.incarnation > incarnation:
            return []  # of a life that is over
        reporter.report = report if report.links else None
        self._count(reporter, report)
        timer = f"{TIMER}:{sender}"
        return [SetTimer(timer, SILENT_NS) if report.links else CancelTimer(timer)]

    def _count(self, reporter: _Reporter, report: LinkReport) -> None:
        """Totals of a life only grow, so that a report which was lost is in the next one."""
        for total in report.totals:
            told = reporter.totals.get(total.plane, PlaneTotal(total.plane, 0, 0))
            if total.frames < told.frames or total.nbytes < told.nbytes:
                continue  # overtaken by a later report
            reporter.totals[total.plane] = total
            before = self._carried.get(total.plane, PlaneTotal(total.plane, 0, 0))
            self._carried[total.plane] = PlaneTotal(
                total.plane,
                before.frames + total.frames - told.frames,
                before.nbytes + total.nbytes - told.nbytes,
            )

    def silent(self, sender: str) -> None:
        """Nothing was heard of `sender` for a while: what it said is no longer so."""
        reporter = self._reporters.get(sender)
        if reporter is not None:
            reporter.report = None

    def loads(self) -> list[LinkLoad]:
        """Every link that carries anything, the busiest first."""
        sums: dict[tuple[str, int, str], list[float]] = {}
        for _, report in self._fresh():
            window_s = units.to_s(report.end_ns - report.begin_ns)
            for row in report.links:
                total = sums.setdefault((row.plane, row.link, row.direction), [0.0, 0.0, 0.0])
                carried = (units.to_s(row.busy_ns), row.nbytes, row.frames)
                for index, amount in enumerate(carried):
                    total[index] += amount / window_s
        loads = [
            # Work booked late for a window that was told already counts in the next.
            LinkLoad(plane, link, direction, min(1.0, busy), nbytes, frames)
            for (plane, link, direction), (busy, nbytes, frames) in sums.items()
        ]
        loads.sort(key=lambda x: (-x.utilization, -x.bytes_per_s, x.plane, x.direction, x.link))
        return loads

    def left_out(self) -> int:
        """Links that carry something but did not fit into their reports."""
        return sum(report.left_out for _, report in self._fresh())

    def carried(self) -> list[PlaneTotal]:
        """What every plane has carried, as far as shards have told."""
        return [self._carried[plane] for plane in sorted(self._carried)]

    def _fresh(self) -> list[tuple[str, LinkReport]]:
        found = ((name, reporter.report) for name, reporter in self._reporters.items())
        return [(name, report) for name, report in found if report is not None]


def _is_sound(report: LinkReport) -> bool:
    """Whether the report can be counted: of a window that has a length, of places there are."""
    if report.end_ns < report.begin_ns or report.left_out < 0:
        return False
    if report.links and report.end_ns == report.begin_ns:
        return False
    rows = all(
        _is_plane(row.plane) and row.direction in _DIRECTIONS and _is_carried(row)
        for row in report.links
    )
    return rows and all(
        _is_plane(total.plane) and min(total.frames, total.nbytes) >= 0 for total in report.totals
    )


def _is_plane(name: str) -> bool:
    return name in Plane._value2member_map_


def _is_carried(row: LinkRow) -> bool:
    return min(row.link, row.frames, row.nbytes, row.busy_ns) >= 0
