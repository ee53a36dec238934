"""Multi-token prediction: the small layer that drafts tokens from the main model's hidden states.

    x = eh_proj([enorm(embedding of token i + 1 + depth) | hnorm(hidden of position i)])
    x = one ordinary block (attention with its own KV rows, then experts)
    hidden = shared_head.norm(x);  logits = lm_head(hidden)

At depth 0 `hidden` is the main model's final hidden after its norm, at depth 1 it is depth 0's own
output, also after its norm. Rotary position is `i + 1 + depth`. A checkpoint with fewer trained
layers than the depth asked for reuses its last one: the recycled step then writes one row behind
the rows that were made from the main model's hidden states, attends to those, and is overwritten by
the next verified one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from libs.model import exact, plain
from libs.model.kv import Span
from libs.model.linear import Mode, precise_linear
from libs.model.weights import Checkpoint

Float32 = NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class MtpPlace:
    """Where a draft step of some depth runs: its layer, and how far its KV rows lie behind `i`."""

    layer: int
    row_shift: int

    def shift(self, spans: Sequence[Span]) -> tuple[Span, ...]:
        """Spans of main positions as spans of the layer's KV rows."""
        return tuple(replace(span, start=span.start + self.row_shift) for span in spans)


class MtpEnds:
    """What an MTP layer has beside its block: the joined input and the output norm."""

    def __init__(self, checkpoint: Checkpoint, layer: int, mode: Mode) -> None:
        prefix = f"model.layers.{layer}."
        self._eps = checkpoint.args.rms_norm_eps
        self._norm = plain.rms_norm if mode == "f32" else exact.rms_norm
        self._embedding_norm = checkpoint.tensor(f"{prefix}enorm.weight")
        self._hidden_norm = checkpoint.tensor(f"{prefix}hnorm.weight")
        self._join = precise_linear(checkpoint.tensor(f"{prefix}eh_proj.weight"), mode)
        self._head_norm = checkpoint.tensor(f"{prefix}shared_head.norm.weight")

    def join(self, embedded: Float32, hidden: Float32) -> Float32:
        """Embedding half first: `[tokens, hidden]` twice `-> [tokens, hidden]`."""
        assert embedded.shape == hidden.shape, (embedded.shape, hidden.shape)
        halves = (
            self._norm(embedded, self._embedding_norm, self._eps),
            self._norm(hidden, self._hidden_norm, self._eps),
        )
        return self._join(np.concatenate(halves, axis=1))

    def finish(self, x: Float32) -> Float32:
        """The hidden state that the head reads and that a further draft step recycles."""
        return self._norm(x, self._head_norm, self._eps)
