from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from libs.errors import Backpressure
from libs.kvcache.arena import Arena


def test_ranges_are_taken_first_fit_and_come_back() -> None:
    arena = Arena(100)
    assert [arena.take(name, 30) for name in "abc"] == [0, 30, 60]
    arena.give_back("b")
    assert arena.take("d", 20) == 30
    assert arena.range_of("d") == (30, 20)
    assert arena.take("e", 10) in (50, 90)
    arena.validate()


def test_a_range_that_fits_no_gap_is_back_pressure_although_enough_is_free() -> None:
    arena = Arena(100)
    for name in "abc":
        arena.take(name, 30)
    arena.give_back("a")
    assert not arena.can_take(40)
    with pytest.raises(Backpressure, match="no gap of 40 bytes"):
        arena.take("d", 40)
    arena.give_back("b")
    assert arena.take("d", 40) == 0


def test_giving_back_nothing_is_fine() -> None:
    arena = Arena(10)
    arena.give_back("nobody")
    assert arena.range_of("nobody") is None
    assert arena.can_take(10)


@given(st.lists(st.tuples(st.integers(0, 5), st.integers(1, 60)), max_size=60))
def test_no_byte_ever_has_two_owners(steps: list[tuple[int, int]]) -> None:
    arena = Arena(128)
    for owner, nbytes in steps:
        name = str(owner)
        if arena.range_of(name) is not None:
            arena.give_back(name)
        elif arena.can_take(nbytes):
            arena.take(name, nbytes)
        else:
            with pytest.raises(Backpressure):
                arena.take(name, nbytes)
        arena.validate()
