"""Combine: weighted expert outputs return to the rank their tokens came from, and are added.

    outgoing(partials, wire)                 -> rows by source rank       before `Collective.enter`
    combined(arrived, tokens, shape, wire)   -> [tokens, hidden]          after `Completed`

Partial sums are integers of the 2^-24 grid held in float64 (`libs.model.moe`). How they travel:

    EXACT   float64, nothing lost: sums are the same integers in any order; what serving uses
    BF16    relative error of each partial at most 2^-8 (nearest even); the paper's wire (I9)
    INT8    absolute error at most peak / 254 per partial row; the paper's option (P089)

With the narrow wires the partials still add exactly; only what each of them lost on the wire shows.
For `p` partials the error of an element is at most the sum of their `p` errors.

`ColocatedRank` joins dispatch and combine into the unit that the form without disaggregation runs
once per MoE layer.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum

import numpy as np
from numpy.typing import NDArray

from libs.errors import LocalProtocolError, RemoteProtocolError
from libs.model.exact import COMBINE_BITS
from libs.model.linear import int8_rows
from libs.model.moe import Routed
from libs.xccl.agreement import World
from libs.xccl.collective import Collective
from libs.xccl.collective_types import (
    CollectiveEffect,
    CollectiveEvent,
    Completed,
    Limits,
    MetadataField,
    Rows,
    WorldChanged,
)
from libs.xccl.dispatch import Scattered, gathered, scatter

Float64 = NDArray[np.float64]

_GRID = float(1 << COMBINE_BITS)


class Wire(Enum):
    """How a partial sum travels."""

    EXACT = "exact"
    BF16 = "bf16"
    INT8 = "int8"


def to_bf16(x: NDArray[np.float32]) -> NDArray[np.uint16]:
    """Round to the nearest bfloat16, ties to even; infinities stay, and no NaN may come in."""
    bits = np.ascontiguousarray(x).view(np.uint32)
    rounded = bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))
    return (rounded >> np.uint32(16)).astype(np.uint16)


def from_bf16(x: NDArray[np.uint16]) -> NDArray[np.float32]:
    """The same numbers as float32."""
    return (x.astype(np.uint32) << np.uint32(16)).view(np.float32)


def outgoing(partials: Mapping[int, Float64], wire: Wire = Wire.EXACT) -> dict[int, Rows]:
    """Columns to send back: `partials[source] [rows, hidden]`, rows in the order they arrived."""
    return {source: _packed(partial, wire) for source, partial in partials.items()}


def _packed(partial: Float64, wire: Wire) -> Rows:
    match wire:
        case Wire.EXACT:
            return (partial,)
        case Wire.BF16:
            return (to_bf16((partial / _GRID).astype(np.float32)),)
        case Wire.INT8:
            rows = int8_rows((partial / _GRID).astype(np.float32))
            assert rows.scale is not None
            return (rows.data, rows.scale)
        case _:
            raise AssertionError(f"unknown wire {wire!r}")


def combined(
    arrived: Mapping[int, Rows],
    tokens: Mapping[int, NDArray[np.intp]],
    shape: tuple[int, int],
    wire: Wire = Wire.EXACT,
) -> Float64:
    """Sums on the 2^-24 grid, `shape = (tokens, hidden)`; `tokens` is what `scatter` remembered.

    Raises `RemoteProtocolError` when a rank's answer is missing, unasked or of another shape.
    """
    if set(arrived) != set(tokens):
        text = f"answers of ranks {sorted(arrived)}, asked were {sorted(tokens)}"
        raise RemoteProtocolError(text, reason="bad_tensor")
    total = np.zeros(shape, np.float64)
    for rank, columns in arrived.items():
        partial = _unpacked(rank, columns, wire)
        if partial.shape != (len(tokens[rank]), shape[1]):
            raise RemoteProtocolError(f"rank {rank} sent {partial.shape}", reason="bad_tensor")
        # `scatter` names a token at most once per rank, so an indexed addition loses nothing.
        total[tokens[rank]] += partial
    return total


def _unpacked(rank: int, columns: Rows, wire: Wire) -> Float64:
    expected = {
        Wire.EXACT: (np.float64,),
        Wire.BF16: (np.uint16,),
        Wire.INT8: (np.int8, np.float32),
    }
    dtypes = tuple(column.dtype for column in columns)
    if dtypes != tuple(np.dtype(dtype) for dtype in expected[wire]):
        raise RemoteProtocolError(f"rank {rank} sent {dtypes}", reason="bad_tensor")
    match wire:
        case Wire.EXACT:
            return columns[0]
        case Wire.BF16:
            return from_bf16(columns[0]).astype(np.float64) * _GRID
        case Wire.INT8:
            return columns[0].astype(np.float64) * columns[1] * _GRID
        case _:
            raise AssertionError(f"unknown wire {wire!r}")


# ---------------------------------------------------------------- one rank, both halves


@dataclass(frozen=True, slots=True, eq=False)
class Dispatched:
    """Rows to compute, by the rank they came from."""

    layer_event: int
    world: int
    batches: dict[int, Routed]


@dataclass(frozen=True, slots=True, eq=False)
class Combined:
    """This rank's tokens: sums on the 2^-24 grid."""

    layer_event: int
    world: int
    total: Float64


