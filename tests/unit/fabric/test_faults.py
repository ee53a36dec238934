"""One test per fault class, then rules: where, when, how often, and what they leave behind."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from libs import units
from libs.errors import Backpressure, BadInput
from libs.fabric.faults.active import RULES_MAX, FaultRule, FaultSet, fault_named
from libs.fabric.faults.catalogue import CLASSES, build_fault
from libs.fabric.faults.delivery import Delivery
from libs.fabric.faults.scope import Scope
from libs.fabric.superpod import SuperPod

POD = SuperPod(servers=2)
PAYLOAD = np.arange(64, dtype=np.uint8)
#: When the first byte of `frame()` arrives: its bytes take a microsecond of the link.
FIRST_BYTE_NS = 1_000 + 2_000


def frame(source: int = 0, target: int = 1, begin_ns: int = 1_000, **other: Any) -> Delivery:
    made = Delivery("ub", source, target, begin_ns, begin_ns + 3_000, 196_000, PAYLOAD, 1_000)
    return replace(made, **other)


def under(kind: str, *parameters: tuple[str, int], probability: float = 1.0) -> FaultSet:
    faults = FaultSet(POD)
    faults.arm(FaultRule("f", build_fault(kind, parameters), probability=probability))
    return faults


def test_latency_adds_its_delay() -> None:
    (late,) = under("latency", ("extra_ns", 700)).apply(frame())
    assert late.deliver_ns == frame().deliver_ns + 700


def test_jitter_adds_a_delay_within_its_bound_and_not_always_the_same() -> None:
    faults = under("jitter", ("extra_ns_max", 500))
    delays = {faults.apply(frame())[0].deliver_ns - frame().deliver_ns for _ in range(50)}
    assert len(delays) > 10
    assert all(1 <= delay <= 500 for delay in delays)


def test_a_capped_link_lets_frames_through_one_after_the_other() -> None:
    faults = under("bandwidth_cap", ("bytes_per_s", 196_000_000))
    first, second = faults.apply(frame())[0], faults.apply(frame())[0]
    assert first.deliver_ns == FIRST_BYTE_NS + units.ms(1)
    assert second.deliver_ns == FIRST_BYTE_NS + units.ms(2)


def test_a_capped_link_is_narrow_for_whole_slots_of_time() -> None:
    faults = under("bandwidth_cap", probability=0.5)
    slow = [
        {
            faults.apply(frame(begin_ns=at, deliver_ns=at + 3_000))[0].deliver_ns > at + 3_000
            for at in (slot * units.ms(2) + i * 100_000 for i in range(5))
        }
        for slot in range(40)
    ]
    assert all(len(fates) == 1 for fates in slow)
    assert {True} in slow
    assert {False} in slow


def test_one_way_loss_loses() -> None:
    assert under("one_way_loss").apply(frame()) == []


def test_a_blackhole_loses_everything_of_a_slot_and_nothing_of_another() -> None:
    faults = under("blackhole", probability=0.5)
    by_slot = [
        {bool(faults.apply(frame(begin_ns=slot * units.ms(2) + i))) for i in range(5)}
        for slot in range(40)
    ]
    assert all(len(fates) == 1 for fates in by_slot)
    assert {True} in by_slot
    assert {False} in by_slot


def test_a_flapping_link_is_down_for_its_share_of_every_period() -> None:
    faults = under("flap", ("period_ns", 100), probability=0.3)
    arrives = [bool(faults.apply(frame(begin_ns=at))) for at in range(1_000)]
    assert arrives.count(False) == 300
    assert arrives[:100] * 10 == arrives, "the same part of every period"


def test_a_duplicate_comes_after_the_frame() -> None:
    first, copy = under("duplicate").apply(frame())
    assert first.deliver_ns == frame().deliver_ns
    assert copy.deliver_ns > first.deliver_ns
    assert copy.payload is first.payload


def test_a_reordered_frame_is_held_long_enough_to_be_overtaken() -> None:
    (held,) = under("reorder", ("hold_ns", 1_000)).apply(frame())
    assert 500 < held.deliver_ns - frame().deliver_ns <= 1_001


def test_corruption_changes_bytes_and_only_in_the_copy() -> None:
    before = PAYLOAD.copy()
    (bad,) = under("corruption", ("flips", 3)).apply(frame())
    assert np.count_nonzero(bad.payload != PAYLOAD) == 3
    assert np.array_equal(PAYLOAD, before)


def test_a_slow_die_stretches_what_it_sends_and_receives() -> None:
    faults = FaultSet(POD)
    faults.arm(FaultRule("f", build_fault("slow_die", (("factor", 4),)), Scope("die", (5,))))
    assert faults.apply(frame(5, 1))[0].deliver_ns == 1_000 + 4 * 3_000
    assert faults.apply(frame(1, 5))[0].deliver_ns == 1_000 + 4 * 3_000
    assert faults.apply(frame(1, 2))[0].deliver_ns == 1_000 + 3_000


def test_a_dead_die_neither_sends_nor_receives() -> None:
    faults = FaultSet(POD)
    faults.arm(FaultRule("f", build_fault("dead_die"), Scope("die", (5,))))
    assert faults.apply(frame(5, 1)) == []
    assert faults.apply(frame(1, 5)) == []
    assert len(faults.apply(frame(1, 2))) == 1


@pytest.mark.parametrize(
    ("pair", "begin_ns", "deliver_ns", "arrives"),
    [
        ((5, 1), 9_999, 12_000, True),
        ((5, 1), 10_000, 12_000, False),
        ((1, 5), 7_000, 9_999, True),
        ((1, 5), 9_999, 10_000, False),
        ((1, 5), 10_001, 20_000, True),
        ((5, 1), 19_999, 30_000, False),
        ((5, 1), 20_000, 30_000, True),
    ],
    ids=[
        "sent before its death", "sent after it", "taken before its death",
        "on its way to it when it dies", "delivered after it is back", "sent while dead",
        "sent after it is back",
    ],
)  # fmt: skip
def test_a_die_dies_at_an_instant(
    pair: tuple[int, int], begin_ns: int, deliver_ns: int, arrives: bool
) -> None:
    faults = FaultSet(POD)
    died = FaultRule(
        "f", build_fault("dead_die"), Scope("die", (5,)), start_ns=10_000, duration_ns=10_000
    )
    faults.arm(died)
    left = faults.apply(frame(*pair, begin_ns=begin_ns, deliver_ns=deliver_ns))
    assert bool(left) is arrives


def test_a_dead_die_takes_no_frame_that_another_fault_made_late() -> None:
    """Whichever of the two was armed first."""
    dead = FaultRule("dead", build_fault("dead_die"), Scope("die", (5,)), start_ns=5_000)
    late = FaultRule("late", build_fault("latency", (("extra_ns", 2_000),)))
    for order in ((dead, late), (late, dead)):
        faults = FaultSet(POD)
        for rule in order:
            faults.arm(rule)
        assert faults.apply(frame(1, 5)) == []


# ---------------------------------------------------------------- scopes


@pytest.mark.parametrize(
    ("scope", "hit", "missed"),
    [
        (Scope("pair", (0, 1), direction="to"), (0, 1), (1, 0)),
        (Scope("pair", (0, 1), direction="from"), (1, 0), (0, 1)),
        (Scope("die", (3,), direction="from"), (3, 4), (4, 3)),
        (Scope("server", (1,), direction="to"), (0, 16), (16, 0)),
        (Scope("sub_plane", (1,)), (0, 1), (0, 2)),
    ],
)
def test_a_scope_reaches_exactly_its_frames(
    scope: Scope, hit: tuple[int, int], missed: tuple[int, int]
) -> None:
    faults = FaultSet(POD)
    faults.arm(FaultRule("f", build_fault("one_way_loss"), scope))
    assert faults.apply(frame(*hit)) == []
    assert len(faults.apply(frame(*missed))) == 1


def test_a_plane_is_a_scope() -> None:
    faults = FaultSet(POD)
    faults.arm(FaultRule("f", build_fault("one_way_loss"), Scope("plane", plane="roce")))
    assert len(faults.apply(frame())) == 1
    assert faults.apply(frame(plane="roce")) == []


# ---------------------------------------------------------------- rules


def test_a_rule_lasts_from_its_start_for_its_duration() -> None:
    faults = FaultSet(POD)
    loss = build_fault("one_way_loss")
    faults.arm(FaultRule("f", loss, start_ns=100, duration_ns=50))
    arrives = [bool(faults.apply(frame(begin_ns=at))) for at in (99, 100, 149, 150)]
    assert arrives == [True, False, False, True]


def test_probability_is_kept_and_the_witness_counts() -> None:
    faults = under("one_way_loss", probability=0.2)
    lost = sum(not faults.apply(frame()) for _ in range(2_000))
    (armed,) = faults.armed()
    assert (armed.seen, armed.touched) == (2_000, lost)
    assert 300 < lost < 500


@pytest.mark.parametrize("kind", sorted(CLASSES))
@pytest.mark.parametrize("share", [0.05, 0.3])
def test_probability_is_the_share_of_the_traffic_that_a_class_touches(
    kind: str, share: float
) -> None:
    """Of frames between many dies at many times, whatever a class draws its chances for."""
    faults = FaultSet(POD)
    faults.arm(fault_named(kind, share, seed=3))
    for number in range(6_000):
        source, target = number % 31, (7 * number + 3) % 32
        at_ns = number * 777_777
        faults.apply(frame(source, target, begin_ns=at_ns, deliver_ns=at_ns + 3_000))
    (armed,) = faults.armed()
    assert armed.seen == 6_000
    assert armed.touched == pytest.approx(6_000 * share, rel=0.2)


@pytest.mark.parametrize("kind", ["dead_die", "slow_die"])
def test_a_die_that_is_named_is_hit_with_the_whole_probability(kind: str) -> None:
    faults = FaultSet(POD)
    faults.arm(FaultRule("f", build_fault(kind), Scope("die", (5,)), 0.3))
    for number in range(4_000):
        at_ns = number * units.ms(2)
        faults.apply(frame(5, 1, begin_ns=at_ns, deliver_ns=at_ns + 3_000))
    (armed,) = faults.armed()
    assert armed.touched == pytest.approx(1_200, rel=0.1)


@pytest.mark.parametrize("kind", sorted(CLASSES))
def test_certain_is_certain(kind: str) -> None:
    faults = under(kind)
    for number in range(200):
        faults.apply(frame(begin_ns=number * 333_333, deliver_ns=number * 333_333 + 3_000))
    (armed,) = faults.armed()
    assert armed.touched == armed.seen == 200


def test_the_same_seed_hits_the_same_frames_and_another_seed_others() -> None:
    def fates(seed: int) -> list[int]:
        faults = FaultSet(POD)
        faults.arm(fault_named("one_way_loss", 0.3, seed))
        return [len(faults.apply(frame())) for _ in range(100)]

    assert fates(1) == fates(1)
    assert fates(1) != fates(2)


def test_healed_is_healed_and_history_is_returned() -> None:
    faults = under("one_way_loss")
    faults.apply(frame())
    was = faults.heal("f")
    assert was is not None
    assert was.touched == 1
    assert faults.is_empty
    assert faults.heal("f") is None
    assert len(faults.apply(frame())) == 1


def test_the_number_of_rules_is_bounded() -> None:
    faults = FaultSet(POD)
    for number in range(RULES_MAX):
        faults.arm(FaultRule(f"f{number}", build_fault("latency")))
    with pytest.raises(Backpressure):
        faults.arm(FaultRule("one more", build_fault("latency")))
    faults.arm(FaultRule("f0", build_fault("jitter")))  # replacing one is fine


@pytest.mark.parametrize(
    ("rule", "field"),
    [
        (FaultRule("", build_fault("jitter")), "fault_id"),
        (FaultRule("f", build_fault("jitter"), probability=0), "probability"),
        (FaultRule("f", build_fault("jitter"), probability=1.5), "probability"),
        (FaultRule("f", build_fault("jitter"), start_ns=-1), "start_ns"),
        (FaultRule("f", build_fault("jitter"), Scope("die", (99,))), "scope.numbers"),
        (FaultRule("f", build_fault("jitter"), Scope("die")), "scope.numbers"),
        (FaultRule("f", build_fault("jitter"), Scope("moon")), "scope.kind"),
        (FaultRule("f", build_fault("jitter"), Scope("plane", plane="x")), "scope.plane"),
    ],
)
def test_a_bad_rule_names_its_field(rule: FaultRule, field: str) -> None:
    with pytest.raises(BadInput) as caught:
        FaultSet(POD).arm(rule)
    assert caught.value.field == field


@pytest.mark.parametrize(
    ("kind", "parameters", "field"),
    [
        ("moon", (), "kind"),
        ("jitter", (("extra", 1),), "parameters.extra"),
        ("jitter", (("extra_ns_max", 0),), "parameters.extra_ns_max"),
    ],
)
def test_a_fault_is_built_from_good_numbers_only(
    kind: str, parameters: tuple[tuple[str, int], ...], field: str
) -> None:
    with pytest.raises(BadInput) as caught:
        build_fault(kind, parameters)
    assert caught.value.field == field


def test_every_class_is_in_the_catalogue_under_its_own_name() -> None:
    assert len(CLASSES) == 11
    assert all(kind == cls.KIND for kind, cls in CLASSES.items())
