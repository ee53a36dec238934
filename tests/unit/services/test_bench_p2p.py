from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest

from libs.units import to_us
from libs.xccl import p2p_cost
from libs.xccl.paths import Path
from services.superpod.bench_p2p import AIVS, KB, SIZES, P2pCase, run_case, run_grid


def us(nbytes: int, aivs: int, **about: Any) -> float:
    return to_us(run_case(P2pCase(nbytes, aivs, **about)))


def test_the_axes_are_those_of_the_figure() -> None:
    assert [size // KB for size in SIZES] == [36, 72, 144, 288, 576, 1152, 2304, 4608, 9216]
    assert tuple(range(2, 49, 2)) == AIVS


def test_a_message_below_a_mebibyte_takes_less_than_20_us_with_two_cores() -> None:
    assert us(KB * KB, 2) == pytest.approx(19.6, abs=0.1)
    assert us(576 * KB, 2) < 20


def test_48_cores_move_9_mb_more_than_2_5_times_as_fast_as_2() -> None:
    slow, fast = us(9216 * KB, 2), us(9216 * KB, 48)
    assert slow / fast >= 2.5
    assert slow <= 140
    assert slow == pytest.approx(136.1, rel=0.02)
    assert fast == pytest.approx(53.1, rel=0.03)


def test_the_start_up_is_what_the_steps_add_up_to() -> None:
    nothing = us(0, 2)
    flights = 2 * 1.9
    assert nothing == pytest.approx(flights + to_us(p2p_cost.KERNEL_START_NS), abs=0.05)


def test_the_law_emerges_over_the_grid() -> None:
    rows = run_grid((36 * KB, 288 * KB, 1152 * KB), (2, 8, 48))
    for row in rows:
        assert row["us"] == pytest.approx(row["law_us"], rel=0.06), row


@pytest.mark.parametrize("nbytes", [36 * KB, 133_344, 1_100_000])
def test_no_core_too_many_makes_a_message_slower(nbytes: int) -> None:
    times = [run_case(P2pCase(nbytes, aivs)) for aivs in range(1, 49)]
    assert all(more <= few + 1 for few, more in pairwise(times)), times  # rounded up to 1 ns
    assert times[5] < times[0] / 1.1


def test_zero_copy_and_polling_save_what_they_should() -> None:
    size = 1152 * KB
    copied, direct = us(size, 8), us(size, 8, zero_copy=True)
    assert direct < copied
    assert us(36 * KB, 2, asynchronous=True) > us(36 * KB, 2) + to_us(p2p_cost.WAKE_NS)


def test_a_dma_costs_more_to_start_and_needs_no_cores_to_fill_the_link() -> None:
    small, large = 36 * KB, 9216 * KB
    assert us(small, 2, path=Path.DMA, zero_copy=True) > 2 * us(small, 2)
    assert us(large, 2, path=Path.DMA, zero_copy=True) < 0.5 * us(large, 2)


def test_one_case_gives_one_time() -> None:
    assert run_case(P2pCase(288 * KB, 6)) == run_case(P2pCase(288 * KB, 6))
