from __future__ import annotations

from typing import Any

import pytest

from libs.errors import InvariantError
from libs.fabric.params import UB
from libs.fabric.planes import Plane
from libs.units import to_us, transfer_ns
from services.superpod import bench_fabric as bench
from services.superpod.bench_fabric import FAR, KB, Shot, Wires


@pytest.fixture(scope="module")
def report() -> dict[str, Any]:
    return bench.run()


def rows(report: dict[str, Any], what: str) -> list[dict[str, Any]]:
    return [row for row in report["grid"] if row["what"] == what]


def test_a_frame_that_claims_an_earlier_egress_than_its_link_had_ends_the_benchmark() -> None:
    wires = Wires()
    first, second = wires.frames([Shot(0, *FAR, 1152 * KB)] * 2)
    wires.stamp(first)
    assert second.begin_ns > first.begin_ns
    second_too_early = type(second)(
        second.source, second.target, 0, second.charge_bytes, 1, second.payload, first.begin_ns
    )
    with pytest.raises(InvariantError, match="egress_double_booked"):
        wires.stamp(second_too_early)


@pytest.mark.parametrize(
    ("plane", "latency_ns", "bytes_per_s"),
    [
        (Plane.UB, UB.ub_latency_ns, UB.ub_bytes_per_s),
        (Plane.ROCE, UB.roce_latency_ns, UB.roce_bytes_per_s),
        (Plane.VPC, UB.vpc_latency_ns, UB.vpc_bytes_per_s),
    ],
)
def test_each_plane_costs_its_latency_and_its_bytes(
    plane: Plane, latency_ns: int, bytes_per_s: int
) -> None:
    assert bench.frame_ns(FAR, 288 * KB, plane) == latency_ns + transfer_ns(288 * KB, bytes_per_s)


def test_large_frames_fill_the_link_and_small_ones_only_what_may_be_under_way(
    report: dict[str, Any],
) -> None:
    latency = rows(report, "latency")
    assert len(latency) == len(Plane) * len(bench.SIZES)
    for row in latency:
        under_way = UB.in_flight_frames_max * row["bytes"] / (1_000 * row["us"])
        reached = min(row["link_gb_per_s"], under_way)
        assert row["train_gb_per_s"] == pytest.approx(reached, rel=0.01), row


def test_access_is_uniform(report: dict[str, Any]) -> None:
    """P025: the same chip, the same server and the other end of the pod are alike."""
    for nbytes in (512, 1152 * KB):
        times = {row["us"] for row in rows(report, "uniform") if row["bytes"] == nbytes}
        assert len(times) == 1
    assert report["uniform_spread_percent"] < 5


@pytest.mark.parametrize("what", ["incast", "fan_out"])
def test_who_shares_a_link_gets_an_even_part_of_it(report: dict[str, Any], what: str) -> None:
    found = rows(report, what)
    assert [row["dies"] for row in found] == [1, 2, 4, 8, 16, 32]
    for row in found:
        even = 196 / row["dies"]
        assert row["share_min_gb_per_s"] == pytest.approx(even, rel=0.03)
        assert row["share_max_gb_per_s"] == pytest.approx(even, rel=0.03)
        assert row["total_gb_per_s"] == pytest.approx(196, rel=0.01)
        assert row["total_gb_per_s"] <= 196
        assert row["shared_link_busy"] == pytest.approx(1, abs=0.001)


def test_no_more_frames_of_a_pair_are_under_way_than_may_be(report: dict[str, Any]) -> None:
    (row,) = rows(report, "in_flight")
    assert row["seen"] == row["bound"] == report["in_flight_frames"] == UB.in_flight_frames_max
    flights = row["frames"] / row["bound"]
    assert row["us"] == pytest.approx(flights * to_us(UB.vpc_latency_ns), rel=0.01)


def test_random_frames_queue_as_the_textbook_says(report: dict[str, Any]) -> None:
    for row in rows(report, "load"):
        assert row["busy"] == pytest.approx(row["offered"], rel=0.05)
        assert row["wait_mean_us"] == pytest.approx(row["wait_formula_us"], rel=0.15), row
        assert row["wait_p99_us"] > 3 * row["wait_mean_us"]


def test_the_core_stamps_more_frames_than_a_pod_sends_and_the_checker_costs_something(
    report: dict[str, Any],
) -> None:
    assert report["frames_per_s"] > report["frames_per_s_checked"] > 1_000
