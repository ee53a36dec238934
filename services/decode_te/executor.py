"""The executor of a decode DP group: attention, gate, head and sampling of the model.

It holds the paged KV and the hidden state of the iteration under way; the experts are elsewhere.
Rows are split by expert die here, because the routing is tensor data, but who lives where is the
core's word.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from libs.errors import TransferFailed
from libs.model.any_engine import AnyEngine
from libs.model.kv import PagedKv, Span
from libs.model.moe import Routed as GateRouted
from libs.model.sampling import Sampled, sample
from services.decode_te.jobs import (
    BatchRow,
    BeginIteration,
    DieRows,
    ImportKv,
    IterationDone,
    ResumeIteration,
    Routed,
)


class DecodeExecutor:
    """Runs the jobs of `services.decode_te.jobs`; one iteration at a time."""

    def __init__(self, engine: AnyEngine, kv: PagedKv) -> None:
        self.engine = engine
        self.kv = kv
        self._batch: tuple[BatchRow, ...] = ()
        self._spans: tuple[Span, ...] = ()
        self._hidden = np.empty((0, engine.args.hidden_size), np.float32)
        self._die_of: np.ndarray = np.empty(0, np.int32)
        self._rows_of_die: dict[int, np.ndarray] = {}

    def run(self, job: Any) -> Any:
        """One job to its end."""
        match job:
            case ImportKv():
                return self._import(job)
            case BeginIteration():
                return self._begin(job)
            case ResumeIteration():
                return self._resume(job)
            case _:
                raise AssertionError(f"unknown job {job!r}")

    def _import(self, job: ImportKv) -> int:
        shape = self.kv.block_shape
        if job.data.nbytes % (4 * math.prod(shape)):
            raise TransferFailed(f"{job.data.nbytes} bytes are no blocks of shape {list(shape)}")
        self.kv.bind(job.sequence, job.block_ids)
        blocks = job.data.view(np.float32).reshape(-1, *shape)
        for block_id, rows in zip(job.block_ids, blocks, strict=False):
            self.kv.import_block(block_id, rows)
        return job.data.nbytes

    def _begin(self, job: BeginIteration) -> Routed | IterationDone:
        for sequence in job.ended:
            self.kv.unbind(sequence)
        self._batch = job.rows
        self._spans = tuple(Span(row.sequence, row.position, 1) for row in job.rows)
        self._die_of = np.asarray(job.die_of, np.int32)
        self._hidden = self.engine.embed(np.asarray([row.token for row in job.rows]))
        return self._advance(0)

    def _resume(self, job: ResumeIteration) -> Routed | IterationDone:
        total = None
        for die, partial in job.partials:
            rows = self._rows_of_die[die]
            # Sums from a die are input: a wrong one must end the iteration, not this process.
            if partial.shape != (len(rows), self._hidden.shape[1]):
                raise TransferFailed(f"die {die} answered with shape {partial.shape}")
            if partial.dtype.kind != "f" or not np.isfinite(partial).all():
                raise TransferFailed(f"die {die} answered with values that are no sums")
            if total is None:
                total = np.zeros(self._hidden.shape, partial.dtype)
            total[rows] += partial
        assert total is not None, "a layer has at least one die: the shared expert's"
        self._hidden = self.engine.combine(self._hidden, [total])
        return self._advance(job.layer + 1)

    def _advance(self, layer: int) -> Routed | IterationDone:
        """Compute from `layer` to the next exchange, or to the end of the iteration."""
        engine = self.engine
        while layer < engine.args.num_hidden_layers:
            self._hidden = engine.attend(layer, self._hidden, self._spans, self.kv)
            if engine.is_moe(layer):
                return self._split(layer, engine.gate(layer, self._hidden))
            self._hidden = engine.dense_mlp(layer, self._hidden)
            layer += 1
        logits = engine.head(self._hidden)
        return IterationDone(
            tuple(_sample(row, z) for row, z in zip(self._batch, logits, strict=True))
        )

    def _split(self, layer: int, routed: GateRouted) -> Routed:
        """Rows per die: every row that has a chosen expert there; the shared expert takes all."""
        tokens = routed.topk_idx.shape[0]
        die_of_choice = self._die_of[routed.topk_idx]
        self._rows_of_die = {}
        parts = []
        for die in sorted(set(self._die_of.tolist())):
            chosen = (die_of_choice == die).any(axis=1) | (die == self._die_of[-1])
            rows = np.flatnonzero(chosen) if tokens else np.empty(0, np.intp)
            if len(rows) == 0:
                continue
            self._rows_of_die[die] = rows
            scale = routed.rows.scale
            parts.append(
                DieRows(
                    die,
                    routed.rows.data[rows],
                    np.empty((0, 1), np.float32) if scale is None else scale[rows],
                    routed.topk_idx[rows],
                    routed.topk_weights[rows],
                )
            )
        return Routed(layer, tuple(parts))


def _sample(row: BatchRow, logits: np.ndarray) -> Sampled:
    # The token to be chosen sits one past the row that was just fed.
    position = row.position + 1
    prompt = row.prompt_ids.tolist()
    return sample(logits, row.sampling, row.output, prompt, position, row.choice)
