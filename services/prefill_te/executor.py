"""The tensor executor of a prefill DP group: the whole model, experts included, on its own dies.

Execution is eager with the prompt's own shape (P029); prefill keeps its experts inside the TE.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from libs.model.engine import Engine
from libs.model.kv import PagedKv, Span
from libs.model.sampling import Sampled, sample
from services.prefill_te.jobs import ExportedKv, ExportKv, PrefillJob


class PrefillExecutor:
    """Runs the jobs of `services.prefill_te.jobs`."""

    def __init__(self, engine: Engine, kv: PagedKv) -> None:
        self.engine = engine
        self.kv = kv

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
        self.kv.bind(job.sequence, job.block_ids)
        spans = (Span(job.sequence, 0, int(job.prompt_ids.shape[0])),)
        x = self.engine.embed(job.prompt_ids)
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

    def _export(self, job: ExportKv) -> ExportedKv:
        blocks = np.stack([self.kv.export_block(block_id) for block_id in job.block_ids])
        return ExportedKv(blocks.reshape(-1).view(np.uint8))