@dataclass(frozen=True, slots=True)
class Unusable:
    """What arrived is no batch, or not the answer to what was sent: the layer has no result."""

    layer_event: int
    reason: str


ColocatedEffect = CollectiveEffect | Dispatched | Combined | Unusable


class ColocatedRank:
    """A die of the colocated form: attention and experts on one die, DP = EP.

    `dispatch` and `combine` alternate. After `WorldChanged` the next call is `dispatch` again, with
    rows routed to the experts that the smaller world still has.
    """

    def __init__(
        self, rank: int, world: World, wire: Wire = Wire.EXACT, limits: Limits | None = None
    ) -> None:
        self.wire = wire
        self.collective = Collective(rank, world, limits or Limits(unit=2))
        if self.collective.limits.unit != 2:
            raise LocalProtocolError("dispatch and combine are run again together: unit is 2")
        self._sent = Scattered({}, {})
        self._shape = (0, 0)

    @property
    def halves_done(self) -> int:
        """0 before dispatch, 1 before combine."""
        return self.collective.event % 2

    def dispatch(
        self, routed: Routed, owners: NDArray[np.int32], *, fuse_int8: bool = True
    ) -> list[ColocatedEffect]:
        """Send this rank's rows out; none at all is legal and still enters."""
        if self.halves_done != 0:
            raise LocalProtocolError("combine comes before the next dispatch")
        sent = scatter(routed, owners, fuse_int8=fuse_int8)
        effects = self.collective.enter(sent.outgoing)
        self._sent, self._shape = sent, routed.rows.data.shape
        return self._translate(effects)

    def combine(self, partials: Mapping[int, Float64]) -> list[ColocatedEffect]:
        """Send back what the experts of this rank made of the batches of `Dispatched`."""
        if self.halves_done != 1:
            raise LocalProtocolError("dispatch comes before combine")
        return self._translate(self.collective.enter(outgoing(partials, self.wire)))

    def read(self, reader: int, field: MetadataField) -> Rows | None:
        """The one-sided access of a peer."""
        return self.collective.read(reader, field)

    def handle(self, event: CollectiveEvent) -> list[ColocatedEffect]:
        """Events of the collective in, its effects out; completion comes as what it completed."""
        return self._translate(self.collective.handle(event))

    def _translate(self, effects: list[CollectiveEffect]) -> list[ColocatedEffect]:
        return [self._meaning(effect) for effect in effects]

    def _meaning(self, effect: CollectiveEffect) -> ColocatedEffect:
        match effect:
            case Completed():
                try:
                    return self._result(effect)
                except RemoteProtocolError as error:
                    return Unusable(effect.event_id - effect.event_id % 2, str(error))
            case WorldChanged():
                self._sent, self._shape = Scattered({}, {}), (0, 0)
                return effect
            case _:
                return effect

    def _result(self, done: Completed) -> Dispatched | Combined:
        if done.event_id % 2 == 0:
            return Dispatched(done.event_id, done.world, gathered(done.arrived))
        total = combined(done.arrived, self._sent.tokens, self._shape, self.wire)
        return Combined(done.event_id - 1, done.world, total)

    def validate(self) -> None:
        """See `Collective.validate`."""
        self.collective.validate()
