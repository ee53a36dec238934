"""The grids of the collectives: Fig. 6, and A2E/E2A at the size of P047.

The state machines of `libs.xccl` run on the emulated timeline, and `FabricEmulatorCore` stamps each
frame; a figure is the time at which the last die is done. What is simplified:

- rows have no columns (they are charged their full width), experts compute in no time, and nobody
  dies;
- the host hands messages over without encoding them (`LeanHost`); `same_under_sim_host` says that a
  smaller world gives equal stamps under `SimHost`, codec and all;
- rows are spread evenly, as in the fit, unless a row of the grid says `uniform` (random experts);
- one DP domain runs, as one at a time may (P110);
- a trampoline begins its second stage when all of the first is in (`barrier`), which is what the
  fitted stages add up to; one row of the grid shows A2E without it;
- in E2A all experts everywhere are done at the same moment.

The headline is the `grouped` scheme. `paired` has the same stages, so what it costs more is every
copy of a row passing its one trampoline twice.

Agreement is **by construction** for `crossover_batch`, the ends of Fig. 6, `a2e_us` and `e2a_us`:
start-up constants were fitted on them. What the run shows on its own is that the protocols reach
those figures with every frame queueing on both links, how unequal rows move them, and what
trampolines are worth.
"""

from __future__ import annotations

import gc
from dataclasses import replace
from itertools import pairwise
from typing import Any

import numpy as np

from libs import units
from libs.fabric.params import UB, FabricParams
from libs.runtime.sim_host import SimHost, SimOptions
from libs.xccl import collective_cost as cost
from libs.xccl.agreement import World
from libs.xccl.trampoline_table import Scheme, make_table
from services.fabric_emulator.core import FabricEmulatorCore
from services.superpod.bench_collective_cores import (
    ExpertCore,
    RankConfig,
    RankCore,
    SourceCore,
    StageConfig,
    first_hop_frames,
)
from services.superpod.lean_host import LeanHost

#: Fig. 6: batch per die, one world (given).
BATCHES = (4, 8, 16, 32, 64, 80, 96, 128)
EP = 128
ROUTED_EXPERTS = 256
#: P047: one domain of 160 attention dies, 288 expert dies, 96 tokens per die (given).
ATTENTION_DIES, EXPERT_DIES, TOKENS = 160, 288, 96
#: Metadata cost per peer that the ablation sweeps besides 0 (assumed; no figure is published).
METADATA_NS = (300, 450, 600, 900)
#: What an all-to-all reaches on a link, and nothing else of the fabric, differs from P2P.
FABRIC: FabricParams = replace(UB, ub_bytes_per_s=cost.A2A.bytes_per_s)
EMULATOR = "fabric_emulator.0"
SEED = 20_250_802

Counts = dict[int, dict[int, int]]


def run() -> dict[str, Any]:
    """Everything, in the form of `--json`; about 40 s.

    Frames form no cycles, and looking for some among them would be a sixth of the time.
    """
    collecting = gc.isenabled()
    gc.disable()
    try:
        return _run()
    finally:
        if collecting:
            gc.enable()


def _run() -> dict[str, Any]:
    fig6 = [row for batch in BATCHES for row in _fig6(batch, even_counts(batch, EP), "even")]
    uneven = _fig6(96, uniform_counts(96, EP, SEED), "uniform")
    trampolines = {
        scheme: _domain(scheme, 0, back=scheme is not Scheme.PAIRED) for scheme in Scheme
    }
    cut_through = _domain(Scheme.GROUPED, 0, barrier=False, back=False)
    straight, grouped = trampolines[Scheme.STRAIGHT], trampolines[Scheme.GROUPED]
    ablation = _ablation(straight, grouped)
    for metadata_ns in METADATA_NS:
        pair = (_domain(scheme, metadata_ns) for scheme in (Scheme.STRAIGHT, Scheme.GROUPED))
        ablation += _ablation(*pair)
    return {
        "crossover_batch": crossover(fig6),
        "a2e_us": grouped["a2e_us"],
        "e2a_us": grouped["e2a_us"],
        "trampoline_breakeven_us": breakeven_us(ablation, "a2e"),
        "trampoline_breakeven_e2a_us": breakeven_us(ablation, "e2a"),
        "same_under_sim_host": same_under_sim_host(),
        "by_construction": ["crossover_batch", "a2e_us", "e2a_us"],
        "grid": [*fig6, *uneven, *trampolines.values(), cut_through, *ablation],
    }


