"""What a prefill DP group asks of its executor, and what comes back."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from libs.model.sampling import SamplingParams


@dataclass(frozen=True, slots=True, eq=False)
class PrefillJob:
    """Run a whole prompt into `block_ids` and sample the first token; answered by a `Sampled`."""

    sequence: int
    block_ids: tuple[int, ...]
    prompt_ids: np.ndarray
    sampling: SamplingParams
    choice: int


@dataclass(frozen=True, slots=True)
class ExportKv:
    """Copy blocks out, in order; answered by `ExportedKv`."""

    block_ids: tuple[int, ...]


@dataclass(frozen=True, slots=True, eq=False)
class ExportedKv:
    """`[nbytes]` uint8: for each block `[layers, block_size, width]` float32, one after another."""

    data: np.ndarray
