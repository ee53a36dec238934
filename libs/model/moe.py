"""Gate and experts, cut where the system cuts them: between attention dies and expert dies.

    attention die    gate(x) -> Routed(rows, topk_idx, topk_weights)        what A2E carries
    expert die       ExpertPool.partial(...) -> sums over its own experts   what E2A carries
    attention die    combine(x, partials) -> x + sum

An expert's weighted output is rounded to integers of a 2^-24 grid before it is added, so partial
sums may be formed on any die, replica or trampoline and added in any order (`f32` sums floats
instead and has no such freedom). The shared expert is expert number `n_routed_experts`; every row
chooses it, with weight 1, on whichever die is asked for it.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from libs.errors import InvariantError
from libs.model import exact, plain
from libs.model.args import ModelArgs
from libs.model.linear import (
    Linear,
    Mode,
    Rows,
    grouped_product,
    int8_rows,
    precise_linear,
    wide_linear,
)
from libs.model.weights import Checkpoint, expert_prefix

Float32 = NDArray[np.float32]


@dataclass(frozen=True, slots=True, eq=False)
class Routed:
    """The gate's verdict: prepared rows and, per row, its experts and their weights.

    `topk_idx [tokens, k]` int32, best first; `topk_weights [tokens, k]` float32. Without the shared
    expert, which needs no choosing. An entry of -1 in `topk_idx` is skipped by the experts: so a
    caller hides choices that another die computes.
    """

    rows: Rows
    topk_idx: NDArray[np.int32]
    topk_weights: Float32


class Gate:
    """Group-limited top-k by sigmoid score; the bias steers the choice and not the weight."""

    def __init__(self, checkpoint: Checkpoint, layer: int, mode: Mode) -> None:
        prefix = f"model.layers.{layer}."
        self._args, self._mode = checkpoint.args, mode
        self._norm = plain.rms_norm if mode == "f32" else exact.rms_norm
        self._sigmoid = plain.sigmoid if mode == "f32" else exact.sigmoid
        self._norm_weight = checkpoint.tensor(f"{prefix}post_attention_layernorm.weight")
        self._score = precise_linear(checkpoint.tensor(f"{prefix}mlp.gate.weight"), mode)
        self._bias = checkpoint.tensor(f"{prefix}mlp.gate.e_score_correction_bias")

    def route(self, x: Float32) -> Routed:
        """Post-attention norm, choice of experts, and the rows as they travel."""
        normed = self._norm(x, self._norm_weight, self._args.rms_norm_eps)
        topk_idx, topk_weights = self.choose(self._sigmoid(self._score(normed)))
        rows = int8_rows(normed) if self._mode == "int8" else Rows(normed)
        return Routed(rows, topk_idx, topk_weights)

    def choose(self, scores: Float32) -> tuple[NDArray[np.int32], Float32]:
        """Top-k of `scores [tokens, experts]` and their weights."""
        return choose_experts(self._args, scores, self._bias)


def choose_experts(
    args: ModelArgs, scores: Float32, bias: Float32 | float = 0.0
) -> tuple[NDArray[np.int32], Float32]:
    """Group-limited top-k of `scores [tokens, experts]` and their weights; ties to the lower id."""
    biased = scores + bias
    if args.topk_group < args.n_group:
        grouped = biased.reshape(len(scores), args.n_group, -1)
        best = np.sort(grouped, axis=-1)
        group_score = best[..., -1] + best[..., -2]
        kept = np.argsort(-group_score, axis=-1, kind="stable")[:, : args.topk_group]
        lost = np.ones(group_score.shape, np.bool_)
        lost[np.arange(len(scores))[:, None], kept] = False
        np.copyto(grouped, -np.inf, where=lost[..., None])
    chosen = np.argsort(-biased, axis=-1, kind="stable")[:, : args.num_experts_per_tok]
    weights = np.take_along_axis(scores, chosen, axis=1)
    if args.norm_topk_prob:
        # Added best first, one by one: a library sum may pick another order.
        total = weights[:, 0].copy()
        for column in range(1, weights.shape[1]):
            total += weights[:, column]
        weights = weights / (total[:, None] + np.float32(1e-20))
    weights = weights * np.float32(args.routed_scaling_factor)
    return chosen.astype(np.int32), weights


@dataclass(frozen=True, slots=True, eq=False)
class GatedMlp:
    """`down(silu(gate x) * up x)`, gate and up as one matrix `[2 * inner, hidden]`."""

    gate_up: Linear
    down: Linear

    @classmethod
    def load(cls, checkpoint: Checkpoint, prefix: str, mode: Mode) -> GatedMlp:
        """Read the three matrices under `prefix`."""
        gate = checkpoint.tensor(f"{prefix}gate_proj.weight")
        up = checkpoint.tensor(f"{prefix}up_proj.weight")
        down = checkpoint.tensor(f"{prefix}down_proj.weight")
        joined = np.concatenate([gate, up])
        return cls(wide_linear(joined, mode), wide_linear(down, mode))


def run_mlps(mlps: Sequence[GatedMlp], rows: Rows, bounds: Sequence[int], mode: Mode) -> Float32:
    """Rows `bounds[i]:bounds[i+1]` through `mlps[i]`: `[tokens, hidden] -> [tokens, hidden]`.

    All must have the same inner width. Row by row the bits are those of one MLP alone.
    """
    hidden = grouped_product([mlp.gate_up for mlp in mlps], rows, bounds)
    gate, up = np.split(hidden, 2, axis=1)
    sigmoid = plain.sigmoid if mode == "f32" else exact.sigmoid
    inner = sigmoid(gate)
    inner *= gate
    inner *= up
    prepared = mlps[0].down.rows(inner)
    return grouped_product([mlp.down for mlp in mlps], prepared, bounds)


class DenseMlp:
    """Post-attention norm, MLP and residual of a layer without experts."""

    def __init__(self, checkpoint: Checkpoint, layer: int, mode: Mode) -> None:
        prefix = f"model.layers.{layer}."
        self._mode, self._eps = mode, checkpoint.args.rms_norm_eps
        self._norm = plain.rms_norm if mode == "f32" else exact.rms_norm
        self._norm_weight = checkpoint.tensor(f"{prefix}post_attention_layernorm.weight")
        self._mlp = GatedMlp.load(checkpoint, f"{prefix}mlp.", mode)

    def forward(self, x: Float32) -> Float32:
        """`[tokens, hidden] -> [tokens, hidden]`."""
        rows = self._mlp.gate_up.rows(self._norm(x, self._norm_weight, self._eps))
        return x + run_mlps([self._mlp], rows, [0, len(x)], self._mode)


class ExpertPool:
    """The experts of one layer that this process holds; all that an expert die computes with."""

    def __init__(self, checkpoint: Checkpoint, layer: int, mode: Mode) -> None:
        self._checkpoint, self._layer, self._mode = checkpoint, layer, mode
        self._args: ModelArgs = checkpoint.args
        self._experts: dict[int, GatedMlp] = {}

    @property
    def held(self) -> tuple[int, ...]:
        """The experts whose weights are loaded, ascending."""
        return tuple(sorted(self._experts))

    def hold(self, experts: Iterable[int]) -> None:
        """Load the weights of more experts; those already held are kept."""
        for expert in sorted(set(experts) - self._experts.keys()):
            if expert not in self._args.expert_ids():
                raise InvariantError(f"layer {self._layer} has no expert {expert}")
            prefix = expert_prefix(self._args, self._layer, expert)
            self._experts[expert] = GatedMlp.load(self._checkpoint, prefix, self._mode)

    def release(self, experts: Iterable[int]) -> None:
        """Drop weights; an expert that is not held is fine."""
        for expert in experts:
            self._experts.pop(expert, None)

    def partial(
        self,
        rows: Rows,
        topk_idx: NDArray[np.int32],
        topk_weights: Float32,
        experts: Sequence[int],
    ) -> NDArray[Any]:
        """Sum, per row, the weighted outputs of those of `experts` which the row chose.

        `[tokens, hidden]`: float64 integers of the 2^-24 grid in the exact modes, float32 sums in
        `f32`. Experts are distinct; an expert that is not held is an `InvariantError`.
        """
        dtype = np.float32 if self._mode == "f32" else np.float64
        total = np.zeros((len(rows), self._args.hidden_size), dtype)
        work = self._select(topk_idx, topk_weights, experts)
        for width in sorted({self._args.expert_intermediate_size(e) for e, _, _ in work}):
            same = [w for w in work if self._args.expert_intermediate_size(w[0]) == width]
            self._add_group(total, rows, same)
        return total

    def _select(
        self, topk_idx: NDArray[np.int32], topk_weights: Float32, experts: Sequence[int]
    ) -> list[tuple[int, NDArray[np.intp], Float32]]:
        """For each expert with work: its rows and their weights `[n, 1]`."""
        tokens, k = topk_idx.shape
        assert topk_weights.shape == (tokens, k), (topk_weights.shape, topk_idx.shape)
        flat = topk_idx.ravel()
        order = np.argsort(flat, kind="stable")
        # bounds[e] .. bounds[e + 1] are the places in `order` that chose expert e; -1 sorts first.
        bounds = np.searchsorted(flat[order], np.arange(self._args.n_routed_experts + 1)).tolist()
        token_of = order // k
        weight_of = topk_weights.ravel()[order][:, None]
        work = []
        for expert in experts:
            if expert not in self._experts:
                raise InvariantError(f"expert {expert} of layer {self._layer} is not held here")
            if expert == self._args.shared_expert:
                if tokens:
                    work.append((expert, np.arange(tokens), np.ones((tokens, 1), np.float32)))
                continue
            start, stop = bounds[expert], bounds[expert + 1]
            if stop > start:
                work.append((expert, token_of[start:stop], weight_of[start:stop]))
        return work

    def _add_group(
        self,
        total: NDArray[Any],
        rows: Rows,
        work: list[tuple[int, NDArray[np.intp], Float32]],
    ) -> None:
        mlps = [self._experts[expert] for expert, _, _ in work]
        bounds = np.cumsum([0, *(len(tokens) for _, tokens, _ in work)]).tolist()
        gathered = rows.take(np.concatenate([tokens for _, tokens, _ in work]))
        if self._mode == "fx":
            # INT8 rows arrive prepared; fixed-point rows travel as float32 and are prepared here.
            gathered = mlps[0].gate_up.rows(gathered.data)
        weights = np.concatenate([weight for _, _, weight in work])
        outputs = run_mlps(mlps, gathered, bounds, self._mode)
        addends: NDArray[Any]
        if self._mode == "f32":
            addends = outputs * weights
        else:
            addends = exact.to_combine_grid(outputs, weights)
        for (_, tokens, _), start, stop in zip(work, bounds, bounds[1:], strict=False):
            total[tokens] += addends[start:stop]


def combine(x: Float32, partials: Sequence[NDArray[Any]], mode: Mode) -> Float32:
    """Residual plus all partial sums, `[tokens, hidden]`; any order, in the exact modes."""
    assert partials, "at least one expert die must have answered"
    total = partials[0].copy()
    for partial in partials[1:]:
        assert partial.shape == total.shape, (partial.shape, total.shape)
        total += partial
    return x + (total if mode == "f32" else exact.from_combine_grid(total))
