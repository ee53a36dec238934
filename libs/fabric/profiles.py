"""What computation costs on the emulated timeline: a model profile on 910C dies, as pure functions.

The tensors that flow are a small model's; time may be charged as DeepSeek-R1. The ratio of the two
configurations is applied here and nowhere else: a layer of the small model stands for `repeat`
layers of the profiled one, and a row for a row of its width.

Formulas and constants are the cost model fitted to the published kernel breakdown (P123, Fig. 20)
and stage times (P124). Agreement with the 93 ms iteration of P123 is by construction.

All costs are in nanoseconds; t = tokens of one step on one die, b = requests, S = mean KV length.
"""

from __future__ import annotations

from dataclasses import dataclass

from libs import units

HBM_BYTES_PER_S = 1.6e12 * 0.841  # given x measured efficiency (arXiv 2506.12708)
BF16_MLA_FLOPS = 334.6e12  # fitted: 317 us per layer at 60 requests and 3K (Fig. 20)
INT8_OPS = 752e12 * 0.8  # given x assumed efficiency of large shapes
PREFILL_DIES = 4  # given: TP=4 attention of one prefill DP group (P094)
HOST_BYTES_PER_S = 151e9  # given: UB between a die and a CPU (arXiv 2506.12708)
HOST_COPY_BASE_US = 40.0  # assumed: start-up of a DMA, as of one collective stage


@dataclass(frozen=True, slots=True)
class ModelProfile:
    """A model as the emulated timeline sees it."""

    name: str
    dense_layers: int
    moe_layers: int
    #: Bytes of one token row A2E (INT8 row and its scale) and E2A (BF16 row).
    a2e_row_bytes: int
    e2a_row_bytes: int
    #: KV bytes of one token, all layers (INT8 latent, BF16 RoPE part).
    kv_token_bytes: int
    #: MLA work per request and KV row: FLOP and bytes.
    mla_flop_per_row: float
    mla_row_bytes: float
    #: Streamed weights per layer: MLAProlog and o_proj (bytes).
    prolog_bytes: float
    o_proj_bytes: float
    #: Fixed parts, microseconds.
    mla_base_us: float
    prolog_base_us: float
    other_base_us: float
    dense_layer_us: float
    head_us: float
    sampling_us: float
    gap_us: float
    expert_slot_us: float
    #: Parts per token, microseconds.
    prolog_token_us: float
    other_token_us: float
    expert_token_us: float
    #: Prefill of one TP=4 DP group (two chips): start-up and rate.
    prefill_base_us: float
    prefill_tokens_per_s: float


DEEPSEEK_R1 = ModelProfile(
    name="deepseek-r1",
    dense_layers=3,
    moe_layers=58,
    a2e_row_bytes=7_680,
    e2a_row_bytes=14_336,
    kv_token_bytes=39_040,
    mla_flop_per_row=128 * 2 * 1088,
    mla_row_bytes=640,
    prolog_bytes=69.7e6,
    o_proj_bytes=117.44e6,
    mla_base_us=10.0,
    prolog_base_us=30.0,
    other_base_us=30.0,
    dense_layer_us=295.0,
    head_us=1378.0,
    sampling_us=1400.0,
    gap_us=2000.0,
    expert_slot_us=31.1,
    prolog_token_us=0.373,
    other_token_us=0.798,
    expert_token_us=0.1853,
    # 61 layers x about 40 eager operator launches x 25 us: assumed, no figure is published.
    prefill_base_us=61_000.0,
    # 5,655 tokens/s per chip (arXiv 2506.12708), two chips.
    prefill_tokens_per_s=11_310.0,
)

#: The shipped checkpoint charged as itself: the same fixed parts, its own six layers and widths.
XDS_TINY = ModelProfile(
    name="xds-tiny",
    dense_layers=1,
    moe_layers=5,
    a2e_row_bytes=132,
    e2a_row_bytes=256,
    kv_token_bytes=6 * 64,
    mla_flop_per_row=4 * 2 * 80,
    mla_row_bytes=64,
    prolog_bytes=0.05e6,
    o_proj_bytes=0.016e6,
    mla_base_us=10.0,
    prolog_base_us=30.0,
    other_base_us=30.0,
    dense_layer_us=30.0,
    head_us=40.0,
    sampling_us=100.0,
    gap_us=200.0,
    expert_slot_us=31.1,
    prolog_token_us=0.01,
    other_token_us=0.01,
    expert_token_us=0.005,
    prefill_base_us=2_000.0,
    prefill_tokens_per_s=100_000.0,
)

