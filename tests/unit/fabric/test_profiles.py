from __future__ import annotations

import pytest

from libs import units
from libs.fabric import profiles
from libs.fabric.params import UB
from libs.fabric.profiles import DEEPSEEK_R1, PROFILES, XDS_TINY, ModelProfile, layer_repeats

EACH = pytest.mark.parametrize("profile", PROFILES.values(), ids=PROFILES)


@EACH
@pytest.mark.parametrize(("first_dense", "num_layers"), [(1, 6), (3, 61), (0, 4), (2, 3)])
def test_layer_repeats_cover_the_profile_exactly(
    profile: ModelProfile, first_dense: int, num_layers: int
) -> None:
    repeats = layer_repeats(profile, first_dense, num_layers)
    assert len(repeats) == num_layers
    assert sum(repeats[first_dense:]) == profile.moe_layers
    assert sum(repeats[:first_dense]) == (profile.dense_layers if first_dense else 0)


def test_a_model_charged_as_itself_repeats_no_layer() -> None:
    assert layer_repeats(DEEPSEEK_R1, 3, 61) == (1,) * 61
    assert layer_repeats(XDS_TINY, 1, 6) == (1,) * 6


@EACH
def test_every_cost_grows_with_tokens_and_kv(profile: ModelProfile) -> None:
    for cost in (profiles.dense_layers_ns, profiles.moe_attention_ns):
        assert cost(profile, 5, 10, 1_000) < cost(profile, 5, 20, 1_000)
        assert cost(profile, 5, 10, 1_000) < cost(profile, 5, 10, 100_000)
        assert 2 * cost(profile, 5, 10, 1_000) == pytest.approx(cost(profile, 10, 10, 1_000), 1e-4)
    assert profiles.prefill_ns(profile, 100) < profiles.prefill_ns(profile, 101)
    assert profiles.expert_ns(profile, 1, 10, 1) < profiles.expert_ns(profile, 1, 20, 1)
    assert profiles.expert_ns(profile, 1, 10, 1) < profiles.expert_ns(profile, 1, 10, 2)


#: Two positions per request (one draft token), each of which reads the request's KV rows.
POSITIONS = 2


def test_colocated_iteration_adds_up_to_the_published_one() -> None:
    """62 attention layers, 59 MoE layers, 3 dense ones, 2 heads: 93 ms and the gap (P123)."""
    tokens = 60 * POSITIONS
    attention_us = profiles.attention_us(DEEPSEEK_R1, tokens, tokens * 3_072)
    expert_us = units.to_us(profiles.expert_ns(DEEPSEEK_R1, 1, 9 * tokens, 1))
    dispatch_us, combine_us = 234.0, 312.0
    total_us = 62 * attention_us + 59 * (dispatch_us + expert_us + combine_us)
    total_us += 3 * DEEPSEEK_R1.dense_layer_us
    total_us += POSITIONS * units.to_us(profiles.finish_ns(DEEPSEEK_R1))
    total_us += units.to_us(profiles.gap_ns(DEEPSEEK_R1))
    assert total_us / 1e3 == pytest.approx(93 + 2, rel=0.01)


def test_attention_of_one_microbatch_agrees_with_the_published_layer() -> None:
    """48 requests of 3K, two positions each: 0.7 ms with the first stage of A2E (P124)."""
    tokens, copies = 48 * POSITIONS, 9
    total_us = profiles.attention_us(DEEPSEEK_R1, tokens, tokens * 3_072)
    total_us += units.to_us(UB.a2e_stage_ns)
    total_us += units.to_us(units.transfer_ns(copies * tokens * 7_680, 137_000_000_000))
    assert total_us == pytest.approx(700, rel=0.07)


def test_expert_time_of_one_layer_agrees_with_the_published_stage() -> None:
    """480 rows in one slot take 120 us (P124); the slope is fitted to it."""
    assert units.to_us(profiles.expert_ns(DEEPSEEK_R1, 1, 480, 1)) == pytest.approx(120, rel=0.01)


def test_prefill_runs_at_the_published_rate() -> None:
    long_s = units.to_s(profiles.prefill_ns(DEEPSEEK_R1, 113_100))
    assert 113_100 / (long_s - 0.061) == pytest.approx(11_310, rel=0.001)


@EACH
def test_a_cached_prefix_costs_its_attention_and_never_more_than_computing_it(
    profile: ModelProfile,
) -> None:
    for tokens, rows in ((100, 1_000), (100, 100_000), (20_000, 20_000)):
        cost = profiles.prefill_ns(profile, tokens, rows)
        assert profiles.prefill_ns(profile, tokens) < cost
        assert cost <= profiles.prefill_ns(profile, tokens + rows)
    assert profiles.prefill_ns(profile, 100, 1_000) < profiles.prefill_ns(profile, 1_100) / 1.1


def test_half_a_prompt_cached_agrees_with_the_published_speed_up() -> None:
    """4K prompts of which half is reused: 1.42 times the rate (arXiv 2506.12708); not fitted."""
    whole = profiles.prefill_ns(DEEPSEEK_R1, 4_096)
    half = profiles.prefill_ns(DEEPSEEK_R1, 2_048, 2_048)
    assert whole / half == pytest.approx(1.42, rel=0.05)


def test_a_copy_from_the_host_is_far_cheaper_than_computing() -> None:
    assert profiles.host_copy_ns(DEEPSEEK_R1, 0) == 0
    copied = profiles.host_copy_ns(DEEPSEEK_R1, 1_024)
    assert copied < profiles.host_copy_ns(DEEPSEEK_R1, 1_040)
    saved = profiles.prefill_ns(DEEPSEEK_R1, 1_124) - profiles.prefill_ns(DEEPSEEK_R1, 100, 1_024)
    assert 10 * copied < saved


def test_two_stages_and_the_volume_explain_a2e_and_e2a() -> None:
    """Two stages leave 92.6 us of 172 (A2E) and 140.6 us of 193 (E2A) for the volume (P047)."""
    assert units.to_us(2 * UB.a2e_stage_ns) == pytest.approx(79.4)
    assert units.to_us(2 * UB.e2a_stage_ns) == pytest.approx(52.4)
    assert 2 * UB.a2e_stage_ns < units.us(172)
    assert 2 * UB.e2a_stage_ns < units.us(193)
