"""The machine: sizes of the paper, places of dies, and what may run outside the UB plane."""

from __future__ import annotations

import pytest

from libs.config.plan import plan_pod
from libs.config.topology import load_topology, parse_topology
from libs.errors import BadInput
from libs.fabric.params import UB
from libs.fabric.planes import Plane, link_of, plane_between, plane_limits
from libs.fabric.superpod import SuperPod, superpod_of

MIXED = SuperPod(servers=2, outside_910b_servers=1)

ON_910B = """
name: mixed
hardware: {outside_910b_servers: 1, outside_plane: roce, on_910b: [p0]}
prefill_tes: [{name: p0}, {name: p1}]
decode_tes: [{name: d0, dp_groups: 1, expert_dies: 2}]
"""


def test_the_whole_superpod_has_the_sizes_of_the_paper() -> None:
    pod = SuperPod()
    assert (pod.servers, pod.chips, pod.pod_dies, pod.cpus) == (48, 384, 768, 192)
    assert pod.ub_pairs == 294_528


def test_dies_chips_and_servers_agree() -> None:
    for die in range(MIXED.num_dies):
        server = MIXED.server_of(die)
        assert die in MIXED.dies_of_server(server)
    assert [MIXED.chip_of(die) for die in (0, 1, 2)] == [0, 0, 1]
    assert MIXED.is_outside(MIXED.pod_dies)
    assert not MIXED.is_outside(MIXED.pod_dies - 1)
    assert MIXED.server_of(MIXED.pod_dies) == 2


def test_the_plane_follows_from_where_two_dies_are() -> None:
    inside, outside = 0, MIXED.pod_dies
    assert plane_between(MIXED, inside, 5) is Plane.UB
    assert plane_between(MIXED, inside, outside) is Plane.ROCE
    assert plane_between(MIXED, inside, outside, "ub") is None
    assert plane_between(MIXED, inside, 5, "roce") is Plane.ROCE


def test_ub_is_several_times_roce_and_the_vpc_card_is_the_servers() -> None:
    limits = plane_limits(UB)
    assert limits[Plane.UB].bytes_per_s / limits[Plane.ROCE].bytes_per_s == pytest.approx(7.84)
    assert link_of(MIXED, Plane.VPC, 3) == link_of(MIXED, Plane.VPC, 15) == 0
    assert link_of(MIXED, Plane.UB, 3) != link_of(MIXED, Plane.UB, 15)


@pytest.mark.parametrize("role", ["decode_te", "expert_die"])
def test_only_prefill_may_run_on_a_910b_server(role: str) -> None:
    outside = MIXED.pod_dies
    assert MIXED.refusal("prefill_te", outside) is None
    reason = MIXED.refusal(role, outside)
    assert reason is not None
    assert "910B" in reason
    with pytest.raises(BadInput, match="may only prefill"):
        MIXED.require(role, outside)
    assert MIXED.refusal(role, 0) is None


def test_a_topology_places_prefill_on_910b_and_everything_else_inside() -> None:
    plan = plan_pod(parse_topology(ON_910B, source="mixed"))
    pod = superpod_of(plan)
    for actor in plan.actors:
        for die in actor.dies:
            assert pod.is_outside(die) == (actor.te == "p0")


def test_decode_on_910b_is_refused_by_the_file_with_the_reason() -> None:
    text = ON_910B.replace("on_910b: [p0]", "on_910b: [d0]")
    with pytest.raises(BadInput, match="may only prefill"):
        parse_topology(text, source="mixed")


def test_the_machine_of_a_small_topology_is_as_large_as_it_needs() -> None:
    plan = plan_pod(load_topology("mini"))
    assert superpod_of(plan).servers == 1


@pytest.mark.parametrize(
    "bad", [{"servers": 0}, {"servers": 49}, {"chips_per_server": 9}, {"outside_plane": "ub"}]
)
def test_an_impossible_machine_is_bad_input(bad: dict[str, object]) -> None:
    with pytest.raises(BadInput):
        SuperPod(**bad)  # type: ignore[arg-type]
