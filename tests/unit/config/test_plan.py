from __future__ import annotations

from itertools import chain

import pytest

from libs.config.plan import PREFILL_TP, expert_placement, output_of, plan_pod
from libs.config.topology import Topology, load_topology, parse_topology

WIDE = """
name: wide
gateways: 2
job_executors: 3
fabric: {shards: 2}
prefill_tes: [{name: p0, dp_groups: 2}, {name: p1}]
decode_tes: [{name: d0, dp_groups: 3, expert_dies: 5}, {name: d1, expert_dies: 2}]
"""


@pytest.fixture(params=["mini", "wide"])
def topology(request: pytest.FixtureRequest) -> Topology:
    if request.param == "wide":
        return parse_topology(WIDE, source="wide")
    return load_topology(request.param)


def test_names_are_unique_and_dies_disjoint_and_without_gaps(topology: Topology) -> None:
    plan = plan_pod(topology)
    names = [actor.name for actor in plan.actors]
    assert len(names) == len(set(names))
    dies = list(chain.from_iterable(actor.dies for actor in plan.actors))
    assert sorted(dies) == list(range(plan.num_dies))
    assert all(plan.owner_of_die(die).dies.count(die) == 1 for die in dies)


def test_every_process_derives_the_same_plan(topology: Topology) -> None:
    assert plan_pod(topology) == plan_pod(topology)


def test_each_kind_of_actor_exists_as_often_as_the_topology_says(topology: Topology) -> None:
    plan = plan_pod(topology)
    prefill = sum(te.dp_groups for te in topology.prefill_tes)
    decode = sum(te.dp_groups for te in topology.decode_tes)
    expected = {
        "control_plane": 1,
        "fabric_emulator": topology.fabric.shards,
        "te_shell": len(topology.prefill_tes) + len(topology.decode_tes),
        "prefill_te": prefill,
        "decode_te": decode,
        "output": prefill + decode,
        "expert_die": sum(te.expert_dies for te in topology.decode_tes),
        "distflow": len(topology.prefill_tes) * len(topology.decode_tes),
        "job_executor": topology.job_executors,
        "gateway": topology.gateways,
    }
    assert {role: len(plan.of_role(role)) for role in expected} == expected
    assert len(plan.actors) == sum(expected.values())


def test_prefill_groups_span_four_dies_and_everything_else_that_computes_one(
    topology: Topology,
) -> None:
    plan = plan_pod(topology)
    assert {len(actor.dies) for actor in plan.of_role("prefill_te")} == {PREFILL_TP}
    for role in ("decode_te", "expert_die"):
        assert {len(actor.dies) for actor in plan.of_role(role)} == {1}


def test_every_group_has_the_output_process_that_bears_its_name(topology: Topology) -> None:
    plan = plan_pod(topology)
    for group in (*plan.of_role("prefill_te"), *plan.of_role("decode_te")):
        assert plan.actor(output_of(group.name)).te == group.te


@pytest.mark.parametrize("experts", [1, 7, 16])
def test_every_expert_has_one_home_on_its_own_tes_dies(topology: Topology, experts: int) -> None:
    plan = plan_pod(topology)
    for te in topology.decode_tes:
        placement = expert_placement(plan, te.name, experts)
        owned = {actor.dies[0] for actor in plan.of_te(te.name, "expert_die")}
        assert set(placement.dies) == owned
        everyone = [expert for die in placement.dies for expert in placement.experts_on(die)]
        assert sorted(everyone) == list(range(experts + 1)), "the shared expert is the last one"
        counts = [len(placement.experts_on(die)) for die in placement.dies]
        assert max(counts) - min(counts) <= 2, "round robin, and the shared expert on top"


def test_with_shared_memory_a_shard_lives_beside_the_owner_of_every_die(
    topology: Topology,
) -> None:
    shared = topology.model_copy(
        update={"fabric": topology.fabric.model_copy(update={"carrier": "shm"})}
    )
    plan, without = plan_pod(shared), plan_pod(topology)
    assert plan.processes == without.actors == without.processes, "no process is added"
    for owner in plan.processes:
        names = [f"fabric_emulator.d{owner.dies[0]}"] if owner.dies else []
        assert [actor.name for actor in plan.beside(owner.name)] == names
    assert plan.num_dies == without.num_dies


def test_unknown_names_and_dies_are_key_errors(topology: Topology) -> None:
    plan = plan_pod(topology)
    with pytest.raises(KeyError):
        plan.actor("gateway.99")
    with pytest.raises(KeyError):
        plan.owner_of_die(plan.num_dies)
