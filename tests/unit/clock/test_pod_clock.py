from __future__ import annotations

import pytest

from libs import units
from libs.clock import pod_clock
from libs.clock.pod_clock import PodClock

EPOCH_NS = 1_000 * units.NS_PER_S


@pytest.fixture
def wall(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Wall time in the test's hands: `wall[0]` nanoseconds."""
    hands = [EPOCH_NS]
    monkeypatch.setattr(pod_clock, "wall_ns", lambda: hands[0])
    return hands


def test_at_pace_one_emulated_time_is_wall_time_since_the_epoch(wall: list[int]) -> None:
    wall[0] += units.s(2)
    assert PodClock(EPOCH_NS, 1.0).now_ns() == units.s(2)


def test_a_tenth_of_the_pace_runs_ten_times_faster(wall: list[int]) -> None:
    clock = PodClock(EPOCH_NS, 0.1)
    wall[0] += units.s(2)
    assert clock.now_ns() == units.s(20)
    assert clock.delay_s(units.s(30)) == pytest.approx(1.0)


def test_what_is_due_is_not_held_and_its_lag_is_known(wall: list[int]) -> None:
    clock = PodClock(EPOCH_NS, 1.0)
    wall[0] += units.s(2)
    assert clock.delay_s(units.s(1)) == 0.0
    assert clock.lag_ns(units.s(1)) == units.s(1)
    assert clock.lag_ns(units.s(3)) == 0


def test_before_the_epoch_it_is_zero(wall: list[int]) -> None:
    wall[0] -= units.s(5)
    assert PodClock(EPOCH_NS, 1.0).now_ns() == 0


def test_without_pace_nothing_is_held_and_now_is_the_latest_stamp_seen(wall: list[int]) -> None:
    clock = PodClock(EPOCH_NS, 0)
    clock.observe(units.s(9))
    clock.observe(units.s(4))
    wall[0] += units.s(1)
    assert clock.now_ns() == units.s(9)
    assert clock.delay_s(units.s(99)) == 0.0
    assert clock.lag_ns(0) == 0


def test_a_negative_pace_is_our_bug() -> None:
    with pytest.raises(AssertionError):
        PodClock(EPOCH_NS, -1.0)
