from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from libs.scheduling.routing import DpLoad, DpPolicy, TeChoice, choose_dp, choose_te


def load(dp: str, requests: int = 0, reserved: int = 0, *, alive: bool = True) -> DpLoad:
    return DpLoad(
        dp, requests, batch_max=4, queue_max=2, kv_total_blocks=10, kv_reserved_blocks=reserved,
        alive=alive,
    )  # fmt: skip


LOADS = st.lists(
    st.builds(
        lambda requests, reserved, alive: (requests, reserved, alive),
        st.integers(0, 7),
        st.integers(0, 12),
        st.booleans(),
    ),
    max_size=6,
).map(lambda rows: [load(f"dp{i}", r, k, alive=a) for i, (r, k, a) in enumerate(rows)])


def fits(item: DpLoad, blocks: int) -> bool:
    enough = item.kv_reserved_blocks + blocks <= item.kv_total_blocks
    return item.alive and item.requests < item.batch_max and enough


@given(LOADS, st.integers(1, 10), st.integers(0, 20))
@settings(max_examples=200, deadline=None)
def test_a_full_group_is_never_chosen_while_another_fits(
    loads: list[DpLoad], blocks: int, turn: int
) -> None:
    chosen = choose_dp(loads, blocks, turn)
    fitting = [item for item in loads if fits(item, blocks)]
    if fitting:
        least = min(item.kv_reserved_blocks for item in fitting)
        assert chosen in [item.dp for item in fitting if item.kv_reserved_blocks == least]
    elif chosen is not None:
        named = next(item for item in loads if item.dp == chosen)
        assert named.alive
        assert named.requests < named.batch_max + named.queue_max
    else:
        bound = 4 + 2
        assert all(not item.alive or item.requests >= bound for item in loads)


@given(st.integers(1, 5), st.integers(1, 6))
def test_equal_groups_take_turns(groups: int, rounds: int) -> None:
    loads = [load(f"dp{i}") for i in range(groups)]
    chosen = Counter(choose_dp(loads, 1, turn) for turn in range(groups * rounds))
    assert chosen == {item.dp: rounds for item in loads}


def test_a_request_larger_than_any_pool_goes_nowhere() -> None:
    assert choose_dp([load("dp0")], blocks=11, turn=0) is None


def test_when_nothing_fits_the_shortest_queue_gets_the_request() -> None:
    loads = [load("dp0", requests=5, reserved=10), load("dp1", requests=4, reserved=10)]
    assert choose_dp(loads, 1, 0) == "dp1"


def test_when_every_queue_is_at_its_bound_nobody_is_chosen() -> None:
    assert choose_dp([load("dp0", requests=6), load("dp1", requests=6)], 1, 0) is None


@pytest.mark.parametrize(
    ("choices", "expected"),
    [
        ([TeChoice("p0", 1, 500), TeChoice("p1", 9, 100)], "p1"),
        ([TeChoice("p0", 3, 100), TeChoice("p1", 2, 100)], "p1"),
        ([TeChoice("p0", 0, 0, alive=False), TeChoice("p1", 9, 900)], "p1"),
        ([TeChoice("p0", 0, 0, alive=False)], None),
        ([], None),
    ],
    ids=["fewest tokens", "then fewest requests", "the dead are left out", "all dead", "none"],
)
def test_choice_of_a_te(choices: list[TeChoice], expected: str | None) -> None:
    assert choose_te(choices, turn=0) == expected


def test_equal_tes_take_turns() -> None:
    choices = [TeChoice("p0", 0, 0), TeChoice("p1", 0, 0)]
    assert [choose_te(choices, turn) for turn in range(4)] == ["p0", "p1", "p0", "p1"]


@given(LOADS, st.integers(1, 10), st.integers(0, 20), st.sampled_from(DpPolicy))
def test_every_policy_keeps_to_the_bounds_of_the_queues(
    loads: list[DpLoad], blocks: int, turn: int, policy: DpPolicy
) -> None:
    chosen = choose_dp(loads, blocks, turn, policy)
    possible = [
        item.dp for item in loads
        if item.alive and item.requests < 4 + 2 and blocks <= item.kv_total_blocks
    ]  # fmt: skip
    assert (chosen in possible) if possible else (chosen is None)


def test_the_baselines_do_what_their_names_say() -> None:
    loads = [load("dp0", 3, 0), load("dp1", 1, 9), load("dp2", 2, 1)]
    turns = [choose_dp(loads, 1, turn, DpPolicy.ROUND_ROBIN) for turn in range(4)]
    assert turns == ["dp0", "dp1", "dp2", "dp0"]
    assert choose_dp(loads, 1, 7, DpPolicy.SHORTEST_QUEUE) == "dp1"
    drawn = Counter(choose_dp(loads, 1, turn, DpPolicy.TWO_CHOICES) for turn in range(300))
    assert drawn["dp0"] == 0, "the busiest of three loses against any other"
    assert drawn["dp1"] > drawn["dp2"] > 50
    assert choose_dp(loads, 1, 7) == "dp0", "ours looks at KV"
