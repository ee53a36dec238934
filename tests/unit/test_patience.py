"""Repetitions at an even rhythm would all meet a fault whose period divides it."""

from __future__ import annotations

from itertools import accumulate

import pytest

from libs import units
from services.decode_te.iteration import EXPERT_DEADLINE_NS, RESENDS_MAX
from libs.patience import wait_ns


def test_the_first_wait_is_what_was_asked_for() -> None:
    assert wait_ns(EXPERT_DEADLINE_NS, 0) == EXPERT_DEADLINE_NS


@pytest.mark.parametrize("period_ms", [1, 2, 5, 10, 20, 50, 100])
def test_no_phase_of_a_common_period_meets_half_of_the_repetitions(period_ms: int) -> None:
    period_ns = units.ms(period_ms)
    waits = [wait_ns(EXPERT_DEADLINE_NS, count) for count in range(RESENDS_MAX)]
    phases = [at_ns % period_ns for at_ns in accumulate(waits)]
    down_ns = period_ns // 10
    for begin_ns in phases:
        met = sum((phase - begin_ns) % period_ns < down_ns for phase in phases)
        assert met < RESENDS_MAX / 2
