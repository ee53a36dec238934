"""The same elementwise steps in ordinary float32, for the comparison mode `f32`.

Faster, and the closest to what other runtimes compute; but numpy and BLAS choose the order of sums
by shape and CPU, so results change in their last bits with the batch a row shares.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

Float32 = NDArray[np.float32]


def sigmoid(x: NDArray[Any]) -> Float32:
    """`1 / (1 + e^-x)` in float32; saturates beyond `|x| = 80`."""
    result: Float32 = np.float32(1) / (np.float32(1) + np.exp(-np.clip(x, -80, 80)))
    return result


def rms_norm(x: NDArray[Any], weight: Float32, eps: float) -> Float32:
    """Root-mean-square norm of rows in float32, `[tokens, n] -> [tokens, n]`."""
    mean = np.mean(x * x, axis=-1, keepdims=True, dtype=np.float32)
    return (weight * (x / np.sqrt(mean + np.float32(eps)))).astype(np.float32, copy=False)


def softmax(scores: Float32) -> Float32:
    """Row-wise softmax; overwrites and returns `scores`."""
    scores -= scores.max(axis=-1, keepdims=True)
    np.exp(scores, out=scores)
    scores /= scores.sum(axis=-1, keepdims=True)
    return scores
