"""Arithmetic whose result does not depend on how the work was cut: why equal means bit-equal.

Floating-point sums depend on their order, and BLAS picks the order by shape, thread count and CPU.
So every sum here runs over integers held in floats, small enough that each partial sum is exact:

    what                      grid                         why it stays exact
    fixed-point rows          20 bits per row maximum      2 x 19 + log2(K) <= 53 for K <= 32,768
    INT8 rows (`linear.py`)   127 steps per row maximum    127^2 x K < 2^24 for K <= 1,040
    latent KV                 2^-14, |x| < 32              20-bit integers
    softmax numerators        2^-22 (less for long rows)   numerator + KV + log2(rows) <= 53 bits
    expert outputs            2^-24                        integers in float64, added in any order

Between the sums only operations that IEEE 754 rounds correctly are used (+ - x / sqrt), and `rint`,
`frexp`, `ldexp`, which are exact. `numpy.exp`, `sin`, `cos`, `mean` and `@` on ordinary floats are
not portable and do not occur in the exact modes.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

Float32 = NDArray[np.float32]
Float64 = NDArray[np.float64]

FIXED_BITS = 19  # magnitude bits of a fixed-point value; the sign is the twentieth
FIXED_MAX_K = 1 << (53 - 2 * FIXED_BITS)
KV_FRACTION_BITS = 14
KV_MAGNITUDE_BITS = 19  # |x| < 32 = 2^5 on a 2^-14 grid
KV_LIMIT = float((1 << KV_MAGNITUDE_BITS) - 1)
SOFTMAX_BITS = 22
COMBINE_BITS = 24
LOG2_E = float.fromhex("0x1.71547652b82fep+0")

# 2^r for |r| <= 1/2, highest power first, interpolated at Chebyshev points; relative error below
# 2^-39, far less than the rounding to float32 or to a numerators' grid that follows.
_EXP2_COEFFICIENTS = tuple(
    float.fromhex(text)
    for text in (
        "0x1.63d12bb868c9fp-20", "0x1.00dc4a5397691p-16", "0x1.4308ac8f571ebp-13",
        "0x1.5d8745a73511cp-10", "0x1.3b2ab718157d2p-7", "0x1.c6b08dd6fcf68p-5",
        "0x1.ebfbdff823d4dp-3", "0x1.62e42fef84cf5p-1", "0x1.0p+0",
    )
)  # fmt: skip
# Adding 1.5 x 2^52 leaves the nearest integer in the low mantissa bits, ready to be an exponent.
_ROUNDER = float(3 << 51)
# Log2 of a softmax weight that rounds to zero on any numerators' grid.
_UNDERFLOW = -64.0


def softmax_bits(max_rows: int) -> int:
    """Fraction bits of softmax numerators so that a sum over `max_rows` KV rows is exact.

    22 up to 4,096 rows, one fewer per doubling.
    """
    assert max_rows >= 1, max_rows
    return min(SOFTMAX_BITS, 53 - KV_MAGNITUDE_BITS - (max_rows - 1).bit_length())


def softmax_max_rows(bits: int) -> int:
    """The longest context that numerators of `bits` fraction bits can sum exactly."""
    return int(1 << (53 - KV_MAGNITUDE_BITS - bits))


def fixed_point(x: NDArray[Any]) -> tuple[Float64, Float64]:
    """Round rows to 20-bit integers: `x ~ integers * scale`.

    The scale is a power of two per row (`[..., 1]`), so applying it later is exact. A row's result
    depends on that row alone. `[..., n] -> [..., n], [..., 1]`.
    """
    peak = np.abs(x).max(axis=-1, keepdims=True)
    _, exponent = np.frexp(peak)
    integers = np.multiply(x, np.ldexp(1.0, FIXED_BITS - exponent), dtype=np.float64)
    np.rint(integers, out=integers)
    return integers, np.ldexp(1.0, exponent - FIXED_BITS)


def exp2_inplace(x: Float64) -> Float64:
    """Overwrite `x` with `2^x`, for `|x| <= 1000`, by multiplication, addition and shifts."""
    shifted = x + _ROUNDER
    x -= shifted - _ROUNDER
    power = x * _EXP2_COEFFICIENTS[0]
    for coefficient in _EXP2_COEFFICIENTS[1:-1]:
        power += coefficient
        power *= x
    power += _EXP2_COEFFICIENTS[-1]
    exponent = shifted.view(np.int64)
    exponent <<= 52
    np.add(power.view(np.int64), exponent, out=x.view(np.int64))
    return x


def sigmoid(x: NDArray[Any]) -> Float32:
    """`1 / (1 + e^-x)`, rounded once to float32; saturates beyond `|x| = 80`."""
    y: Float64 = np.multiply(x, -LOG2_E, dtype=np.float64)
    np.clip(y, -80.0 * LOG2_E, 80.0 * LOG2_E, out=y)
    exp2_inplace(y)
    y += 1.0
    np.divide(1.0, y, out=y)
    return y.astype(np.float32)


def rms_norm(x: NDArray[Any], weight: Float32, eps: float) -> Float32:
    """Root-mean-square norm of rows; the sum of squares runs over 20-bit integers.

    `[tokens, n] -> [tokens, n]`, exact for n <= 32,768.
    """
    width = x.shape[-1]
    assert width <= FIXED_MAX_K, width
    integers, scale = fixed_point(x)
    total = np.vecdot(integers, integers)[..., None]
    mean = total * (scale * scale) / width
    quotient: Float64 = np.divide(x, np.sqrt(mean + eps), dtype=np.float64)
    normed = quotient.astype(np.float32)
    normed *= weight
    return normed


def softmax_numerators(scores: Float64, bits: int) -> Float64:
    """Overwrite base-2 scores `[..., rows]` with softmax numerators, integers up to `2^bits`.

    Scores far below the row maximum, hidden ones among them, become 0.
    """
    scores -= scores.max(axis=-1, keepdims=True)
    np.maximum(scores, _UNDERFLOW, out=scores)
    exp2_inplace(scores)
    scores *= float(1 << bits)
    return np.rint(scores, out=scores)


def to_kv_grid(x: NDArray[Any]) -> Float32:
    """Latent KV rows as integers of the 2^-14 grid, clamped to `|x| < 32`."""
    grid: Float64 = np.multiply(x, float(1 << KV_FRACTION_BITS), dtype=np.float64)
    np.rint(grid, out=grid)
    np.clip(grid, -KV_LIMIT, KV_LIMIT, out=grid)
    return grid.astype(np.float32)


def to_combine_grid(y: NDArray[Any], weight: NDArray[Any]) -> Float64:
    """Weighted expert rows as integers of the 2^-24 grid: `[rows, hidden]`, weight `[rows, 1]`."""
    grid: Float64 = np.multiply(y, weight, dtype=np.float64)  # 24 + 24 bits: the product is exact
    grid *= float(1 << COMBINE_BITS)
    np.rint(grid, out=grid)
    return grid


def from_combine_grid(total: Float64) -> Float32:
    """The sum of expert rows, off the grid and rounded once to float32."""
    assert np.abs(total).max(initial=0.0) < 2.0**53, "expert sums left the exact range"
    return (total * (1.0 / (1 << COMBINE_BITS))).astype(np.float32)
