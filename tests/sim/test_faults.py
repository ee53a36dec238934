"""With any one fault class on every link, every token still equals the reference."""

from __future__ import annotations

import pytest

from libs import units
from libs.config.topology import load_topology
from libs.fabric.faults.active import EVERYWHERE, FaultRule, fault_named
from libs.fabric.faults.catalogue import CLASSES
from libs.fabric.faults.flap import Flap
from libs.model.resources import ModelResources
from services.superpod.verify import verify_sim

#: Two of them lose frames, one of them silently: these belong to every run.
QUICK = ("corruption", "one_way_loss")


@pytest.mark.parametrize(
    "kind",
    [
        pytest.param(kind, marks=() if kind in QUICK else pytest.mark.slow)
        for kind in sorted(CLASSES)
    ],
)
def test_tokens_equal_the_reference_under_a_fault_at_5_percent(
    model: ModelResources, kind: str
) -> None:
    rule = fault_named(kind, 0.05, seed=1)
    report = verify_sim(load_topology("mini"), model, requests=10, seed=1, faults=[rule])
    assert report["examples"] == []
    assert report["ok"]
    done = report["faults"][rule.fault_id]
    assert 0.025 < done["touched"] / done["seen"] < 0.1, "the fault has no teeth"


@pytest.mark.parametrize("seed", [1, 2])
def test_a_loose_contact_does_not_meet_every_repetition(model: ModelResources, seed: int) -> None:
    """Down in every period without exception, and the period divides every deadline."""
    rule = FaultRule("loose", Flap(period_ns=units.ms(10)), EVERYWHERE, 0.05, seed=seed)
    report = verify_sim(load_topology("mini"), model, requests=10, seed=seed, faults=[rule])
    assert report["ok"], report["examples"]
    assert report["faults"]["loose"]["touched"] > 0


def test_a_fault_is_part_of_the_history(model: ModelResources) -> None:
    def history(seed: int) -> str:
        rules = [fault_named("jitter", 0.5, seed)]
        report = verify_sim(load_topology("mini"), model, requests=2, seed=1, faults=rules)
        return str(report["trace_hash"])

    assert history(1) == history(1)
    assert history(1) != history(2)
