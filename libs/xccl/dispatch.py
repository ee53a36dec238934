"""Dispatch: each token's row goes to every rank that holds one of its chosen experts (P038-P040).

    scatter(routed, owners) -> Scattered(outgoing, tokens)     before `Collective.enter`
    gathered(arrived)       -> {source: Routed}                after `Completed`

A row travels once per rank, however many of its experts live there; choices of other ranks' experts
are hidden (-1), as `libs.model.moe.Routed` wants. Quantising to INT8 is fused: each token is
quantised once, and what is copied and pulled is int8 data with one float32 scale per row
(7,680 instead of 14,336 bytes for a DeepSeek row). Rows that come quantised are sent as they are:
quantising twice would change bits. A float engine may turn fusion off.

The error of quantisation is at most half a step, `peak / 254`, per element.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from libs.errors import LocalProtocolError, RemoteProtocolError
from libs.model.linear import Rows as ModelRows
from libs.model.linear import int8_rows
from libs.model.moe import Routed
from libs.xccl.collective_types import Rows

#: data, scale, experts, weights
COLUMNS = 4


@dataclass(frozen=True, slots=True, eq=False)
class Scattered:
    """Rows by target rank, and which of this rank's tokens they are, in the same order.

    Combine brings results back in that order, so token numbers need not travel.
    """

    outgoing: dict[int, Rows]
    tokens: dict[int, NDArray[np.intp]]


def scatter(routed: Routed, owners: NDArray[np.int32], *, fuse_int8: bool = True) -> Scattered:
    """Sort rows by the rank that owns their experts; `owners [experts]` names a rank per expert.

    A choice of -1 is nobody's. Raises `LocalProtocolError` for an expert that `owners` does not
    know. A rank that nothing goes to does not occur in the result.
    """
    topk_idx = routed.topk_idx
    if topk_idx.size and not (topk_idx.min() >= -1 and topk_idx.max() < len(owners)):
        raise LocalProtocolError(f"expert out of range, {len(owners)} are known")
    rows = routed.rows
    if fuse_int8 and rows.scale is None:
        rows = int8_rows(rows.data)
    scale = rows.scale if rows.scale is not None else np.ones((len(rows), 1), np.float32)
    owner_of = np.where(topk_idx >= 0, owners[topk_idx], -1)
    outgoing: dict[int, Rows] = {}
    tokens: dict[int, NDArray[np.intp]] = {}
    for rank in np.unique(owner_of[owner_of >= 0]).tolist():
        here = owner_of == rank
        index = np.flatnonzero(here.any(axis=1))
        chosen = np.where(here[index], topk_idx[index], np.int32(-1))
        outgoing[rank] = (rows.data[index], scale[index], chosen, routed.topk_weights[index])
        tokens[rank] = index
    return Scattered(outgoing, tokens)


def gathered(arrived: Mapping[int, Rows]) -> dict[int, Routed]:
    """The batches that arrived, by source rank.

    Raises `RemoteProtocolError` for columns that are no batch.
    """
    return {source: _batch(source, columns) for source, columns in arrived.items()}


def _batch(source: int, columns: Rows) -> Routed:
    if len(columns) != COLUMNS:
        raise RemoteProtocolError(f"rank {source} sent {len(columns)} columns", reason="bad_tensor")
    data, scale, chosen, weights = columns
    tables = all(column.ndim == 2 and len(column) == len(data) for column in columns)
    if not tables or chosen.shape != weights.shape or scale.shape[1] != 1:
        shapes = [column.shape for column in columns]
        raise RemoteProtocolError(f"rank {source} sent tables {shapes}", reason="bad_tensor")
    quantised = data.dtype == np.int8
    return Routed(ModelRows(data, scale if quantised else None), chosen, weights)
