from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from libs.errors import CapacityExceeded, LocalProtocolError, RemoteProtocolError
from libs.xccl.agreement import (
    Ask,
    Decided,
    Late,
    Prepare,
    Tell,
    Verdict,
    World,
)
from libs.xccl.collective import Collective
from libs.xccl.collective_types import (
    FIELD_BYTES,
    Completed,
    Heard,
    Limits,
    MetadataField,
    Missing,
    Pull,
    Pulled,
    Refused,
    State,
    Wait,
    WaitOver,
    Write,
    Written,
)
from tests.support.collective_net import LIMITS, Net, Plan, rows_for

WORLD = World(1, (0, 1, 2))


def check(net: Net) -> None:
    """No two worlds of one version, and survivors hold what their world sends, event by event."""
    by_version: dict[int, World] = {}
    for worlds in net.worlds.values():
        for version, world in worlds.items():
            assert by_version.setdefault(version, world) == world, "two different worlds"
    survivors = net.survivors
    latest = {max(net.worlds[rank]) for rank in survivors}
    assert len(latest) <= 1, "survivors live in different worlds"
    for rank in survivors:
        assert sorted(net.results[rank]) == list(range(net.events)), f"rank {rank} did not finish"
        assert rank in net.nodes[rank].world.ranks
    for event in range(net.events):
        versions = {net.results[rank][event][0] for rank in survivors}
        assert len(versions) <= 1, f"event {event} was completed in different worlds"
        for rank in survivors:
            version, arrived = net.results[rank][event]
            world = by_version[version]
            expected = {source: rows_for(source, rank, event, world) for source in world.ranks}
            expected = {source: rows for source, rows in expected.items() if len(rows[0])}
            assert list(arrived) == sorted(expected)
            for source, rows in expected.items():
                assert arrived[source][0].tolist() == rows[0].tolist()


# ---------------------------------------------------------------- the plain protocol


def test_a_field_is_32_bytes_and_survives_them() -> None:
    field = MetadataField(event_id=2**40, world=7, offset=2**33, count=12)
    assert len(field.pack()) == FIELD_BYTES == 32
    assert MetadataField.unpack(field.pack()) == field


@given(st.integers(0, 31), st.integers(1, 255))
def test_a_torn_field_is_refused(place: int, flip: int) -> None:
    data = bytearray(MetadataField(5, 1, 64, 3).pack())
    data[place] ^= flip
    with pytest.raises(RemoteProtocolError, match="checksum"):
        MetadataField.unpack(bytes(data))
    with pytest.raises(RemoteProtocolError, match="expected 32"):
        MetadataField.unpack(bytes(data[:-1]))


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 6), st.integers(1, 5), st.integers(0, 2**32))
def test_any_order_of_arrival_gives_the_announced_rows(ranks: int, events: int, seed: int) -> None:
    net = Net(ranks, events, Plan(seed, repeat=0.3)).run()
    check(net)
    assert net.survivors == list(range(ranks))
    assert net.missing == []


def test_a_rank_without_rows_still_announces_itself() -> None:
    rank = Collective(0, WORLD)
    writes = [effect for effect in rank.enter({}) if isinstance(effect, Write)]
    assert [(w.target, w.field.count) for w in writes] == [(1, 0), (2, 0)]


def test_nothing_is_pulled_before_the_last_count() -> None:
    rank = Collective(0, WORLD)
    rank.enter({})
    assert rank.handle(Written(1, MetadataField(0, 1, 0, 4))) == []
    effects = rank.handle(Written(2, MetadataField(0, 1, 8, 2)))
    pulls = [effect for effect in effects if isinstance(effect, Pull)]
    assert [(p.source, p.field.offset, p.field.count) for p in pulls] == [(1, 0, 4), (2, 8, 2)]


def test_a_peer_may_be_one_collective_ahead() -> None:
    rank = Collective(0, World(1, (0, 1)))
    rank.enter({})
    assert rank.handle(Written(1, MetadataField(1, 1, 0, 0))) == []
    first = rank.handle(Written(1, MetadataField(0, 1, 0, 0)))
    assert [type(effect) for effect in first] == [Completed]
    assert any(isinstance(effect, Completed) for effect in rank.enter({}))


