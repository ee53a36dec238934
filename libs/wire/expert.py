"""Attention to experts and back: one pair of frames per (DP group, MoE layer, expert die).

Rows travel as the attention side quantised them; the expert never requantises them (other bits
would come out). Results are integers on a 2^-24 grid, summed per die, so any order of arrival and
any placement gives the same sum.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from libs.wire.registry import Limit, message


@message("a2e", limit=Limit.BULK)
@dataclass(frozen=True, slots=True, eq=False)
class A2E:
    """Token rows for the experts of one die.

    `work_id` names the work item (iteration, layer) within the DP group and makes a resend
    idempotent; `rows` is `[tokens, hidden]` (int8, or float32 in the float engines), `scale`
    `[tokens, 1]` float32, `topk_idx` and `topk_weights` `[tokens, k]`. `map_version` is the
    expert map both sides must hold. `repeat` says how many layers of the profiled model this
    exchange stands for.
    """

    work_id: int
    layer: int
    epoch: int
    map_version: int
    source_dp: str
    source_die: int
    repeat: int
    rows: np.ndarray
    scale: np.ndarray
    topk_idx: np.ndarray
    topk_weights: np.ndarray


@message("e2a", limit=Limit.BULK)
@dataclass(frozen=True, slots=True, eq=False)
class E2A:
    """The die's partial sums for the rows it was sent, `[tokens, hidden]`, in the same order."""

    work_id: int
    layer: int
    epoch: int
    die: int
    partial: np.ndarray


@message("a2e_refused")
@dataclass(frozen=True, slots=True)
class A2ERefused:
    """The die cannot take the rows: another epoch, another map, or malformed tensors."""

    work_id: int
    layer: int
    die: int
    code: str
    reason: str
