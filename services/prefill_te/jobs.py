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
    """Read blocks for sending: `(index within the request, block id)` pairs."""

    blocks: tuple[tuple[int, int], ...]


@dataclass(frozen=True, slots=True, eq=False)
class ExportedBlock:
    """Block `index` of a request, all layers: `rows` is `[layers, block_size, width]`."""

    index: int
    rows: np.ndarray
    checksum: int
