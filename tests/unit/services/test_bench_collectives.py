from __future__ import annotations

import pytest

from libs import units
from libs.xccl import collective_cost as cost
from services.superpod import bench_collectives as bench


def test_the_lean_host_stamps_as_the_simulation_host_does() -> None:
    assert bench.same_under_sim_host(ranks=6, batch=3)


@pytest.mark.parametrize(("batch", "ranks"), [(1, 16), (4, 128), (3, 5), (96, 128)])
def test_even_routing_gives_every_rank_as_many_rows_as_it_sends(batch: int, ranks: int) -> None:
    counts = bench.even_counts(batch, ranks)
    back = bench.returning(counts)
    assert {sum(row.values()) for row in counts.values()} == {batch * cost.TOP_K}
    assert {sum(row.values()) for row in back.values()} == {batch * cost.TOP_K}


def test_uniform_routing_sends_a_row_once_per_rank() -> None:
    counts = bench.uniform_counts(batch=10, ranks=4, seed=1)
    assert all(number <= 10 for row in counts.values() for number in row.values())
    assert bench.returning(bench.returning(counts)) == counts


def test_a_collective_costs_what_the_slowest_rank_waits_for() -> None:
    """Rank 0 reads 100 rows from rank 1 and 50 from 2: 3 crossings, 150 x 1,370 B at 137 GB/s."""
    counts: bench.Counts = {0: {}, 1: {0: 100}, 2: {0: 50}}
    took_us = bench.collective_us(counts, start_ns=units.us(10), row_bytes=1_370)
    assert took_us == pytest.approx(
        10 + cost.CROSSINGS * units.to_us(cost.A2A.latency_ns) + 1.5, abs=0.01
    )


def test_crossing_points_are_read_off_the_grid() -> None:
    fig6 = [
        {"what": what, "batch": batch, "us": us}
        for batch, dispatch, combine in ((8, 24.0, 20.0), (16, 30.0, 26.0), (32, 40.0, 44.0))
        for what, us in (("dispatch", dispatch), ("combine", combine))
    ]
    assert bench.crossover(fig6) == 24.0
    ablation = [
        {"direction": "a2e", "metadata_ns": at, "straight_us": straight, "trampoline_us": 100.0}
        for at, straight in ((0, 60.0), (500, 90.0), (1_000, 120.0))
    ]
    assert bench.breakeven_us(ablation, "a2e") == pytest.approx(0.667, abs=0.001)
    assert bench.breakeven_us(ablation[:2], "a2e") is None
    assert bench.breakeven_us(ablation, "e2a") is None
