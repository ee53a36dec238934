"""The numeric engine: a checkpoint made computable, in pieces that services place on dies.

    x = embed(token_ids)
    per layer:   x = attend(layer, x, spans, kv)
                 x = dense_mlp(layer, x)                                   first layers
                 routed = gate(layer, x)                                   A2E
                 partial = expert_partial(layer, rows, idx, weights, ids)  on each expert die, E2A
                 x = combine(x, partials)
    logits = head(x)

`forward` composes the pieces in one process; the pod's executors call them one by one. All state is
in the KV store that the caller passes, so an engine may be shared by threads and forked.

Modes: `int8` (W8A8) and `fx` (20-bit fixed point) give the same bits whatever the batch, chunking,
expert order, placement, partial sums or BLAS kernel (`exact.py` says why); `f32` does not.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from libs.errors import InvariantError
from libs.model import exact, plain
from libs.model.args import ModelArgs
from libs.model.attention import Attention
from libs.model.kv import ContiguousKv, KvStore, PagedKv, Span
from libs.model.linear import Rows, check_mode, precise_linear
from libs.model.moe import DenseMlp, ExpertPool, Gate, Routed, combine
from libs.model.mtp import MtpEnds, MtpPlace
from libs.model.rope import Rope
from libs.model.weights import Checkpoint

Float32 = NDArray[np.float32]
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Parts:
    """What of a model a process loads.

    `attention` is everything but the experts. `experts` lists expert ids per layer; `None` means
    all of them. An expert die has `Parts(attention=False, experts={3: {0, 7}})`, an attention die
    `Parts(experts={})`.
    """

    attention: bool = True
    experts: Mapping[int, Collection[int]] | None = None


class Engine:
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

    @property
    def num_moe_layers(self) -> int:
        """MoE layers of the main model."""
        return self.args.num_moe_layers

    def is_moe(self, layer: int) -> bool:
        """Whether `layer` (main or MTP) has experts."""
        return self.args.is_moe(layer)

    def contiguous_kv(self) -> ContiguousKv:
        """A KV store of this model's size, growing per sequence."""
        return ContiguousKv(self.args.num_kv_layers, self.args.kv_width)

    def paged_kv(self, num_blocks: int, block_size: int) -> PagedKv:
        """A KV store of this model's size in fixed blocks."""
        return PagedKv(num_blocks, block_size, self.args.num_kv_layers, self.args.kv_width)

    # ------------------------------------------------------------ attention side

    def embed(self, token_ids: NDArray[Any] | Sequence[int]) -> Float32:
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

    def head(self, x: Float32) -> Float32:
        """`logits(final_hidden(x))`."""
        return self.logits(self.final_hidden(x))

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

    # ------------------------------------------------------------ the pieces composed

    def mlp(self, layer: int, x: Float32) -> Float32:
        """The second half of a layer, in one process."""
        if not self.is_moe(layer):
            return self.dense_mlp(layer, x)
        routed = self.gate(layer, x)
        partial = self.expert_partial(
            layer, routed.rows, routed.topk_idx, routed.topk_weights, self.args.expert_ids()
        )
        return self.combine(x, [partial])

    def forward(
        self, token_ids: NDArray[Any] | Sequence[int], spans: Sequence[Span], kv: KvStore
    ) -> tuple[Float32, Float32]:
        """The main model: `(logits [tokens, vocab], final hidden [tokens, hidden])`."""
        x = self.embed(token_ids)
        for layer in range(self.args.num_hidden_layers):
            x = self.mlp(layer, self.attend(layer, x, spans, kv))
        hidden = self.final_hidden(x)
        return self.logits(hidden), hidden

    # ------------------------------------------------------------ drafts

    def mtp_place(self, depth: int) -> MtpPlace:
        """The layer that drafts at `depth` (0 is the first draft) and its KV row shift."""
        trained = self.args.num_nextn_predict_layers
        if trained == 0 or depth < 0:
            raise InvariantError(f"no MTP layer for depth {depth}; the model has {trained}")
        used = min(depth, trained - 1)
        return MtpPlace(self.args.num_hidden_layers + used, depth - used)

    def mtp_embed(
        self, layer: int, hidden: Float32, next_token_ids: NDArray[Any] | Sequence[int]
    ) -> Float32:
        """The input of MTP layer `layer`: hidden states joined with the tokens that follow them."""
        return _loaded(self._mtp, layer, "MTP").join(self.embed(next_token_ids), hidden)

    def mtp_hidden(self, layer: int, x: Float32) -> Float32:
        """The output of MTP layer `layer` after its norm; `logits` of it are the draft's."""
        return _loaded(self._mtp, layer, "MTP").finish(x)

    def mtp_forward(
        self,
        depth: int,
        hidden: Float32,
        next_token_ids: NDArray[Any] | Sequence[int],
        spans: Sequence[Span],
        kv: KvStore,
    ) -> tuple[Float32, Float32]:
        """One draft step in one process: `(logits, hidden)` as `forward`.

        Row of position `i`: `hidden` belongs to `i`, `next_token_ids` holds token `i + 1 + depth`,
        the logits are of token `i + 2 + depth`. Spans count positions `i`.
        """
        place = self.mtp_place(depth)
        x = self.mtp_embed(place.layer, hidden, next_token_ids)
        x = self.attend(place.layer, x, place.shift(spans), kv)
        drafted = self.mtp_hidden(place.layer, self.mlp(place.layer, x))
        return self.logits(drafted), drafted


def _loaded(parts: Mapping[int, T], layer: int, what: str) -> T:
    part = parts.get(layer)
    if part is None:
        raise InvariantError(f"this engine holds no {what} for layer {layer}")
    return part
