"""The checksum of a KV block: what the prefill side computed, the decode side must find."""

from __future__ import annotations

import zlib

import numpy as np


def block_checksum(rows: np.ndarray) -> int:
    """CRC-32 over the bytes of `[layers, block_size, width]` in C order."""
    return zlib.crc32(np.ascontiguousarray(rows).data)
