"""Matrix products in three arithmetics, split into "prepare the rows" and "multiply".

Rows are prepared once and may feed several products (gate and up projection, query and KV
projection), on this die or on another: an expert die receives INT8 rows and must use them as they
are, since nothing promises that quantising them again finds the same scale. That is why `Rows` is a
type of its own.

    class         rows                        weights                  product
    Int8Linear    per-token scale, 127 steps  per-channel scale, int8  float32 BLAS on integers
    FixedLinear   per-token 2^n, 20 bits      per-channel 2^n, 20 bits float64 BLAS on integers
    FloatLinear   float32                     float32                  float32 BLAS

INT8 sums stay below 2^24 for K <= 1,040 and are exact in float32 (the paper quantises the same way,
token-wise activations against channel-wise weights); a larger K is cut into blocks whose sums are
added in float64.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, get_args

import numpy as np
from numpy.typing import NDArray

from libs.errors import BadInput
from libs.model import exact

Float32 = NDArray[np.float32]
Mode = Literal["int8", "fx", "f32"]
MODES: tuple[Mode, ...] = get_args(Mode)

INT8_MAX = 127
INT8_MAX_K = (1 << 24) // (INT8_MAX * INT8_MAX)
# The smallest row maximum that is told apart from an empty row; keeps the scale a normal number.
_TINY = np.float32(1e-12)


@dataclass(frozen=True, slots=True, eq=False)
class Rows:
    """Activations ready for a product: `data [tokens, k]`, `scale [tokens, 1]` of integer data."""

    data: NDArray[Any]
    scale: NDArray[Any] | None = None

    def __len__(self) -> int:
        return len(self.data)

    def take(self, index: NDArray[np.intp]) -> Rows:
        """The rows at `index`, in that order."""
        scale = None if self.scale is None else self.scale[index]
        return Rows(self.data[index], scale)


def int8_rows(x: NDArray[Any]) -> Rows:
    """Quantise each row to 255 levels of its own maximum: int8 data, float32 scale.

    A row of zeros keeps a tiny scale. The result of a row depends on that row alone.
    """
    peak = np.abs(x).max(axis=-1, keepdims=True)
    scale = np.maximum(peak, _TINY) / np.float32(INT8_MAX)
    levels = np.divide(x, scale)
    np.rint(levels, out=levels)
    # x / (peak / 127) may round to just above 127 but never to 128, so rint already bounds it.
    return Rows(levels.astype(np.int8), scale)


class Linear(ABC):
    """One weight `[..., out, k]`; leading axes (attention heads) multiply head by head."""

    out_features: int

    @staticmethod
    @abstractmethod
    def rows(x: NDArray[Any]) -> Rows:
        """Prepare activations `[..., tokens, k]`."""

    @abstractmethod
    def product(self, data: NDArray[Any]) -> NDArray[Any]:
        """Multiply prepared data by the weight, channel scale applied, row scale not yet."""

    def apply(self, rows: Rows) -> Float32:
        """`[..., tokens, k] -> [..., tokens, out]` in float32."""
        return unscaled(self.product(rows.data), rows)

    def __call__(self, x: NDArray[Any]) -> Float32:
        """Prepare and multiply."""
        return self.apply(self.rows(x))


class Int8Linear(Linear):
    """W8A8: integers held in float32."""

    def __init__(self, weight: Float32) -> None:
        quantised = int8_rows(weight)
        assert quantised.scale is not None
        self._weight = np.ascontiguousarray(quantised.data.T, dtype=np.float32)
        self._scale = np.ascontiguousarray(quantised.scale.T)
        self.out_features = weight.shape[0]

    @staticmethod
    def rows(x: NDArray[Any]) -> Rows:
        return int8_rows(x)

    def product(self, data: NDArray[Any]) -> NDArray[Any]:
        assert data.dtype == np.int8, data.dtype
        levels = data.astype(np.float32)
        k = self._weight.shape[0]
        if k <= INT8_MAX_K:
            sums = levels @ self._weight
        else:
            sums = np.zeros((len(data), self.out_features), np.float64)
            for start in range(0, k, INT8_MAX_K):
                block = slice(start, start + INT8_MAX_K)
                sums += levels[:, block] @ self._weight[block]
        sums *= self._scale
        return sums


class FixedLinear(Linear):
    """20-bit fixed point in float64."""

    def __init__(self, weight: Float32) -> None:
        if weight.shape[-1] > exact.FIXED_MAX_K:
            raise BadInput(
                f"a product over {weight.shape[-1]} inputs is not exact in fixed point "
                f"(limit {exact.FIXED_MAX_K})",
                field="config.json",
            )
        integers, scale = exact.fixed_point(weight)
        self._weight = np.ascontiguousarray(integers.swapaxes(-1, -2))
        self._scale = np.ascontiguousarray(scale.swapaxes(-1, -2))
        self.out_features = weight.shape[-2]

    @staticmethod
    def rows(x: NDArray[Any]) -> Rows:
        return Rows(*exact.fixed_point(x))

    def product(self, data: NDArray[Any]) -> NDArray[Any]:
        assert data.dtype == np.float64, data.dtype
        sums = data @ self._weight
        sums *= self._scale
        return sums


class FloatLinear(Linear):
    """Ordinary float32."""

    def __init__(self, weight: Float32) -> None:
        self._weight = np.ascontiguousarray(weight.swapaxes(-1, -2), dtype=np.float32)
        self.out_features = weight.shape[-2]

    @staticmethod
    def rows(x: NDArray[Any]) -> Rows:
        return Rows(x)

    def product(self, data: NDArray[Any]) -> NDArray[Any]:
        result: NDArray[Any] = data @ self._weight
        return result


def unscaled(product: NDArray[Any], rows: Rows) -> Float32:
    """Apply the row scale to a product (in place) and round to float32."""
    if rows.scale is not None:
        product *= rows.scale
    return product.astype(np.float32, copy=False)


def grouped_product(linears: Sequence[Linear], rows: Rows, bounds: Sequence[int]) -> Float32:
    """Rows `bounds[i]:bounds[i+1]` times `linears[i]`, as one array `[tokens, out]`.

    Row for row the same bits as `linears[i].apply`, but scales are applied in one pass.
    """
    assert len(bounds) == len(linears) + 1, (len(bounds), len(linears))
    assert bounds[-1] == len(rows), (bounds[-1], len(rows))
    parts = [
        linear.product(rows.data[start:stop])
        for linear, start, stop in zip(linears, bounds, bounds[1:], strict=False)
    ]
    return unscaled(parts[0] if len(parts) == 1 else np.concatenate(parts), rows)


def wide_linear(weight: Float32, mode: Mode) -> Linear:
    """The arithmetic of projections and experts in `mode`: quantised in `int8`."""
    match mode:
        case "int8":
            return Int8Linear(weight)
        case "fx":
            return FixedLinear(weight)
        case "f32":
            return FloatLinear(weight)
        case _:
            raise AssertionError(mode)


def precise_linear(weight: Float32, mode: Mode) -> Linear:
    """The arithmetic of gate, absorbed KV projection, MTP input and head: never INT8."""
    return FloatLinear(weight) if mode == "f32" else FixedLinear(weight)


def check_mode(mode: str) -> Mode:
    """Narrow a name from outside to a `Mode`."""
    for known in MODES:
        if mode == known:
            return known
    raise BadInput(f"mode must be one of {', '.join(MODES)}, not {mode!r}", field="mode")
