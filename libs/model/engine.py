"""The numeric engine: a checkpoint made computable, in the pieces of `libs.model.any_engine`.

Modes: `int8` (W8A8) and `fx` (20-bit fixed point) give the same bits whatever the batch, chunking,
expert order, placement, partial sums or BLAS kernel (`exact.py` says why); `f32` does not.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from libs.errors import InvariantError
from libs.model import exact, plain
from libs.model.any_engine import AnyEngine, Float32, Parts, TokenIds
from libs.model.args import ModelArgs
from libs.model.attention import Attention
from libs.model.kv import KvStore, Span
from libs.model.linear import Rows, check_mode, precise_linear
from libs.model.moe import DenseMlp, ExpertPool, Gate, Routed, combine
from libs.model.mtp import MtpEnds
from libs.model.rope import Rope
from libs.model.weights import Checkpoint

__all__ = ["Engine", "Float32", "Parts"]

T = TypeVar("T")


class Engine(AnyEngine):
    """One model, or the parts of it that this process holds, in one arithmetic mode."""

    def __init__(
        self, checkpoint: Checkpoint, mode: str = "int8", parts: Parts | None = None
    ) -> None:
        parts = parts or Parts()
        self.args: ModelArgs = checkpoint.args
        self.mode = check_mode(mode)
        args = self.args
        layers = range(args.num_kv_layers)
        self._pools = {
            layer: ExpertPool(checkpoint, layer, self.mode)
            for layer in layers
            if args.is_moe(layer)
        }
        self._norm = plain.rms_norm if self.mode == "f32" else exact.rms_norm
        self._attention: dict[int, Attention] = {}
        self._gates: dict[int, Gate] = {}
        self._dense: dict[int, DenseMlp] = {}
        self._mtp: dict[int, MtpEnds] = {}
        if parts.attention:
            self._load_attention_side(checkpoint)
        wanted = parts.experts
        if wanted is None:
            wanted = dict.fromkeys(self._pools, args.expert_ids())
        for layer, experts in wanted.items():
            self.hold_experts(layer, experts)

    def _load_attention_side(self, checkpoint: Checkpoint) -> None:
        args = self.args
        embedding = checkpoint.tensor("model.embed_tokens.weight")
        self._embedding = embedding
        self._final_norm = checkpoint.tensor("model.norm.weight")
        head = embedding if args.tie_word_embeddings else checkpoint.tensor("lm_head.weight")
        self._head = precise_linear(head, self.mode)
        rope = Rope(args, args.max_kv_rows)
        for layer in range(args.num_kv_layers):
            self._attention[layer] = Attention(checkpoint, layer, self.mode, rope)
            if args.is_moe(layer):
                self._gates[layer] = Gate(checkpoint, layer, self.mode)
            else:
                self._dense[layer] = DenseMlp(checkpoint, layer, self.mode)
        for layer in range(args.num_hidden_layers, args.num_kv_layers):
            self._mtp[layer] = MtpEnds(checkpoint, layer, self.mode)

    # ------------------------------------------------------------ attention side

    def embed(self, token_ids: TokenIds) -> Float32:
        """`[tokens] -> [tokens, hidden]`."""
        ids = np.asarray(token_ids, np.intp)
        # A negative index would quietly read another token's row.
        assert ids.size == 0 or 0 <= ids.min() <= ids.max() < self.args.vocab_size, "foreign token"
        return self._embedding[ids]

    def attend(self, layer: int, x: Float32, spans: Sequence[Span], kv: KvStore) -> Float32:
        """Input norm, latent attention and residual over a batch of spans.

        Writes the batch's KV rows at each span's positions and attends to rows `0 .. span.stop` of
        its sequence, causally. In MTP layers span positions count KV rows (see `mtp_place`).
        """
        attention = _loaded(self._attention, layer, "attention")
        shift = max(0, layer - self.args.num_hidden_layers + 1)
        return attention.forward(x, spans, kv, shift)

    def dense_mlp(self, layer: int, x: Float32) -> Float32:
        """Post-attention norm, MLP and residual of a layer without experts."""
        return _loaded(self._dense, layer, "dense MLP").forward(x)

    def gate(self, layer: int, x: Float32) -> Routed:
        """Post-attention norm, routing, and the rows that travel to the experts."""
        return _loaded(self._gates, layer, "gate").route(x)

    def combine(self, x: Float32, partials: Sequence[NDArray[Any]]) -> Float32:
        """Residual plus the experts' partial sums, in any order."""
        return combine(x, partials, self.mode)

    def final_hidden(self, x: Float32) -> Float32:
        """The hidden state after the last norm, `[tokens, hidden]`: what MTP and the head read."""
        return self._norm(x, self._final_norm, self.args.rms_norm_eps)

    def logits(self, hidden: Float32) -> Float32:
        """`[tokens, hidden] -> [tokens, vocab]` of a final hidden state, main or MTP."""
        return self._head(hidden)

    # ------------------------------------------------------------ expert side

    def hold_experts(self, layer: int, experts: Collection[int]) -> None:
        """Load the weights of `experts` of `layer` beside those already held."""
        _loaded(self._pools, layer, "experts").hold(experts)

    def release_experts(self, layer: int, experts: Collection[int]) -> None:
        """Drop weights of `experts` of `layer`."""
        _loaded(self._pools, layer, "experts").release(experts)

    def held_experts(self, layer: int) -> tuple[int, ...]:
        """The experts of `layer` whose weights are loaded, ascending."""
        return _loaded(self._pools, layer, "experts").held

    def expert_partial(
        self,
        layer: int,
        rows: Rows,
        topk_idx: NDArray[np.int32],
        topk_weights: Float32,
        experts: Sequence[int],
    ) -> NDArray[Any]:
        """Sum the weighted outputs of those of `experts` that each row chose, `[tokens, hidden]`.

        float64 integers of the 2^-24 grid, or float32 sums in mode `f32`. Listing the shared expert
        (id `args.n_routed_experts`) adds it to every row.
        """
        pool = _loaded(self._pools, layer, "experts")
        return pool.partial(rows, topk_idx, topk_weights, experts)

    # ------------------------------------------------------------ drafts

    def mtp_embed(self, layer: int, hidden: Float32, next_token_ids: TokenIds) -> Float32:
        """The input of MTP layer `layer`: hidden states joined with the tokens that follow them."""
        return _loaded(self._mtp, layer, "MTP").join(self.embed(next_token_ids), hidden)

    def mtp_hidden(self, layer: int, x: Float32) -> Float32:
        """The output of MTP layer `layer` after its norm; `logits` of it are the draft's."""
        return _loaded(self._mtp, layer, "MTP").finish(x)


def _loaded(parts: Mapping[int, T], layer: int, what: str) -> T:
    part = parts.get(layer)
    if part is None:
        raise InvariantError(f"this engine holds no {what} for layer {layer}")
    return part
