"""XCCL between two dies: remote writes into each other's memory, nothing else (P035-P036).

die ====XcclWrite (UB frames)====> die
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from libs.wire.registry import Limit, message


@message("xccl_write", limit=Limit.BULK)
@dataclass(frozen=True, slots=True, eq=False)
class XcclWrite:
    """One remote write by die `source`: `write` is what `libs.xccl.frames` packs, `[nbytes]` uint8.

    It carries the lives of both ends, its place and a checksum; the memory it reaches decides
    whether it may land. `transfer_id` is for whoever reads a trace, and for nobody else.
    """

    source: int
    write: np.ndarray
    transfer_id: str = ""
