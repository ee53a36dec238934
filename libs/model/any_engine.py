"""What every engine offers: the pieces of a model that services place on dies, and their sequence.

    x = embed(token_ids)
    per layer:   x = attend(layer, x, spans, kv)
                 x = dense_mlp(layer, x)                                   first layers
                 routed = gate(layer, x)                                   A2E
                 partial = expert_partial(layer, rows, idx, weights, ids)  on each expert die, E2A
                 x = combine(x, partials)
    logits = head(x)

`libs.model.engine` computes the pieces with a checkpoint's tensors, `libs.model.digest` with
digests of whatever the tensors would depend on. How they follow each other is written once, here,
so that the reference and the pod run one model whichever engine is behind it. All state is in the
KV store that the caller passes, so an engine may be shared by threads and forked.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from libs.errors import InvariantError
from libs.model.args import ModelArgs
from libs.model.kv import ContiguousKv, KvStore, PagedKv, Span
from libs.model.linear import Rows
from libs.model.moe import Routed
from libs.model.mtp import MtpPlace

#: Rows of an engine's own kind, `[tokens, args.hidden_size]`: float32, or digests in uint64.
Hidden = NDArray[Any]
TokenIds = NDArray[Any] | Sequence[int]
Float32 = NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class Parts:
    """What of a model a process loads.

    `attention` is everything but the experts. `experts` lists expert ids per layer; `None` means
    all of them. An expert die has `Parts(attention=False, experts={3: {0, 7}})`, an attention die
    `Parts(experts={})`.
    """

    attention: bool = True
    experts: Mapping[int, Collection[int]] | None = None


class AnyEngine(ABC):
    """One model, or the parts of it that this process holds.

    `args` are the sizes of the rows that this engine makes, which need not be the checkpoint's.
    """

    args: ModelArgs

    # ------------------------------------------------------------ attention side

    @abstractmethod
    def embed(self, token_ids: TokenIds) -> Hidden:
        """`[tokens] -> [tokens, hidden]`."""

    @abstractmethod
    def attend(self, layer: int, x: Hidden, spans: Sequence[Span], kv: KvStore) -> Hidden:
        """Input norm, latent attention and residual over a batch of spans.

        Writes the batch's KV rows at each span's positions and attends to rows `0 .. span.stop` of
        its sequence, causally. In MTP layers span positions count KV rows (see `mtp_place`).
        """

    @abstractmethod
    def dense_mlp(self, layer: int, x: Hidden) -> Hidden:
        """Post-attention norm, MLP and residual of a layer without experts."""

    @abstractmethod
    def gate(self, layer: int, x: Hidden) -> Routed:
        """Post-attention norm, routing, and the rows that travel to the experts."""

    @abstractmethod
    def combine(self, x: Hidden, partials: Sequence[NDArray[Any]]) -> Hidden:
        """Residual plus the experts' partial sums, in any order."""

    @abstractmethod
    def final_hidden(self, x: Hidden) -> Hidden:
        """The hidden state after the last norm, `[tokens, hidden]`: what MTP and the head read."""

    @abstractmethod
    def logits(self, hidden: Hidden) -> Float32:
        """`[tokens, hidden] -> [tokens, vocab]` of a final hidden state, main or MTP."""

    # ------------------------------------------------------------ expert side

    @abstractmethod
    def hold_experts(self, layer: int, experts: Collection[int]) -> None:
        """Hold `experts` of `layer` beside those already held."""

    @abstractmethod
    def release_experts(self, layer: int, experts: Collection[int]) -> None:
        """Hold `experts` of `layer` no longer."""

    @abstractmethod
    def held_experts(self, layer: int) -> tuple[int, ...]:
        """The experts of `layer` that are held, ascending."""

    @abstractmethod
    def expert_partial(
        self,
        layer: int,
        rows: Rows,
        topk_idx: NDArray[np.int32],
        topk_weights: Float32,
        experts: Sequence[int],
    ) -> NDArray[Any]:
        """Sum the weighted outputs of those of `experts` that each row chose, `[tokens, hidden]`.

        Listing the shared expert (id `args.n_routed_experts`) adds it to every row.
        """

    # ------------------------------------------------------------ drafts

    @abstractmethod
    def mtp_embed(self, layer: int, hidden: Hidden, next_token_ids: TokenIds) -> Hidden:
        """The input of MTP layer `layer`: hidden states joined with the tokens that follow them."""

    @abstractmethod
    def mtp_hidden(self, layer: int, x: Hidden) -> Hidden:
        """The output of MTP layer `layer` after its norm; `logits` of it are the draft's."""

    # ------------------------------------------------------------ sizes and places

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

    def mtp_place(self, depth: int) -> MtpPlace:
        """The layer that drafts at `depth` (0 is the first draft) and its KV row shift."""
        trained = self.args.num_nextn_predict_layers
        if trained == 0 or depth < 0:
            raise InvariantError(f"no MTP layer for depth {depth}; the model has {trained}")
        used = min(depth, trained - 1)
        return MtpPlace(self.args.num_hidden_layers + used, depth - used)

    # ------------------------------------------------------------ the pieces composed

    def head(self, x: Hidden) -> Float32:
        """`logits(final_hidden(x))`."""
        return self.logits(self.final_hidden(x))

    def mlp(self, layer: int, x: Hidden) -> Hidden:
        """The second half of a layer, in one process."""
        if not self.is_moe(layer):
            return self.dense_mlp(layer, x)
        routed = self.gate(layer, x)
        partial = self.expert_partial(
            layer, routed.rows, routed.topk_idx, routed.topk_weights, self.args.expert_ids()
        )
        return self.combine(x, [partial])

    def hidden_states(self, token_ids: TokenIds, spans: Sequence[Span], kv: KvStore) -> Hidden:
        """The main model up to the head: final hidden states `[tokens, hidden]`."""
        x = self.embed(token_ids)
        for layer in range(self.args.num_hidden_layers):
            x = self.mlp(layer, self.attend(layer, x, spans, kv))
        return self.final_hidden(x)

    def forward(
        self, token_ids: TokenIds, spans: Sequence[Span], kv: KvStore
    ) -> tuple[Float32, Hidden]:
        """The main model: `(logits [tokens, vocab], final hidden [tokens, hidden])`."""
        hidden = self.hidden_states(token_ids, spans, kv)
        return self.logits(hidden), hidden

    def mtp_forward(
        self,
        depth: int,
        hidden: Hidden,
        next_token_ids: TokenIds,
        spans: Sequence[Span],
        kv: KvStore,
    ) -> tuple[Float32, Hidden]:
        """One draft step in one process: `(logits, hidden)` as `forward`.

        Row of position `i`: `hidden` belongs to `i`, `next_token_ids` holds token `i + 1 + depth`,
        the logits are of token `i + 2 + depth`. Spans count positions `i`.
        """
        place = self.mtp_place(depth)
        x = self.mtp_embed(place.layer, hidden, next_token_ids)
        x = self.attend(place.layer, x, place.shift(spans), kv)
        drafted = self.mtp_hidden(place.layer, self.mlp(place.layer, x))
        return self.logits(drafted), drafted
