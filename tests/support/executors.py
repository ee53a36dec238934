"""Executors without a model: small deterministic functions in place of tensors.

What is said is a script: the n-th output token of a request is the n-th of its `answer`. But KV
counts: the KV of a prompt is its own digest (`kv_rows`), and a decode side that finds other rows in
a request's blocks samples `GARBLED`. A lost, stale or misrouted block changes the answer.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from libs.model.sampling import Sampled
from services.decode_te.jobs import (
    BeginIteration,
    DieRows,
    ImportKv,
    IterationDone,
    ResumeIteration,
    Routed,
)
from services.expert_die.core import ExpertJob
from services.prefill_te.jobs import ExportedKv, ExportKv, PrefillJob

HIDDEN = 4
NUM_LAYERS = 3
NUM_DENSE = 1
GARBLED = 63

#: The script: `answer(prompt_ids)[n]` is the n-th output token.
Script = Callable[[np.ndarray], Sequence[int]]


def block_bytes(block_size: int) -> int:
    """Bytes of one block of this KV."""
    return NUM_LAYERS * block_size * 4


def kv_rows(prompt_ids: np.ndarray, block: int, block_size: int) -> np.ndarray:
    """KV of one block, `[layers, block_size, 1]`: a digest of the prompt up to its end."""
    upto = np.ascontiguousarray(prompt_ids[: (block + 1) * block_size], np.int32)
    value = np.float32(zlib.crc32(upto.tobytes()) % 65_521)
    return np.full((NUM_LAYERS, block_size, 1), value, np.float32)


class ScriptedPrefill:
    """Keeps blocks by number, as paged memory does: what is overwritten is gone."""

    def __init__(self, answer: Script, block_size: int) -> None:
        self._answer = answer
        self._block_size = block_size
        self._memory: dict[int, np.ndarray] = {}
        self._host: dict[int, np.ndarray] = {}

    def run(self, job: Any) -> Any:
        match job:
            case PrefillJob():
                filled = [(block_id, self._host[slot]) for slot, block_id in job.fills]
                self._host |= {slot: self._memory[block_id] for block_id, slot in job.spills}
                self._memory |= dict(filled)
                for index in range(job.cached_rows // self._block_size, len(job.block_ids)):
                    rows = kv_rows(job.prompt_ids, index, self._block_size)
                    self._memory[job.block_ids[index]] = rows
                return Sampled(self._answer(job.prompt_ids)[0])
            case ExportKv():
                blocks = np.stack([self._memory[block_id] for block_id in job.block_ids])
                return ExportedKv(blocks.reshape(-1).view(np.uint8))
            case _:
                raise AssertionError(f"unknown job {job!r}")


class ScriptedDecode:
    """Runs `NUM_LAYERS` layers; every row visits every expert die, which must all answer."""

    def __init__(self, answer: Script, block_size: int) -> None:
        self._answer = answer
        self._block_size = block_size
        self._memory: dict[int, np.ndarray] = {}
        self._batch: BeginIteration | None = None

    def run(self, job: Any) -> Any:
        match job:
            case ImportKv():
                return self._import(job)
            case BeginIteration():
                self._batch = job
                return self._route(job, NUM_DENSE)
            case ResumeIteration():
                return self._resume(job)
            case _:
                raise AssertionError(f"unknown job {job!r}")

    def _import(self, job: ImportKv) -> int:
        blocks = job.data.view(np.float32).reshape(-1, NUM_LAYERS, self._block_size, 1)
        for block_id, rows in zip(job.block_ids, blocks, strict=False):
            self._memory[block_id] = rows.copy()  # the bytes are lent only for the import
        return job.data.nbytes

    def _route(self, batch: BeginIteration, layer: int) -> Routed:
        tokens = len(batch.rows)
        dies = sorted(set(batch.die_of))
        return Routed(layer, tuple(die_rows(die, tokens) for die in dies))

    def _resume(self, job: ResumeIteration) -> Routed | IterationDone:
        assert self._batch is not None
        wanted = (len(self._batch.rows), HIDDEN)
        assert all(partial.shape == wanted for _, partial in job.partials), "a die answered wrong"
        if job.layer + 1 < NUM_LAYERS:
            return self._route(self._batch, job.layer + 1)
        return IterationDone(tuple(Sampled(self._sample(row)) for row in self._batch.rows))

    def _sample(self, row: Any) -> int:
        for index in range(-(-row.prompt_ids.shape[0] // self._block_size)):
            expected = kv_rows(row.prompt_ids, index, self._block_size)
            if not np.array_equal(self._memory[row.block_ids[index]], expected):
                return GARBLED
        return int(self._answer(row.prompt_ids)[len(row.output)])


class ScriptedExpert:
    """Answers with zeros of the right shape."""

    def run(self, job: Any) -> np.ndarray:
        assert isinstance(job, ExpertJob)
        return np.zeros((job.rows.shape[0], HIDDEN), np.float32)


def die_rows(die: int, tokens: int = 1, choices: int = 1) -> DieRows:
    """Rows for one die, all zeros."""
    return DieRows(
        die,
        np.zeros((tokens, HIDDEN), np.int8),
        np.ones((tokens, 1), np.float32),
        np.zeros((tokens, choices), np.int32),
        np.ones((tokens, choices), np.float32),
    )