PROFILES = {profile.name: profile for profile in (DEEPSEEK_R1, XDS_TINY)}


def layer_repeats(profile: ModelProfile, first_dense: int, num_layers: int) -> tuple[int, ...]:
    """How many layers of the profiled model each layer of the real one stands for.

    Dense layers share the profile's dense ones, MoE layers its MoE ones; remainders go to the
    first, so the sum is always the profile's layer count.
    """
    assert 0 <= first_dense < num_layers, (first_dense, num_layers)

    def spread(total: int, over: int) -> list[int]:
        return [total // over + (1 if i < total % over else 0) for i in range(over)] if over else []

    dense = spread(profile.dense_layers, first_dense)
    return (*dense, *spread(profile.moe_layers, num_layers - first_dense))


def attention_us(profile: ModelProfile, tokens: int, kv_rows: int) -> float:
    """One layer of attention: MLAProlog, MLA, o_proj and the small kernels around them.

    `kv_rows` is the sum of the KV lengths of the batch (b x S).
    """
    prolog = profile.prolog_base_us + profile.prolog_bytes / HBM_BYTES_PER_S * 1e6
    prolog += profile.prolog_token_us * tokens
    mla = profile.mla_base_us + 1e6 * max(
        kv_rows * profile.mla_row_bytes / HBM_BYTES_PER_S,
        kv_rows * profile.mla_flop_per_row / BF16_MLA_FLOPS,
    )
    o_proj = 1e6 * max(
        profile.o_proj_bytes / HBM_BYTES_PER_S, 2 * tokens * profile.o_proj_bytes / INT8_OPS
    )
    other = profile.other_base_us + profile.other_token_us * tokens
    return prolog + mla + o_proj + other


def dense_layers_ns(profile: ModelProfile, layers: int, tokens: int, kv_rows: int) -> int:
    """`layers` dense layers: attention and MLP."""
    return units.us(layers * (attention_us(profile, tokens, kv_rows) + profile.dense_layer_us))


def moe_attention_ns(profile: ModelProfile, layers: int, tokens: int, kv_rows: int) -> int:
    """The attention side of `layers` MoE layers."""
    return units.us(layers * attention_us(profile, tokens, kv_rows))


def expert_ns(profile: ModelProfile, layers: int, rows: int, slots: int) -> int:
    """The expert side of `layers` MoE layers on one die: `rows` routed rows over `slots`."""
    return units.us(layers * (profile.expert_slot_us * slots + profile.expert_token_us * rows))


def finish_ns(profile: ModelProfile) -> int:
    """LM head and sampling, once per iteration."""
    return units.us(profile.head_us + profile.sampling_us)


def gap_ns(profile: ModelProfile) -> int:
    """The scheduler's gap between iterations."""
    return units.us(profile.gap_us)


def prefill_ns(profile: ModelProfile, tokens: int, context_rows: int = 0) -> int:
    """Prefill of `tokens` prompt tokens by one DP group, behind `context_rows` cached rows.

    Charged are the start-up, the tokens at the published rate, which holds their attention among
    themselves, and their attention to each cached row: latent MLA over the group's four dies. A
    cached prefix never costs more than computing it, since the rate is that of any length.
    """
    whole_us = (tokens + context_rows) / profile.prefill_tokens_per_s * 1e6
    layers = profile.dense_layers + profile.moe_layers
    flop = layers * tokens * context_rows * profile.mla_flop_per_row
    part_us = tokens / profile.prefill_tokens_per_s * 1e6 + 1e6 * flop / (
        BF16_MLA_FLOPS * PREFILL_DIES
    )
    return units.us(profile.prefill_base_us + min(part_us, whole_us))


def host_copy_ns(profile: ModelProfile, rows: int) -> int:
    """Copy of `rows` KV rows between a die and host memory, either way; nothing for none."""
    if rows == 0:
        return 0
    nbytes = rows * profile.kv_token_bytes
    return units.us(HOST_COPY_BASE_US + nbytes / HOST_BYTES_PER_S * 1e6)
