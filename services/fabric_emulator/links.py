"""What one shard tells of its links: once a second, what moved since the last time.

    window:  |<- last look          now ->|      both on the emulated timeline
    link:      ===      ====  ==         ===     busy time counts up to `now`, the rest next time

A link counts by `Timeline.busy_before`, so that a frame booked ahead of now, or late for a window
that was already told, is counted in one window and in no other. The egress links of UB and RoCE are
the senders' to reserve; a shard tells the part of them that came to its own dies.

A shard whose links have come to rest says so once and is silent then.
"""

from __future__ import annotations

from typing import NamedTuple

from libs import units
from libs.fabric.link import Link, Links
from libs.fabric.planes import Plane
from libs.wire.fabric import LinkReport, LinkRow, PlaneTotal

#: How often a shard looks at its links.
PERIOD_NS = units.s(1)
#: Rows of one report: a control message of at most 64 KiB holds them whatever their numbers are.
ROWS_MAX = 256


class _Carried(NamedTuple):
    """What a link had carried in all when it was last looked at."""

    frames: int = 0
    nbytes: int = 0
    busy_ns: int = 0


_NOTHING = _Carried()


class LinkLog:
    """Makes the reports of one shard."""

    def __init__(self, egress: Links, ingress: Links) -> None:
        self._egress = egress
        self._ingress = ingress
        self._looked_at_ns = 0
        self._told: dict[tuple[str, Plane, int], _Carried] = {}
        self._at_rest = True

    def begin(self, now_ns: int) -> None:
        """The first window begins now."""
        self._looked_at_ns = now_ns

    def report(self, now_ns: int) -> LinkReport | None:
        """What moved since the last look; None when nothing did and everybody knows."""
        begin_ns = self._looked_at_ns
        assert now_ns >= begin_ns, (now_ns, begin_ns)
        rows = [
            row for links in (self._egress, self._ingress) for row in self._moved(links, now_ns)
        ]
        if rows and now_ns == begin_ns:
            return None  # time stands still in an unpaced pod: the window stays open
        self._looked_at_ns = now_ns
        was_at_rest, self._at_rest = self._at_rest, not rows
        if was_at_rest and self._at_rest:
            return None
        for row in rows:
            self._tell(row)
        rows.sort(key=lambda row: (-row.busy_ns, -row.nbytes, row.plane, row.direction, row.link))
        left_out = max(0, len(rows) - ROWS_MAX)
        return LinkReport(begin_ns, now_ns, tuple(rows[:ROWS_MAX]), left_out, self._totals())

    def _moved(self, links: Links, now_ns: int) -> list[LinkRow]:
        """A row for every link that carried anything."""
        direction = links.direction
        rows = []
        for (plane, number), link in links:
            told = self._told.get((direction, plane, number), _NOTHING)
            busy_ns = link.busy_before(now_ns) - told.busy_ns
            assert busy_ns >= 0, (direction, plane, number, told)
            assert link.frames >= told.frames, (direction, plane, number, told)
            if link.frames != told.frames or busy_ns:
                frames, nbytes = link.frames - told.frames, link.nbytes - told.nbytes
                rows.append(LinkRow(str(plane), number, direction, frames, nbytes, busy_ns))
        return rows

    def _tell(self, row: LinkRow) -> None:
        key = row.direction, Plane(row.plane), row.link
        told = self._told.get(key, _NOTHING)
        self._told[key] = _Carried(
            told.frames + row.frames, told.nbytes + row.nbytes, told.busy_ns + row.busy_ns
        )

    def _totals(self) -> tuple[PlaneTotal, ...]:
        """Every frame once: where it arrived."""
        by_plane: dict[Plane, list[Link]] = {}
        for (plane, _), link in self._ingress:
            by_plane.setdefault(plane, []).append(link)
        return tuple(
            PlaneTotal(str(plane), sum(x.frames for x in links), sum(x.nbytes for x in links))
            for plane, links in sorted(by_plane.items())
        )