# ---------------------------------------------------------------- dispatch and combine


def even_counts(batch: int, ranks: int) -> Counts:
    """Rows from each rank to each other: the same pattern seen from every rank."""
    rows = batch * cost.TOP_K
    offsets = [(1 + (j * ranks // rows if rows < ranks else j)) % ranks for j in range(rows)]
    counts: Counts = {}
    for rank in range(ranks):
        row: dict[int, int] = {}
        for offset in offsets:
            target = (rank + offset) % ranks
            row[target] = row.get(target, 0) + 1
        counts[rank] = row
    return counts


def uniform_counts(batch: int, ranks: int, seed: int) -> Counts:
    """Each token chooses distinct experts at random, an equal number of which live on each rank."""
    generator = np.random.default_rng(seed)
    counts: Counts = {}
    for rank in range(ranks):
        scores = generator.random((batch, ROUTED_EXPERTS))
        owners = np.argsort(scores, axis=1)[:, : cost.TOP_K] * ranks // ROUTED_EXPERTS
        # A row travels once per rank, whatever the number of its experts there.
        once = np.concatenate([np.unique(row) for row in owners])
        targets, number = np.unique(once, return_counts=True)
        counts[rank] = dict(zip(targets.tolist(), number.tolist(), strict=True))
    return counts


def returning(counts: Counts) -> Counts:
    """What combine carries: each row goes back to where it came from."""
    back: Counts = {rank: {} for rank in counts}
    for source, row in counts.items():
        for target, number in row.items():
            back[target][source] = number
    return back


def rank_cores(counts: Counts, start_ns: int, row_bytes: int) -> dict[int, RankCore]:
    """One core per rank; rank and die are the same number."""
    world = World(1, tuple(sorted(counts)))
    return {
        rank: RankCore(f"bench_rank.{rank}", rank, RankConfig(world, row, start_ns, row_bytes))
        for rank, row in counts.items()
    }


def collective_us(counts: Counts, start_ns: int, row_bytes: int) -> float:
    """One collective of this traffic, until the last rank is done."""
    cores = rank_cores(counts, start_ns, row_bytes)
    LeanHost(FabricEmulatorCore(EMULATOR, len(cores), FABRIC), cores, FABRIC).start()
    return units.to_us(max(_done_ns(core) for core in cores.values()))


def _done_ns(core: RankCore | SourceCore) -> int:
    assert core.done_ns is not None, f"{core.name} is not done"
    return core.done_ns


def _fig6(batch: int, counts: Counts, routing: str) -> list[dict[str, Any]]:
    dispatch = (cost.dispatch_start_ns(batch, EP), cost.A2A.int8_row_bytes)
    combine = (cost.combine_start_ns(EP), cost.A2A.bf16_row_bytes)
    rows = (
        ("dispatch", collective_us(counts, *dispatch), cost.dispatch_ns(batch, EP, cost.TOP_K)),
        (
            "combine",
            collective_us(returning(counts), *combine),
            cost.combine_ns(batch, EP, cost.TOP_K),
        ),
    )
    return [
        {
            "figure": "6", "what": what, "ep": EP, "batch": batch, "routing": routing,
            "us": round(measured, 3), "closed_form_us": round(units.to_us(formula), 3),
        }
        for what, measured, formula in rows
    ]  # fmt: skip


def crossover(grid: list[dict[str, Any]]) -> float:
    """The batch at which dispatch becomes the faster of the two, between grid points linearly."""
    lead: list[tuple[int, float]] = [
        (row["batch"], row["us"] - other["us"])
        for row in grid
        for other in grid
        if row["what"] == "dispatch" and other["what"] == "combine"
        and row["batch"] == other["batch"]
    ]  # fmt: skip
    for (batch, ahead), (next_batch, next_ahead) in pairwise(lead):
        if ahead > 0 >= next_ahead:
            return round(batch + (next_batch - batch) * ahead / (ahead - next_ahead), 1)
    raise AssertionError(f"dispatch never overtakes combine: {lead}")


def same_under_sim_host(ranks: int = 8, batch: int = 5) -> bool:
    """Whether every rank is done at the same nanosecond under `SimHost`, with encoded frames."""
    counts = uniform_counts(batch, ranks, SEED)
    lean = rank_cores(counts, cost.dispatch_start_ns(batch, ranks), cost.A2A.int8_row_bytes)
    LeanHost(FabricEmulatorCore(EMULATOR, ranks, FABRIC), lean, FABRIC).start()
    cores = rank_cores(counts, cost.dispatch_start_ns(batch, ranks), cost.A2A.int8_row_bytes)
    host = SimHost(SimOptions(seed=SEED, params=FABRIC))
    host.add(FabricEmulatorCore(EMULATOR, ranks, FABRIC))
    for rank, core in cores.items():
        host.add(core, dies=(rank,))
    host.run(lambda: all(core.done_ns is not None for core in cores.values()))
    return {r: core.done_ns for r, core in lean.items()} == {
        r: core.done_ns for r, core in cores.items()
    }


# ---------------------------------------------------------------- A2E and E2A


def _domain(
    scheme: Scheme, metadata_ns: int, *, barrier: bool = True, back: bool = True
) -> dict[str, Any]:
    """A2E of one domain from a common start, then (`back`) E2A from a common end of all experts."""
    params = replace(cost.A2A, metadata_peer_ns=metadata_ns)
    dies = tuple(range(ATTENTION_DIES + EXPERT_DIES))
    table = make_table(dies[:ATTENTION_DIES], dies[ATTENTION_DIES:], scheme)
    a2e = StageConfig(
        table, params, params.int8_row_bytes, cost.a2e_start_ns(TOKENS, params),
        cost.relay_ns(params), barrier,
    )  # fmt: skip
    first_hop = first_hop_frames(table)
    pair_rows = TOKENS * cost.COPIES // EXPERT_DIES
    sources = {die: SourceCore(die, a2e, pair_rows) for die in table.attention}
    experts = {die: ExpertCore(die, a2e, first_hop) for die in table.experts}
    host = LeanHost(FabricEmulatorCore(EMULATOR, len(dies), FABRIC), {**sources, **experts}, FABRIC)
    host.start()
    begin_ns = max(core.last_ns for core in experts.values())
    row: dict[str, Any] = {
        "figure": "a2e_e2a", "what": "domain",
        "scheme": scheme.value, "barrier": barrier, "metadata_ns": metadata_ns,
        "attention": ATTENTION_DIES, "experts": EXPERT_DIES, "tokens": TOKENS,
        "a2e_us": round(units.to_us(begin_ns), 3),
    }  # fmt: skip
    if back:
        stage_ns = cost.e2a_start_ns(params)
        e2a = StageConfig(table, params, params.bf16_row_bytes, stage_ns, stage_ns, barrier)
        host.now_ns = begin_ns
        for core in experts.values():
            host.carry_out(core.answer(e2a, begin_ns))
        host.run()
        row["e2a_us"] = round(
            units.to_us(max(_done_ns(core) for core in sources.values()) - begin_ns), 3
        )
    return row


def _ablation(straight: dict[str, Any], trampoline: dict[str, Any]) -> list[dict[str, Any]]:
    """A row per direction: the same exchange with and without trampolines."""
    assert straight["metadata_ns"] == trampoline["metadata_ns"]
    return [
        {
            "figure": "a2e_e2a",
            "what": "trampoline_ablation",
            "direction": direction,
            "metadata_ns": straight["metadata_ns"],
            "straight_us": straight[f"{direction}_us"],
            "trampoline_us": trampoline[f"{direction}_us"],
        }
        for direction in ("a2e", "e2a")
    ]


def breakeven_us(ablation: list[dict[str, Any]], direction: str) -> float | None:
    """The metadata cost per peer from which trampolines pay off; None when no point shows it."""
    gain = [
        (row["metadata_ns"], row["straight_us"] - row["trampoline_us"])
        for row in ablation
        if row["direction"] == direction
    ]
    for (metadata_ns, lost), (next_ns, won) in pairwise(gain):
        if lost < 0 <= won:
            at_ns = metadata_ns + (next_ns - metadata_ns) * lost / (lost - won)
            return round(units.to_us(round(at_ns)), 3)
    return None
