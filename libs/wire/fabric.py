"""The envelope of the UB plane: frames handed to the fabric emulator, and delivered by it."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from libs.wire.registry import Limit, message


@message("ub_frame", limit=Limit.BULK)
@dataclass(frozen=True, slots=True, eq=False)
class UbFrame:
    """A frame at its departure; `payload` is the encoded inner frame, `[nbytes]` uint8.

    `charge_bytes` and `repeat` are what the frame costs on the emulated timeline.
    """

    source: int
    target: int
    depart_ns: int
    charge_bytes: int
    repeat: int
    payload: np.ndarray


@message("ub_delivery", limit=Limit.BULK)
@dataclass(frozen=True, slots=True, eq=False)
class UbDelivery:
    """The same frame with its delivery stamp."""

    source: int
    target: int
    deliver_ns: int
    payload: np.ndarray
