"""Latent KV rows, kept per sequence and layer, behind one interface with two stores.

A row is `kv_lora_rank` latent numbers and the rotated `qk_rope_head_dim` key part, float32; in the
exact modes every number is an integer of the 2^-14 grid. Layers count the main ones first, then the
MTP layers, whose row `i` belongs to the hidden state of position `i`.

Writing at a position that was written before replaces it: that is how a rejected draft or a
rolled-back iteration is undone, without a separate truncation.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from libs.errors import BadInput, InvariantError

Float32 = NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class Span:
    """Which rows of a batch belong to `sequence`: `length` of them, from position `start` on.

    Length 1 is decode; more is a prefill, a chunk of one, or the verification of drafts. The spans
    of a batch lie in order and cover its rows.
    """

    sequence: int
    start: int
    length: int

    @property
    def stop(self) -> int:
        """The number of KV rows of the sequence once this span is written."""
        return self.start + self.length


class KvStore(Protocol):
    """What attention needs of a KV cache."""

    def write(self, sequence: int, layer: int, start: int, rows: Float32) -> None:
        """Store `rows [n, width]` at positions `start ..`; raises when they do not fit."""
        ...

    def read(self, sequence: int, layer: int, length: int) -> Float32:
        """The first `length` rows, `[length, width]`; the caller must not change them."""
        ...


class ContiguousKv:
    """One growing array per sequence: the store of the monolith and of tests."""

    def __init__(self, layers: int, width: int) -> None:
        self._layers, self._width = layers, width
        self._rows: dict[int, Float32] = {}
        self._written: dict[int, NDArray[np.int64]] = {}

    def write(self, sequence: int, layer: int, start: int, rows: Float32) -> None:
        """Store rows, growing the array; a gap before `start` is an `InvariantError`."""
        stop = start + len(rows)
        store = self._grown(sequence, stop)
        written = self._written[sequence]
        if start > written[layer]:
            raise InvariantError(
                f"KV of sequence {sequence}, layer {layer}: writing row {start} would leave a gap "
                f"after row {written[layer]}"
            )
        store[layer, start:stop] = rows
        written[layer] = stop

    def read(self, sequence: int, layer: int, length: int) -> Float32:
        """The first `length` rows; reading more than was written is an `InvariantError`."""
        written = int(self._written[sequence][layer]) if sequence in self._written else 0
        if length > written:
            raise InvariantError(
                f"KV of sequence {sequence}, layer {layer}: {length} rows asked, {written} written"
            )
        return self._rows[sequence][layer, :length]

    def drop(self, sequence: int) -> None:
        """Forget a sequence; an unknown one is fine."""
        self._rows.pop(sequence, None)
        self._written.pop(sequence, None)

    def _grown(self, sequence: int, stop: int) -> Float32:
        store = self._rows.get(sequence)
        if store is None:
            store = np.empty((self._layers, max(64, stop), self._width), np.float32)
            self._written[sequence] = np.zeros(self._layers, np.int64)
        elif stop > store.shape[1]:
            grown = np.empty((self._layers, max(stop, 2 * store.shape[1]), self._width), np.float32)
            grown[:, : store.shape[1]] = store
            store = grown
        self._rows[sequence] = store
        return store


class PagedKv:
    """Fixed blocks of `block_size` rows, each holding all layers; a sequence owns a list of blocks.

    Which blocks are free is not decided here (`libs.kvcache` does); this is only their memory. It
    starts as NaN, so that a row nobody wrote cannot pass for one.
    """

    def __init__(self, num_blocks: int, block_size: int, layers: int, width: int) -> None:
        assert min(num_blocks, block_size, layers, width) >= 1
        self.num_blocks, self.block_size = num_blocks, block_size
        self._pool = np.full((layers, num_blocks, block_size, width), np.nan, np.float32)
        self._tables: dict[int, NDArray[np.intp]] = {}

    @property
    def block_shape(self) -> tuple[int, int, int]:
        """Shape of one block: `(layers, block_size, width)`."""
        layers, _, block_size, width = self._pool.shape
        return layers, block_size, width

    @property
    def block_bytes(self) -> int:
        """Bytes of one block."""
        layers, block_size, width = self.block_shape
        return layers * block_size * width * self._pool.itemsize

    def bind(self, sequence: int, block_ids: Sequence[int]) -> None:
        """Give `sequence` this block table, or a longer one as it grows."""
        table = np.asarray(block_ids, np.intp)
        if table.size and not (table.min() >= 0 and table.max() < self.num_blocks):
            raise InvariantError(
                f"block table of sequence {sequence} names a block outside 0..{self.num_blocks - 1}"
            )
        self._tables[sequence] = table

    def unbind(self, sequence: int) -> None:
        """Forget a sequence's table; an unknown one is fine."""
        self._tables.pop(sequence, None)

    def write(self, sequence: int, layer: int, start: int, rows: Float32) -> None:
        """Scatter rows into the sequence's blocks; past the table's end is an `InvariantError`."""
        positions = np.arange(start, start + len(rows))
        table = self._table(sequence, start + len(rows))
        blocks = table[positions // self.block_size]
        self._pool[layer, blocks, positions % self.block_size] = rows

    def read(self, sequence: int, layer: int, length: int) -> Float32:
        """Gather the first `length` rows from the sequence's blocks."""
        table = self._table(sequence, length)
        needed = table[: -(-length // self.block_size)]
        gathered: Float32 = self._pool[layer].take(needed, axis=0)
        return gathered.reshape(-1, gathered.shape[-1])[:length]

    def export_block(self, block_id: int, layers: Sequence[int] | None = None) -> Float32:
        """A copy of one block for transfer, `[layers, block_size, width]` (default: all layers)."""
        self._check_block(block_id)
        chosen = slice(None) if layers is None else list(layers)
        return self._pool[chosen, block_id].copy()

    def import_block(
        self, block_id: int, rows: Float32, layers: Sequence[int] | None = None
    ) -> None:
        """Overwrite one block with what `export_block` produced elsewhere.

        `BadInput` when the shape is not this store's: the rows came over a wire.
        """
        self._check_block(block_id)
        chosen = slice(None) if layers is None else list(layers)
        target = self._pool[chosen, block_id]
        if rows.shape != target.shape:
            raise BadInput(
                f"KV block has shape {list(rows.shape)}, expected {list(target.shape)}",
                field="rows",
            )
        self._pool[chosen, block_id] = rows

    def _table(self, sequence: int, rows: int) -> NDArray[np.intp]:
        table = self._tables.get(sequence)
        if table is None:
            raise InvariantError(f"sequence {sequence} has no block table")
        if rows > len(table) * self.block_size:
            raise InvariantError(
                f"sequence {sequence}: row {rows - 1} lies past its {len(table)} blocks of "
                f"{self.block_size}"
            )
        return table

    def _check_block(self, block_id: int) -> None:
        if not 0 <= block_id < self.num_blocks:
            raise InvariantError(f"no block {block_id}; there are {self.num_blocks}")
