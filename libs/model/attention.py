"""Multi-head latent attention (MLA) over a batch made of several sequences.

    h = norm(x)                                  [tokens, hidden]
    q = q_b(norm(q_a(h)))                        [tokens, heads, nope + rope]
    latent | key = kv_a(h), normed | rotated     [tokens, kv_lora] | [tokens, rope]  -> one KV row
    scores = (q_nope W_k | q_rope) . KV rows     W_k absorbed: every head reads the same latent rows
    out = o(softmax(scores) latent W_v)          [tokens, hidden]

Spans of different sequences share all products with weights. The core (scores, softmax, values)
works on **tiles**: spans of equal length, padded to a common number of KV rows, or a piece of one
long span. In the exact modes scores and values contract integers, so tiling and padding change no
bit; in `f32` they do. A causal limit per row makes decode, chunked prefill and draft verification
the same code.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from libs.model import exact, plain
from libs.model.kv import KvStore, Span
from libs.model.linear import Linear, Mode, precise_linear, wide_linear
from libs.model.rope import Rope, softmax_scale
from libs.model.weights import Checkpoint

Float32 = NDArray[np.float32]

# DeepSeek's class default for the two inner norms; `rms_norm_eps` is for the outer ones only.
INNER_EPS = 1e-6
# Scores computed at once (float64): small enough to stay in a core's cache.
TILE_SCORES = 1 << 15
_MASKED = -1e30


@dataclass(frozen=True, slots=True)
class Tile:
    """Queries computed together: `queries` per span, from each span's query `offset` on.

    `first_rows` are batch rows, `limits` the KV rows that each span's first query may see.
    """

    spans: tuple[int, ...]
    first_rows: tuple[int, ...]
    limits: tuple[int, ...]
    queries: int


def plan_tiles(spans: Sequence[Span], heads: int) -> Iterator[Tile]:
    """Cut a batch into tiles of about `TILE_SCORES` scores."""
    rows = np.cumsum([0, *(span.length for span in spans)])
    by_length: dict[int, list[int]] = {}
    for index, span in enumerate(spans):
        assert span.length >= 1, span
        if span.length * heads * span.stop > TILE_SCORES:
            yield from _split_span(index, span, int(rows[index]), heads)
        else:
            by_length.setdefault(span.length, []).append(index)
    for length, members in by_length.items():
        members.sort(key=lambda i: spans[i].start)
        batch: list[int] = []
        for i in members:
            size = (len(batch) + 1) * length * heads * spans[i].stop
            # Padding wastes work: do not pad a sequence to more than twice its rows.
            if batch and (size > TILE_SCORES or spans[i].stop > 2 * spans[batch[0]].stop):
                yield _joined(spans, rows, batch)
                batch = []
            batch.append(i)
        yield _joined(spans, rows, batch)


def _joined(spans: Sequence[Span], rows: NDArray[Any], batch: list[int]) -> Tile:
    return Tile(
        tuple(batch),
        tuple(int(rows[i]) for i in batch),
        tuple(spans[i].start + 1 for i in batch),
        spans[batch[0]].length,
    )


def _split_span(index: int, span: Span, first_row: int, heads: int) -> Iterator[Tile]:
    step = max(1, TILE_SCORES // (heads * span.stop))
    for offset in range(0, span.length, step):
        queries = min(step, span.length - offset)
        yield Tile((index,), (first_row + offset,), (span.start + offset + 1,), queries)


class Attention:
    """Input norm, MLA and residual of one layer."""

    def __init__(self, checkpoint: Checkpoint, layer: int, mode: Mode, rope: Rope) -> None:
        args = checkpoint.args
        self._args, self._layer, self._rope = args, layer, rope
        self._exact = mode != "f32"
        self._norm = exact.rms_norm if self._exact else plain.rms_norm
        prefix = f"model.layers.{layer}."

        def weight(name: str) -> Float32:
            return checkpoint.tensor(f"{prefix}self_attn.{name}.weight")

        self._input_norm = checkpoint.tensor(f"{prefix}input_layernorm.weight")
        self._kv_norm = weight("kv_a_layernorm")
        # Query and KV projections read the same rows: one product instead of two.
        query = "q_proj" if args.q_lora_rank is None else "q_a_proj"
        joined = np.concatenate([weight(query), weight("kv_a_proj_with_mqa")])
        self._project_in = wide_linear(joined, mode)
        self._query_norm: Float32 | None = None
        self._query_up: Linear | None = None
        if args.q_lora_rank is not None:
            self._query_norm = weight("q_a_layernorm")
            self._query_up = wide_linear(weight("q_b_proj"), mode)
        nope = args.qk_nope_head_dim
        up = weight("kv_b_proj").reshape(args.num_attention_heads, -1, args.kv_lora_rank)
        self._key_up = precise_linear(np.swapaxes(up[:, :nope], 1, 2), mode)
        self._value_up = precise_linear(up[:, nope:], mode)
        self._project_out = wide_linear(weight("o_proj"), mode)
        self._softmax_bits = exact.softmax_bits(args.max_kv_rows)
        self._scale = softmax_scale(args)

    def forward(
        self, x: Float32, spans: Sequence[Span], kv: KvStore, position_shift: int
    ) -> Float32:
        """`[tokens, hidden] -> [tokens, hidden]`; writes the batch's KV rows, then attends.

        The rotary position of a row is its KV row plus `position_shift`.
        """
        args = self._args
        tokens = len(x)
        assert sum(span.length for span in spans) == tokens, "spans must cover the batch"
        positions = np.concatenate([np.arange(span.start, span.stop) for span in spans])
        positions += position_shift
        projected = self._project_in(self._norm(x, self._input_norm, args.rms_norm_eps))
        query, latent, key = np.split(
            projected, [projected.shape[1] - args.kv_width, -args.qk_rope_head_dim], axis=1
        )
        if self._query_up is not None:
            assert self._query_norm is not None
            query = self._query_up(self._norm(query, self._query_norm, INNER_EPS))
        query = query.reshape(tokens, args.num_attention_heads, args.qk_head_dim)
        nope = args.qk_nope_head_dim
        # Keys turn like one more head.
        turning = np.concatenate([query[..., nope:], key[:, None]], axis=1)
        turned = self._rope.rotate(turning, positions)
        latent = self._norm(latent, self._kv_norm, INNER_EPS)
        self._write(np.concatenate([latent, turned[:, -1]], axis=1), spans, kv)
        absorbed = self._key_up(query[..., :nope].swapaxes(0, 1)).swapaxes(0, 1)
        queries = np.concatenate([absorbed, turned[:, :-1]], axis=2)
        latents = self._core(queries, spans, kv)
        values = self._value_up(latents.swapaxes(0, 1)).swapaxes(0, 1)
        return x + self._project_out(values.reshape(tokens, -1))

    def _write(self, rows: Float32, spans: Sequence[Span], kv: KvStore) -> None:
        if self._exact:
            rows = exact.to_kv_grid(rows)
        first = 0
        for span in spans:
            kv.write(span.sequence, self._layer, span.start, rows[first : first + span.length])
            first += span.length

    def _core(self, queries: Float32, spans: Sequence[Span], kv: KvStore) -> Float32:
        """Scores, softmax and values: `[tokens, heads, width] -> [tokens, heads, kv_lora]`."""
        tokens, heads, _ = queries.shape
        out = np.empty((tokens, heads, self._args.kv_lora_rank), np.float32)
        attend = self._attend_exact if self._exact else self._attend_plain
        dtype = np.float64 if self._exact else np.float32
        cached: tuple[int, NDArray[Any]] | None = None  # rows of the span that is being split
        for tile in plan_tiles(spans, heads):
            seen = max(tile.limits) + tile.queries - 1
            if len(tile.spans) > 1:
                rows = self._padded(tile, spans, kv, seen)
            else:
                span = spans[tile.spans[0]]
                if cached is None or cached[0] != tile.spans[0]:
                    whole = kv.read(span.sequence, self._layer, span.stop)
                    cached = (tile.spans[0], whole.astype(dtype))
                rows = cached[1][None, :seen]
            index = np.add.outer(tile.first_rows, np.arange(tile.queries))
            limits = np.add.outer(tile.limits, np.arange(tile.queries))
            hidden = np.arange(seen) >= limits[..., None, None]  # [spans, queries, 1, rows]
            out[index] = attend(queries[index], rows, hidden)
        return out

    def _padded(self, tile: Tile, spans: Sequence[Span], kv: KvStore, seen: int) -> NDArray[Any]:
        """KV rows of several spans as `[spans, seen, width]`, zeros behind the shorter ones."""
        dtype = np.float64 if self._exact else np.float32
        rows = np.zeros((len(tile.spans), seen, self._args.kv_width), dtype)
        for slot, index in enumerate(tile.spans):
            span = spans[index]
            rows[slot, : span.stop] = kv.read(span.sequence, self._layer, span.stop)
        return rows

    def _attend_exact(
        self, queries: Float32, rows: NDArray[Any], hidden: NDArray[np.bool_]
    ) -> Float32:
        """`queries [spans, n, heads, width]`, `rows [spans, seen, width]` of grid integers."""
        groups, n, heads, width = queries.shape
        seen = rows.shape[1]
        assert seen <= exact.softmax_max_rows(self._softmax_bits), "context beyond the bit budget"
        integers, scale = exact.fixed_point(queries.reshape(groups, n * heads, width))
        scores = integers @ rows.swapaxes(1, 2)
        scores *= scale * (self._scale * exact.LOG2_E / (1 << exact.KV_FRACTION_BITS))
        if hidden.any():
            np.copyto(scores.reshape(groups, n, heads, seen), _MASKED, where=hidden)
        weights = exact.softmax_numerators(scores, self._softmax_bits)
        total = weights.sum(axis=-1, keepdims=True)
        latents: NDArray[Any] = weights @ rows[..., : self._args.kv_lora_rank]
        latents /= total * float(1 << exact.KV_FRACTION_BITS)
        return np.asarray(latents.reshape(groups, n, heads, -1), np.float32)

    def _attend_plain(
        self, queries: Float32, rows: NDArray[Any], hidden: NDArray[np.bool_]
    ) -> Float32:
        groups, n, heads, width = queries.shape
        scores = queries.reshape(groups, n * heads, width) @ rows.swapaxes(1, 2)
        scores *= np.float32(self._scale)
        np.copyto(scores.reshape(groups, n, heads, -1), np.float32(_MASKED), where=hidden)
        latents: NDArray[Any] = plain.softmax(scores) @ rows[..., : self._args.kv_lora_rank]
        return np.asarray(latents.reshape(groups, n, heads, -1), np.float32)
