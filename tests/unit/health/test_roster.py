from __future__ import annotations

import pytest

from libs.health.presence import describe_simple
from libs.health.roster import Roster

A, B = "expert_die.d0.e0", "expert_die.d0.e1"


@pytest.fixture
def roster() -> Roster:
    return Roster((A, B), silent_after=2)


def answer(roster: Roster, actor: str, sequence: int, incarnation: int = 1) -> None:
    roster.answered(actor, sequence, incarnation, describe_simple(actor))


def test_nobody_is_alive_before_the_first_answer(roster: Roster) -> None:
    roster.beat()
    assert roster.missing() == (A, B)
    assert roster.states() == ()


def test_a_member_is_alive_until_it_misses_too_many_beats(roster: Roster) -> None:
    answer(roster, A, roster.beat())
    roster.beat()
    roster.beat()
    assert roster.is_alive(A)
    roster.beat()
    assert not roster.is_alive(A)
    assert roster.states()[0].alive is False, "the last known state is kept, judged as silent"


def test_an_answer_brings_a_silent_member_back(roster: Roster) -> None:
    answer(roster, A, roster.beat())
    for _ in range(5):
        roster.beat()
    answer(roster, A, roster.sequence, incarnation=2)
    assert roster.is_alive(A)
    assert roster.states()[0].incarnation == 2


def test_an_answer_to_an_older_round_than_known_is_ignored(roster: Roster) -> None:
    first = roster.beat()
    answer(roster, A, roster.beat(), incarnation=2)
    answer(roster, A, first, incarnation=1)
    assert roster.states()[0].incarnation == 2


def test_an_answer_to_a_beat_that_was_never_sent_is_ignored(roster: Roster) -> None:
    roster.beat()
    answer(roster, A, 1_000)
    assert not roster.is_alive(A), (
        "else a liar, or a leftover of an earlier life, is alive for good"
    )


def test_strangers_are_ignored(roster: Roster) -> None:
    answer(roster, "expert_die.d0.e9", roster.beat())
    assert roster.states() == ()


def test_states_come_in_plan_order(roster: Roster) -> None:
    sequence = roster.beat()
    answer(roster, B, sequence)
    answer(roster, A, sequence)
    assert [state.actor for state in roster.states()] == [A, B]
