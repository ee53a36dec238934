"""A sequential resource on the emulated timeline: a die, a link, a stream.

Work is charged by its own stamp, not by the order in which it happens to arrive: senders of a real
pod run a few milliseconds apart on the wall clock, so a frame stamped earlier may arrive after a
frame stamped later. A plain `free_at_ns` would push the earlier one behind the later one and tie
the timelines of independent DP groups together. A `Timeline` therefore keeps its recent busy
intervals and puts each piece of work into the first gap at or after its stamp.

The history is bounded: the oldest of more than `HISTORY_MAX` intervals becomes a floor below which
nothing can be reserved any more. The state is plain data: a copy goes on like the original.
"""

from __future__ import annotations

from bisect import bisect_right, insort

#: Busy intervals remembered; older ones become the floor.
HISTORY_MAX = 512


class Timeline:
    """Reserves disjoint intervals; `busy_ns` is the total ever reserved."""

    def __init__(self) -> None:
        self._busy: list[tuple[int, int]] = []
        self._floor_ns = 0
        self.busy_ns = 0

    @property
    def free_at_ns(self) -> int:
        """When everything reserved so far is over."""
        return self._busy[-1][1] if self._busy else self._floor_ns

    def reserve(self, at_ns: int, duration_ns: int) -> int:
        """Book `duration_ns` in the first gap at or after `at_ns`; returns the start."""
        assert duration_ns >= 0, duration_ns
        busy = self._busy
        start = max(at_ns, self._floor_ns)
        if duration_ns == 0:
            return start
        self.busy_ns += duration_ns
        if busy and start <= busy[-1][1]:
            index = self._first_ending_after(start)
            while index < len(busy) and start + duration_ns > busy[index][0]:
                start = max(start, busy[index][1])
                index += 1
            self._insert(start, start + duration_ns)
        else:
            # Nearly always: later than everything known, and not touching it.
            busy.append((start, start + duration_ns))
            self._forget()
        return start

    def busy_between(self, begin_ns: int, end_ns: int) -> int:
        """How long it is reserved between two stamps; before `known_from_ns` nothing is known."""
        total = 0
        for index in range(self._first_ending_after(begin_ns), len(self._busy)):
            begin, end = self._busy[index]
            if begin >= end_ns:
                break
            total += min(end, end_ns) - max(begin, begin_ns)
        return total

    def busy_before(self, at_ns: int) -> int:
        """How much of all that was ever reserved lies before `at_ns`; grows with both.

        The difference of two looks is what came to lie before the later one since the earlier one:
        work that is booked late is in the next difference, and nothing is in two or in none.
        """
        return self.busy_ns - self.busy_between(at_ns, max(at_ns, self.free_at_ns))

    @property
    def known_from_ns(self) -> int:
        """The floor: reservations that ended before it are forgotten."""
        return self._floor_ns

    def _first_ending_after(self, at_ns: int) -> int:
        index = bisect_right(self._busy, (at_ns, at_ns))
        # The interval before may still be running at `at_ns`.
        return index - 1 if index and self._busy[index - 1][1] > at_ns else index

    def _insert(self, begin: int, end: int) -> None:
        insort(self._busy, (begin, end))
        index = bisect_right(self._busy, (begin, end)) - 1
        # Touching intervals are merged, so that steady load keeps the list short.
        while index + 1 < len(self._busy) and self._busy[index][1] >= self._busy[index + 1][0]:
            self._merge(index)
        while index and self._busy[index - 1][1] >= self._busy[index][0]:
            index -= 1
            self._merge(index)
        self._forget()

    def _forget(self) -> None:
        while len(self._busy) > HISTORY_MAX:
            self._floor_ns = max(self._floor_ns, self._busy.pop(0)[1])

    def _merge(self, index: int) -> None:
        left, right = self._busy[index], self._busy.pop(index + 1)
        self._busy[index] = (left[0], max(left[1], right[1]))

    def validate(self) -> None:
        """Intervals are disjoint, ordered and above the floor."""
        last = self._floor_ns
        for begin, end in self._busy:
            assert last <= begin < end, (last, begin, end)
            last = end
