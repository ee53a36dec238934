from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from libs.fabric import timeline as module
from libs.fabric.timeline import Timeline


def test_work_that_does_not_overlap_starts_at_its_stamp() -> None:
    line = Timeline()
    assert line.reserve(100, 10) == 100
    assert line.reserve(200, 10) == 200


def test_work_queues_behind_what_is_busy_at_its_stamp() -> None:
    line = Timeline()
    line.reserve(100, 50)
    assert line.reserve(120, 10) == 150


def test_earlier_work_arriving_late_is_not_pushed_behind_later_work() -> None:
    line = Timeline()
    line.reserve(1_000, 50)
    assert line.reserve(100, 50) == 100
    assert line.free_at_ns == 1_050


def test_a_gap_that_is_too_short_is_passed_over() -> None:
    line = Timeline()
    line.reserve(0, 100)
    line.reserve(150, 100)
    assert line.reserve(90, 60) == 250
    assert line.reserve(90, 50) == 100


def test_work_of_no_duration_occupies_nothing() -> None:
    line = Timeline()
    line.reserve(0, 100)
    assert line.reserve(40, 0) == 40
    assert line.busy_ns == 100


def test_busy_time_before_a_stamp_counts_what_is_booked_late_once() -> None:
    line = Timeline()
    line.reserve(100, 50)
    line.reserve(180, 40)
    first = line.busy_before(200)
    assert first == 50 + 20
    line.reserve(0, 30)
    assert line.busy_before(200) - first == 30
    assert line.busy_before(1_000) == line.busy_ns == 120


def test_the_history_is_bounded_and_what_it_forgot_is_a_floor(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(module, "HISTORY_MAX", 3)
    line = Timeline()
    for index in range(5):
        line.reserve(100 * index, 10)
    line.validate()
    assert line.reserve(0, 10) == 110, "before the floor nothing can be booked any more"


class TimelineMachine(RuleBasedStateMachine):
    """Against a brute-force model: one cell per nanosecond, first run of free cells wins."""

    def __init__(self) -> None:
        super().__init__()
        self.line = Timeline()
        self.busy = [False] * 2_000

    @rule(at_ns=st.integers(0, 120), duration_ns=st.integers(1, 25))
    def reserve(self, at_ns: int, duration_ns: int) -> None:
        start = at_ns
        while any(self.busy[start : start + duration_ns]):
            start += 1
        assert self.line.reserve(at_ns, duration_ns) == start
        self.busy[start : start + duration_ns] = [True] * duration_ns

    @invariant()
    def totals_agree(self) -> None:
        self.line.validate()
        assert self.line.busy_ns == sum(self.busy)
        last = max((index + 1 for index, taken in enumerate(self.busy) if taken), default=0)
        assert self.line.free_at_ns == last


TestTimelineModel = TimelineMachine.TestCase
TestTimelineModel.settings = settings(max_examples=40, stateful_step_count=30, deadline=None)


@given(st.lists(st.tuples(st.integers(0, 3_000), st.integers(1, 60)), max_size=60))
@settings(max_examples=60, deadline=None)
def test_reservations_are_disjoint_and_never_before_their_stamp_even_with_a_short_history(
    work: list[tuple[int, int]],
) -> None:
    line = Timeline()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "HISTORY_MAX", 4)
        booked = [(at, line.reserve(at, duration), duration) for at, duration in work]
    assert all(start >= at for at, start, _ in booked)
    spans = sorted((start, start + duration) for _, start, duration in booked)
    assert all(end <= begin for (_, end), (begin, _) in pairwise(spans))
