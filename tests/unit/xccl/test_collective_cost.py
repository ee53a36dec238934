from __future__ import annotations

from dataclasses import replace

import pytest

from libs import units
from libs.xccl import collective_cost as cost


def test_the_published_totals_come_out_by_construction() -> None:
    """P047: 172 and 193 us; Fig. 6: dispatch 22 to 100 us, combine to 120 us, crossover 32."""
    assert units.to_us(cost.a2e_ns(96, 160, 288)) == pytest.approx(172.0, abs=0.1)
    assert units.to_us(cost.e2a_ns(96, 160, 288)) == pytest.approx(193.0, abs=0.1)
    assert units.to_us(cost.dispatch_ns(4, 128, 8)) == pytest.approx(22.0, abs=0.1)
    assert units.to_us(cost.dispatch_ns(128, 128, 8)) == pytest.approx(100.0, abs=0.1)
    assert units.to_us(cost.combine_ns(128, 128, 8)) == pytest.approx(120.0, abs=0.1)
    assert cost.crossover_tokens(8) == pytest.approx(32.0, abs=0.1)


def test_the_crossover_rises_with_quantisation_and_falls_when_bytes_cost_more() -> None:
    slow = replace(cost.A2A, quantise_token_us=0.25)
    narrow = replace(cost.A2A, bytes_per_s=cost.A2A.bytes_per_s // 2)
    assert cost.crossover_tokens(8, slow) > cost.crossover_tokens(8)
    assert cost.crossover_tokens(8, narrow) < cost.crossover_tokens(8)


def test_a_world_twice_as_large_starts_later_by_its_doubling() -> None:
    for start, doubling in (
        (lambda ranks: cost.dispatch_start_ns(8, ranks), cost.A2A.dispatch_doubling_us),
        (cost.combine_start_ns, cost.A2A.combine_doubling_us),
    ):
        assert start(256) - start(128) == units.us(doubling)
        assert start(2) == start(1), "a small world starts no faster than one send"


def test_only_dispatch_pays_per_token_before_it_starts() -> None:
    assert cost.dispatch_start_ns(100, 128) - cost.dispatch_start_ns(0, 128) == units.us(18.0)
    assert cost.quantise_ns(100) == units.us(18.0)


def test_stages_add_up_to_the_closed_form_without_rows() -> None:
    latency = cost.A2A.latency_ns
    assert cost.a2e_ns(0, 160, 288) == cost.a2e_start_ns(0) + cost.relay_ns() + 2 * latency
    assert cost.e2a_ns(0, 160, 288) == 2 * (cost.e2a_start_ns() + latency)


def test_metadata_is_a_cost_per_peer() -> None:
    params = replace(cost.A2A, metadata_peer_ns=250)
    assert cost.metadata_ns(288, params) == 72_000
    assert cost.metadata_ns(288) == 0


def test_trampolines_pay_from_half_a_microsecond_per_peer() -> None:
    assert cost.breakeven_us(96, 160, 288) == pytest.approx(0.52, abs=0.01)
    common_alpha = replace(cost.A2A, a2e_stage_ns=units.us(32.9))
    assert cost.breakeven_us(96, 160, 288, common_alpha) == pytest.approx(0.467, abs=0.005)
