"""Repetitions at an even rhythm would all meet a fault whose period divides it."""

from __future__ import annotations

from itertools import accumulate

import pytest

from libs import units
from libs.patience import wait_ns
from services.decode_te.iteration import EXPERT_DEADLINE_NS, RESENDS_MAX


def test_a_wait_is_hardly_longer_than_what_was_asked_for() -> None:
    assert EXPERT_DEADLINE_NS < wait_ns(EXPERT_DEADLINE_NS, 0) < 1.01 * EXPERT_DEADLINE_NS


@pytest.mark.parametrize("period_ms", [1, 2, 5, 10, 20])
@pytest.mark.parametrize("asked_ns", [EXPERT_DEADLINE_NS, units.ms(250)])
def test_the_first_repetition_does_not_meet_what_met_the_first_try(
    period_ms: int, asked_ns: int
) -> None:
    period_ns = units.ms(period_ms)
    apart_ns = wait_ns(asked_ns, 0) % period_ns
    assert period_ns // 10 <= apart_ns <= period_ns - period_ns // 10


@pytest.mark.parametrize("period_ms", [1, 2, 5, 10, 20, 50, 100])
def test_no_phase_of_a_common_period_meets_half_of_the_repetitions(period_ms: int) -> None:
    period_ns = units.ms(period_ms)
    waits = [wait_ns(EXPERT_DEADLINE_NS, count) for count in range(RESENDS_MAX)]
    phases = [at_ns % period_ns for at_ns in accumulate(waits)]
    down_ns = period_ns // 10
    for begin_ns in phases:
        met = sum((phase - begin_ns) % period_ns < down_ns for phase in phases)
        assert met < RESENDS_MAX / 2
