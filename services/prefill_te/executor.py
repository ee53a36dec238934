"""The tensor executor of a prefill DP group: the whole model, experts included, on its own dies.

Execution is eager with the prompt's own shape (P029); prefill keeps its experts inside the TE. What
is cached is a span that starts later: the rows in front of it are in the blocks, and the bits of
the others do not depend on who computed those, or when.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from libs.model.any_engine import AnyEngine
from libs.model.kv import PagedKv, Span
from libs.model.sampling import Sampled, sample
from services.prefill_te.jobs import ExportedKv, ExportKv, PrefillJob


class PrefillExecutor:
    """Runs the jobs of `services.prefill_te.jobs`; `host_blocks` evicted blocks fit on the host."""

    def __init__(self, engine: AnyEngine, kv: PagedKv, host_blocks: int = 0) -> None:
        self.engine = engine
        self.kv = kv
        self._host = np.empty((host_blocks, *kv.block_shape), np.float32)

    def run(self, job: Any) -> Any:
        """One job to its end."""
        match job:
            case PrefillJob():
                return self._prefill(job)
            case ExportKv():
                return self._export(job)
            case _:
                raise AssertionError(f"unknown job {job!r}")

    def _prefill(self, job: PrefillJob) -> Sampled:
        self._copy(job)
        self.kv.bind(job.sequence, job.block_ids)
        length = int(job.prompt_ids.shape[0]) - job.cached_rows
        spans = (Span(job.sequence, job.cached_rows, length),)
        x = self.engine.embed(job.prompt_ids[job.cached_rows :])
        for layer in range(self.engine.args.num_hidden_layers):
            x = self.engine.mlp(layer, self.engine.attend(layer, x, spans, self.kv))
        # Only the last position is sampled, so only it needs the vocabulary-wide product.
        logits = self.engine.head(x[-1:])
        prompt = job.prompt_ids.tolist()
        picked = sample(logits[0], job.sampling, (), prompt, len(prompt), job.choice)
        # The block table belongs to the core; the rows stay where they are until it frees the
        # blocks.
        self.kv.unbind(job.sequence)
        return picked

    def _copy(self, job: PrefillJob) -> None:
        """Between blocks and host memory; a block or slot may be source and target."""
        filled = self._host[[slot for slot, _ in job.fills]]
        for block_id, slot in job.spills:
            self._host[slot] = self.kv.export_block(block_id)
        for (_, block_id), rows in zip(job.fills, filled, strict=True):
            self.kv.import_block(block_id, rows)

    def _export(self, job: ExportKv) -> ExportedKv:
        blocks = np.stack([self.kv.export_block(block_id) for block_id in job.block_ids])
        return ExportedKv(blocks.reshape(-1).view(np.uint8))
