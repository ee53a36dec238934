"""Rotary positions: tables of cosines and sines that are the same on every machine.

Libraries differ in the last bits of `pow`, `sin` and `cos`. Here the inverse frequencies come from
decimal arithmetic (correctly rounded by definition), the angle `position * frequency` is rounded to
float32 as the public implementation does, and sine and cosine are polynomials in float64, rounded
to float32 once.

Pairs are interleaved: `(x0, x1), (x2, x3), ...` turn together, and the output lists all first
components, then all second ones. Queries and keys use the same order, so scores do not notice.
"""

from __future__ import annotations

from decimal import Decimal, localcontext
from math import ceil, floor
from typing import Any

import numpy as np
from numpy.typing import NDArray

from libs.model.args import ModelArgs, RopeScaling

Float32 = NDArray[np.float32]

_PI = Decimal("3.14159265358979323846264338327950288419716939937510")
_HALF_PI_HIGH = float.fromhex("0x1.921fb54400000p+0")  # 33 bits: its multiples are exact
_HALF_PI_LOW = float.fromhex("0x1.0b4611a626331p-34")
_SIN = tuple((-1) ** k / f for k, f in enumerate((1, 6, 120, 5040, 362880, 39916800, 6227020800)))
_COS = tuple(
    (-1) ** k / f for k, f in enumerate((1, 2, 24, 720, 40320, 3628800, 479001600, 87178291200))
)


class Rope:
    """Rotation tables for positions `0 .. positions - 1`."""

    def __init__(self, args: ModelArgs, positions: int) -> None:
        frequencies = inverse_frequencies(args)
        angles = np.arange(positions, dtype=np.float32)[:, None] * frequencies
        sine, cosine = sine_cosine(angles.astype(np.float64))
        magnitude = attention_factor(args.rope_scaling)
        self._cosine = (cosine * magnitude).astype(np.float32)
        self._sine = (sine * magnitude).astype(np.float32)

    def rotate(self, x: Float32, positions: NDArray[np.intp]) -> Float32:
        """Turn `x [tokens, heads, rope]` to `positions [tokens]`."""
        assert x.ndim == 3, x.shape
        assert positions.max(initial=0) < len(self._cosine), "position beyond the rotary table"
        cosine = self._cosine[positions][:, None]
        sine = self._sine[positions][:, None]
        first, second = x[..., 0::2], x[..., 1::2]
        half = first.shape[-1]
        turned = np.empty(x.shape, np.float32)
        np.subtract(first * cosine, second * sine, out=turned[..., :half])
        np.add(second * cosine, first * sine, out=turned[..., half:])
        return turned


def inverse_frequencies(args: ModelArgs) -> Float32:
    """Radians per position of each pair, `[rope / 2]`, blended by YaRN if the model asks."""
    dim = args.qk_rope_head_dim
    with localcontext() as context:
        context.prec = 40
        log_theta = Decimal(args.rope_theta).ln()
        base = [(-log_theta * 2 * i / dim).exp() for i in range(dim // 2)]
        scaling = args.rope_scaling
        if scaling is None:
            return np.array([float(f) for f in base], np.float32)
        low, high = _blend_bounds(scaling, dim, log_theta)
        blended = []
        for i, frequency in enumerate(base):
            ramp = min(max((i - low) / (high - low), Decimal(0)), Decimal(1))
            slow = frequency / Decimal(scaling.factor)
            blended.append(float(slow * ramp + frequency * (1 - ramp)))
        return np.array(blended, np.float32)


def _blend_bounds(scaling: RopeScaling, dim: int, log_theta: Decimal) -> tuple[int, Decimal]:
    """Pair indices between which YaRN passes from kept to stretched frequencies."""
    window = Decimal(scaling.original_max_position_embeddings)

    def pair_with(turns: float) -> Decimal:
        return dim * (window / (Decimal(turns) * 2 * _PI)).ln() / (2 * log_theta)

    low = max(floor(pair_with(scaling.beta_fast)), 0)
    high = min(ceil(pair_with(scaling.beta_slow)), dim - 1)
    return low, Decimal(high) if high != low else Decimal(low) + Decimal("0.001")


def yarn_mscale(factor: float, mscale: float) -> float:
    """YaRN's magnitude correction: `0.1 * mscale * ln(factor) + 1`."""
    if factor <= 1:
        return 1.0
    return float(Decimal("0.1") * Decimal(mscale) * Decimal(factor).ln() + 1)


def attention_factor(scaling: RopeScaling | None) -> float:
    """The factor on cosines and sines."""
    if scaling is None:
        return 1.0
    if scaling.mscale and scaling.mscale_all_dim:
        return yarn_mscale(scaling.factor, scaling.mscale) / yarn_mscale(
            scaling.factor, scaling.mscale_all_dim
        )
    return yarn_mscale(scaling.factor, 1.0)


def softmax_scale(args: ModelArgs) -> float:
    """The factor on attention scores: `head_dim^-1/2`, times mscale squared under YaRN."""
    scale = 1.0 / float(np.sqrt(np.float64(args.qk_head_dim)))
    scaling = args.rope_scaling
    if scaling is not None and scaling.mscale_all_dim:
        mscale = yarn_mscale(scaling.factor, scaling.mscale_all_dim)
        scale = scale * mscale * mscale
    return scale


def sine_cosine(angle: NDArray[np.float64]) -> tuple[NDArray[Any], NDArray[Any]]:
    """Sine and cosine by reduction to a quarter turn and Taylor polynomials; error below 1e-11.

    Valid for angles up to about a million radians.
    """
    quadrant = np.rint(angle * (1.0 / (_HALF_PI_HIGH + _HALF_PI_LOW)))
    rest = angle - quadrant * _HALF_PI_HIGH - quadrant * _HALF_PI_LOW
    square = rest * rest
    sine = np.full_like(rest, _SIN[-1])
    for coefficient in _SIN[-2::-1]:
        sine = sine * square + coefficient
    sine = sine * rest
    cosine = np.full_like(rest, _COS[-1])
    for coefficient in _COS[-2::-1]:
        cosine = cosine * square + coefficient
    turn = quadrant.astype(np.int64) & 3
    swap = (turn & 1).astype(bool)
    sine, cosine = np.where(swap, cosine, sine), np.where(swap, sine, cosine)
    return np.where(turn >= 2, -sine, sine), np.where((turn == 1) | (turn == 2), -cosine, cosine)
