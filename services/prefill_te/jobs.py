"""What a prefill DP group asks of its executor, and what comes back."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from libs.model.sampling import SamplingParams


@dataclass(frozen=True, slots=True, eq=False)
class PrefillJob:
    """Run a prompt into `block_ids` and sample the first token; answered by a `Sampled`.

    Its first `cached_rows` rows, whole blocks, are not computed: they are in the blocks already,
    or get there by `fills`, (host slot, block) pairs. `spills`, (block, host slot) pairs, save what
    the new rows replace. All fills are read before the spills, in order, are written to the host.
    """

    sequence: int
    block_ids: tuple[int, ...]
    prompt_ids: np.ndarray
    sampling: SamplingParams
    choice: int
    cached_rows: int = 0
    spills: tuple[tuple[int, int], ...] = ()
    fills: tuple[tuple[int, int], ...] = ()


@dataclass(frozen=True, slots=True)
class ExportKv:
    """Copy blocks out, in order; answered by `ExportedKv`."""

    block_ids: tuple[int, ...]


@dataclass(frozen=True, slots=True, eq=False)
class ExportedKv:
    """`[nbytes]` uint8: for each block `[layers, block_size, width]` float32, one after another."""

    data: np.ndarray
