"""What a decode DP group asks of its executor, and what comes back.

The core decides (who runs, where rows go, when an iteration is committed); the executor holds
tensors. All arrays are opaque to the core, which only moves them into frames.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from libs.model.sampling import Sampled, SamplingParams


@dataclass(frozen=True, slots=True, eq=False)
class ImportKv:
    """Write received KV into the first of `block_ids` and bind all of them to `sequence`.

    `data` is `[nbytes]` uint8, for each block `[layers, block_size, width]` float32, one after
    another. Raises `TransferFailed` when it does not come out even. Result: the bytes written.
    """

    sequence: int
    block_ids: tuple[int, ...]
    data: np.ndarray


@dataclass(frozen=True, slots=True, eq=False)
class BatchRow:
    """One request's part in an iteration: feed `token` at `position`, then sample the next."""

    sequence: int
    block_ids: tuple[int, ...]
    token: int
    position: int
    sampling: SamplingParams
    choice: int
    prompt_ids: np.ndarray
    output: tuple[int, ...]


@dataclass(frozen=True, slots=True, eq=False)
class BeginIteration:
    """Run the batch up to the first exchange with the expert dies.

    `die_of[expert]` is the placement; `ended` are sequences whose KV binding may be dropped.
    """

    rows: tuple[BatchRow, ...]
    die_of: tuple[int, ...]
    ended: tuple[int, ...]


@dataclass(frozen=True, slots=True, eq=False)
class ResumeIteration:
    """Continue after layer `layer` with the partial sums of every die that was sent rows."""

    layer: int
    partials: tuple[tuple[int, np.ndarray], ...]


@dataclass(frozen=True, slots=True, eq=False)
class DieRows:
    """Rows of the batch that have an expert on `die`, ready to be sent there."""

    die: int
    rows: np.ndarray
    scale: np.ndarray
    topk_idx: np.ndarray
    topk_weights: np.ndarray


@dataclass(frozen=True, slots=True, eq=False)
class Routed:
    """The iteration waits for the experts of `layer`."""

    layer: int
    dies: tuple[DieRows, ...]


@dataclass(frozen=True, slots=True)
class IterationDone:
    """One sampled token per row of the batch, in batch order."""

    samples: tuple[Sampled, ...]