def test_rows_stay_readable_until_everybody_has_pulled_them() -> None:
    rank = Collective(0, World(1, (0, 1)))
    field = MetadataField(0, 1, 0, 2)
    rows = rows_for(0, 1, 0, rank.world)
    count = len(rows[0])
    rank.enter({1: rows})
    field = MetadataField(0, 1, 0, count)
    rank.handle(Written(1, MetadataField(0, 1, 0, 0)))
    rank.enter({})
    assert rank.read(1, field) is not None
    rank.handle(Written(1, MetadataField(1, 1, 0, 0)))
    rank.enter({})
    assert rank.read(1, field) is None
    assert rank.read(1, MetadataField(0, 9, 0, count)) is None


# ---------------------------------------------------------------- bad input


@pytest.mark.parametrize(
    ("sender", "field", "reason"),
    [
        (9, MetadataField(0, 1, 0, 1), "not in world"),
        (1, MetadataField(7, 1, 0, 1), "out of reach"),
        (1, MetadataField(0, 3, 0, 1), "out of reach"),
        (1, MetadataField(0, 1, 0, 1 << 30), "an area holds"),
    ],
    ids=["stranger", "far event", "far world", "too many rows"],
)
def test_a_field_that_breaks_the_contract_is_refused(
    sender: int, field: MetadataField, reason: str
) -> None:
    rank = Collective(0, WORLD)
    (refused,) = rank.handle(Written(sender, field))
    assert isinstance(refused, Refused)
    assert reason in refused.reason


def test_a_second_different_field_is_refused_and_the_first_kept() -> None:
    rank = Collective(0, WORLD)
    rank.enter({})
    rank.handle(Written(1, MetadataField(0, 1, 0, 4)))
    (refused,) = rank.handle(Written(1, MetadataField(0, 1, 0, 5)))
    assert isinstance(refused, Refused)
    effects = rank.handle(Written(2, MetadataField(0, 1, 0, 0)))
    assert [e.field.count for e in effects if isinstance(e, Pull)] == [4]


def test_rows_that_are_not_as_announced_leave_the_peer_missing() -> None:
    rank = Collective(0, World(1, (0, 1)))
    rank.enter({})
    field = MetadataField(0, 1, 0, 4)
    rank.handle(Written(1, field))
    (refused,) = rank.handle(Pulled(1, field, rows_for(0, 1, 0, rank.world)))
    assert isinstance(refused, Refused)
    assert rank.handle(Pulled(1, field, None)) == []
    assert rank.missing() == (1,)


def test_the_caller_s_own_mistakes_are_named() -> None:
    rank = Collective(0, WORLD, Limits(rows_max=1))
    with pytest.raises(LocalProtocolError, match="outside world 1"):
        rank.enter({5: rows_for(0, 1, 0, WORLD)})
    with pytest.raises(CapacityExceeded):
        rank.enter({1: rows_for(0, 1, 0, WORLD)})
    rank.enter({})
    with pytest.raises(LocalProtocolError, match="counting"):
        rank.enter({})
    with pytest.raises(LocalProtocolError):
        Collective(7, WORLD)
    with pytest.raises(LocalProtocolError):
        World(1, (2, 1))


# ---------------------------------------------------------------- bounded waits


def test_the_first_deadline_names_the_missing_ranks_and_asks_them() -> None:
    rank = Collective(1, WORLD)
    (wait,) = [effect for effect in rank.enter({}) if isinstance(effect, Wait)]
    rank.handle(Written(0, MetadataField(0, 1, 0, 0)))
    effects = rank.handle(WaitOver(wait.number))
    assert effects[0] == Missing(0, (2,))
    assert [effect.target for effect in effects if isinstance(effect, Tell)] == [2]
    assert rank.handle(WaitOver(wait.number)) == [], "an old wait means nothing"


def test_who_has_not_entered_says_so_and_is_not_accused() -> None:
    net = Net(4, 4, Plan(3, slow={2: 5 * LIMITS.wait_ns})).run()
    check(net)
    assert net.survivors == [0, 1, 2, 3]
    assert {ranks for _, missing in net.missing for ranks in (missing.ranks,)} == {(2,)}


def test_a_rank_that_is_late_for_ever_is_given_up() -> None:
    net = Net(4, 3, Plan(3, slow={2: 1_000 * LIMITS.wait_ns})).run()
    check(net)
    assert net.survivors == [0, 1, 3]
    assert net.halted[2].reason == "voted dead"


