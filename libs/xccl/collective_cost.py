"""What collectives cost, stage by stage, as pure functions; the fabric charges the bytes.

    dispatch   start (launch, quantise, fan-out) | field | barrier | read request | rows
    combine    start                             | field | barrier | read request | rows
    A2E        stage (quantise, fan-out) | rows to first-hop peers | stage | rows to the rest
    E2A        stage | rows to the trampolines | stage | rows to the sources

A state machine departs its frames after the `*_start_ns` of the stage, and links of
`A2A.bytes_per_s` do the rest. The closed forms (`dispatch_ns`, ...) say what comes out when every
link carries the same; the start-up constants were fitted on measured totals, so a start is the
constant minus the fabric latencies that the stage crosses anyway.

Where constants come from: (given) published, (fitted) chosen so that a published total comes out,
(assumed) neither. Agreement of a total with the figure its constant was fitted on is by
construction.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import log2

from libs import units
from libs.fabric.params import UB
from libs.fabric.profiles import DEEPSEEK_R1
from libs.units import transfer_ns


@dataclass(frozen=True, slots=True)
class CollectiveParams:
    """Constants of the collectives of one model on 910C dies."""

    #: Bandwidth that a die reaches in an all-to-all (fitted: combine of 120 us at batch 128, Fig.
    #: 6; 70 % of the link's given 196 GB/s).
    bytes_per_s: int = 137_000_000_000
    #: One crossing of the fabric, contained in every fitted start-up below.
    latency_ns: int = UB.ub_latency_ns
    #: A row as INT8 with its scale, and as BF16 (given: P040-P041).
    int8_row_bytes: int = DEEPSEEK_R1.a2e_row_bytes
    bf16_row_bytes: int = DEEPSEEK_R1.e2a_row_bytes
    #: Start-up at EP128 (fitted: 22 us at batch 4 and the crossover at 32; 120 us at batch 128).
    dispatch_base_us: float = 19.5
    combine_base_us: float = 12.8
    #: Per doubling of the world (fitted on CANN's published EP8 to EP256 figures, arXiv
    #: 2506.12708).
    dispatch_doubling_us: float = 7.2
    combine_doubling_us: float = 6.2
    #: No collective starts faster than one P2P send (assumed; the send is fitted to Fig. 5).
    start_floor_ns: int = UB.p2p_startup_ns
    #: Quantising one token (fitted together with the crossover of Fig. 6).
    quantise_token_us: float = 0.180
    #: One stage of A2E and of E2A (fitted: 172 and 193 us, P047), peers' metadata included.
    a2e_stage_ns: int = UB.a2e_stage_ns
    e2a_stage_ns: int = UB.e2a_stage_ns
    #: What announcing to one more peer costs beyond the stage's own (assumed; nothing is published,
    #: so the benchmark sweeps it).
    metadata_peer_ns: int = 0


A2A = CollectiveParams()

#: The world of Fig. 6, which the start-ups are relative to (given).
REFERENCE_EP = 128
#: Copies of a token of DeepSeek-R1: 8 routed experts (Fig. 6), and the shared one (P047) (given).
TOP_K = 8
COPIES = 9


def quantise_ns(tokens: int, params: CollectiveParams = A2A) -> int:
    """BF16 rows to INT8 rows."""
    return units.us(params.quantise_token_us * tokens)


def metadata_ns(peers: int, params: CollectiveParams = A2A) -> int:
    """Announcing to `peers` dies, one after the other on the scalar unit of an AIV."""
    return peers * params.metadata_peer_ns


# ---------------------------------------------------------------- dispatch and combine


#: Times that dispatch and combine cross the fabric: field, read request, rows.
CROSSINGS = 3


def dispatch_start_ns(tokens: int, ranks: int, params: CollectiveParams = A2A) -> int:
    """From the call to the writing of the first field: launch, fan-out, fused quantisation."""
    base = params.dispatch_base_us + params.dispatch_doubling_us * log2(ranks / REFERENCE_EP)
    return _start_ns(base, params) + quantise_ns(tokens, params)


def combine_start_ns(ranks: int, params: CollectiveParams = A2A) -> int:
    """The same for combine, which quantises nothing."""
    base = params.combine_base_us + params.combine_doubling_us * log2(ranks / REFERENCE_EP)
    return _start_ns(base, params)


def _start_ns(base_us: float, params: CollectiveParams) -> int:
    """A start-up without the crossings; never less than the floor, because the
    slope per doubling is not meant for a world of a few ranks.
    """
    return max(units.us(base_us) - CROSSINGS * params.latency_ns, params.start_floor_ns)


def dispatch_ns(tokens: int, ranks: int, k: int, params: CollectiveParams = A2A) -> int:
    """The whole of dispatch when every rank gets as many rows as it sends."""
    rows_ns = transfer_ns(tokens * k * params.int8_row_bytes, params.bytes_per_s)
    return dispatch_start_ns(tokens, ranks, params) + CROSSINGS * params.latency_ns + rows_ns


def combine_ns(tokens: int, ranks: int, k: int, params: CollectiveParams = A2A) -> int:
    """The whole of combine, likewise, with BF16 rows."""
    rows_ns = transfer_ns(tokens * k * params.bf16_row_bytes, params.bytes_per_s)
    return combine_start_ns(ranks, params) + CROSSINGS * params.latency_ns + rows_ns


def crossover_tokens(k: int, params: CollectiveParams = A2A) -> float:
    """Tokens per die from which dispatch is faster than combine at the reference world."""
    saved_us = units.to_us(
        transfer_ns(k * params.bf16_row_bytes, params.bytes_per_s)
        - transfer_ns(k * params.int8_row_bytes, params.bytes_per_s)
    )
    return (params.dispatch_base_us - params.combine_base_us) / (
        saved_us - params.quantise_token_us
    )


# ---------------------------------------------------------------- A2E and E2A


def a2e_start_ns(tokens: int, params: CollectiveParams = A2A) -> int:
    """The first stage at an attention die, before its first frame departs."""
    return quantise_ns(tokens, params) + relay_ns(params)


def relay_ns(params: CollectiveParams = A2A) -> int:
    """The second stage of A2E, at a trampoline."""
    return params.a2e_stage_ns - params.latency_ns


def e2a_start_ns(params: CollectiveParams = A2A) -> int:
    """One stage of E2A, at the die whose experts answer and again at its trampoline."""
    return params.e2a_stage_ns - params.latency_ns


def a2e_ns(tokens: int, attention: int, experts: int, params: CollectiveParams = A2A) -> int:
    """A2E of one domain in two hops: all copies to the first-hop peers, a die's share to the
    rest.
    """
    share = attention * tokens * COPIES // experts
    rows = transfer_ns((COPIES * tokens + share) * params.int8_row_bytes, params.bytes_per_s)
    return a2e_start_ns(tokens, params) + relay_ns(params) + 2 * params.latency_ns + rows


def e2a_ns(tokens: int, attention: int, experts: int, params: CollectiveParams = A2A) -> int:
    """E2A of one domain in two hops, the same way back."""
    share = attention * tokens * COPIES // experts
    rows = transfer_ns((COPIES * tokens + share) * params.bf16_row_bytes, params.bytes_per_s)
    return 2 * params.e2a_stage_ns + rows


def breakeven_us(
    tokens: int, attention: int, experts: int, params: CollectiveParams = A2A
) -> float:
    """Metadata cost per peer from which two hops beat one, if only the first hop's peers counted.

    A trampoline saves `experts - attention` announcements and costs a stage and a die's share.
    """
    share = attention * tokens * COPIES // experts
    extra = params.a2e_stage_ns + transfer_ns(share * params.int8_row_bytes, params.bytes_per_s)
    return units.to_us(extra) / (experts - attention)
