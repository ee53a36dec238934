"""What a fault works on: one frame on its way to one die, and what every fault class offers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Protocol

import numpy as np

from libs.fabric.faults.draw import Draw


@dataclass(frozen=True, slots=True, eq=False)
class Delivery:
    """A stamped frame. Faults make it later, damage it, repeat it or lose it; never earlier.

    `payload` is the encoded inner frame, `[nbytes]` uint8; `nbytes` is what the links were charged,
    and `occupied_ns` how long each of them took to carry it.
    """

    plane: str
    source: int
    target: int
    begin_ns: int
    deliver_ns: int
    nbytes: int
    payload: np.ndarray
    occupied_ns: int = 0


class Fault(Protocol):
    """One class of fault: a frozen dataclass whose integer fields are its parameters."""

    KIND: ClassVar[str]

    def apply(self, delivery: Delivery, draw: Draw) -> list[Delivery]:
        """What arrives instead of `delivery`: nothing, the same, or several."""
        ...