def test_late_is_only_believed_of_a_missing_rank() -> None:
    rank = Collective(0, WORLD)
    rank.enter({})
    assert rank.handle(Heard(1, Late(1, 0))) == []
    assert rank.handle(Heard(1, Late(1, 4))) == []


@settings(max_examples=80, deadline=None)
@given(st.integers(2, 6), st.integers(0, 2**32), st.sampled_from([0.05, 0.2]))
def test_bounded_loss_costs_time_or_ranks_but_never_agreement(
    ranks: int, seed: int, loss: float
) -> None:
    check(Net(ranks, 4, Plan(seed, loss=loss, repeat=0.1, losses_max=40)).run())


# ---------------------------------------------------------------- death


@settings(max_examples=250, deadline=None)
@given(
    ranks=st.integers(3, 7),
    seed=st.integers(0, 2**32),
    victims=st.lists(st.tuples(st.integers(0, 6), st.integers(0, 60)), min_size=1, max_size=2),
    loss=st.sampled_from([0.0, 0.0, 0.1]),
)
def test_survivors_agree_and_hold_the_result_of_the_smaller_world(
    ranks: int, seed: int, victims: list[tuple[int, int]], loss: float
) -> None:
    deaths = {rank % ranks: effects for rank, effects in victims}
    plan = Plan(seed, loss=loss, repeat=0.1, losses_max=25, deaths=deaths)
    net = Net(ranks, 4, plan, Limits(wait_ns=100, asks_max=2, late_waits_max=20, unit=2)).run()
    check(net)
    if loss == 0.0:
        quorum = net.nodes[0].world if not net.dead else World(1, tuple(range(ranks)))
        alive = [rank for rank in range(ranks) if rank not in net.dead]
        if quorum.is_quorum(alive):
            assert net.survivors == alive, "nobody but the dead is lost"


@pytest.mark.parametrize("effects", range(24))
def test_one_death_at_every_step_of_a_collective(effects: int) -> None:
    net = Net(5, 4, Plan(effects, deaths={2: effects})).run()
    check(net)
    assert net.dead == {2}
    assert net.survivors == [0, 1, 3, 4]
    assert {net.nodes[rank].world for rank in net.survivors} == {World(2, (0, 1, 3, 4))}
    assert any(missing.ranks == (2,) for _, missing in net.missing), "the dead one is named"


def test_without_a_quorum_nobody_goes_on() -> None:
    net = Net(4, 3, Plan(1, deaths={0: 0, 1: 0})).run()
    assert net.survivors == []
    assert {halted.reason for halted in net.halted.values()} == {"no quorum"}
    assert all(set(halted.missing) >= {0, 1} for halted in net.halted.values())


def test_half_with_the_lowest_rank_goes_on() -> None:
    net = Net(4, 3, Plan(1, deaths={2: 0, 3: 0})).run()
    check(net)
    assert net.survivors == [0, 1]


# ---------------------------------------------------------------- worlds past and to come


def test_who_asks_about_an_old_world_is_told_the_verdict() -> None:
    net = Net(3, 2, Plan(1, deaths={2: 0})).run()
    (told,) = net.nodes[0].handle(Heard(2, Prepare(1, (9, 2))))
    assert told == Tell(2, Decided(1, Verdict((2,), 0)))


def test_a_field_of_an_earlier_world_is_never_matched() -> None:
    rank = Collective(0, WORLD)
    rank.handle(Heard(1, Decided(1, Verdict((2,), 0))))
    rank.enter({})
    assert rank.handle(Written(1, MetadataField(0, 1, 0, 0))) == []
    assert rank.missing() == (1,)
    assert any(isinstance(e, Completed) for e in rank.handle(Written(1, MetadataField(0, 2, 0, 0))))


def test_a_sign_of_a_later_world_makes_a_rank_ask_for_the_verdict() -> None:
    rank = Collective(0, WORLD)
    for event in (Written(1, MetadataField(0, 2, 0, 0)), Heard(1, Late(2, 0))):
        (ask,) = rank.handle(event)
        assert ask == Tell(1, Ask(1, 0))


def test_a_frozen_rank_completes_nothing_more() -> None:
    rank = Collective(0, World(1, (0, 1)))
    rank.enter({})
    rank.handle(Heard(1, Prepare(1, (1, 1))))
    assert rank.state is State.AGREEING
    assert rank.handle(Written(1, MetadataField(0, 1, 0, 0))) == []
    assert rank.event == 0
