"""A fault means the same in a simulation (a rule) and in a pod of processes (a command)."""

from __future__ import annotations

import pytest

from libs.fabric.faults.active import FaultRule, fault_named
from libs.fabric.faults.catalogue import CLASSES, build_fault
from libs.fabric.faults.scope import Scope
from libs.wire.codec import decode_frame, encode_frame
from libs.wire.envelope import Envelope
from libs.wire.fabric import FaultArm
from services.cli.pod_faults import arm_of
from services.fabric_emulator.core import rule_of


@pytest.mark.parametrize("kind", sorted(CLASSES))
def test_the_standard_rule_of_every_class_survives_the_way_to_a_shard(kind: str) -> None:
    rule = fault_named(kind, 0.05, seed=7)
    _, arm = decode_frame(encode_frame(Envelope("xds", 1, 1, 0), arm_of(rule)))
    assert rule_of(arm) == rule


@pytest.mark.parametrize("kind", sorted(CLASSES))
def test_a_command_that_names_nothing_but_class_and_share_is_the_standard_rule(kind: str) -> None:
    assert rule_of(FaultArm(f"all-{kind}", kind, 0.05, 7)) == fault_named(kind, 0.05, seed=7)


def test_nothing_of_a_rule_is_forgotten() -> None:
    scope = Scope("pair", (3, 5), plane="ub", direction="from")
    slow = build_fault("slow_die", (("factor", 9),))
    rule = FaultRule("f", slow, scope, 0.5, start_ns=10, duration_ns=20, seed=4)
    assert rule_of(arm_of(rule)) == rule
