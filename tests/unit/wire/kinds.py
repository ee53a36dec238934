"""Message classes of the wire tests; their kinds start with `test_`, so no schema is generated."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from libs.wire.registry import Limit, message


@message("test_control")
@dataclass(frozen=True, slots=True)
class Control:
    count: int
    ratio: float
    ready: bool
    name: str
    blob: bytes
    note: str | None = None
    retries: int = 3


@dataclass(frozen=True, slots=True, eq=False)
class Part:
    label: str
    rows: np.ndarray


@message("test_bulk", limit=Limit.BULK)
@dataclass(frozen=True, slots=True, eq=False)
class Bulk:
    parts: tuple[Part, ...]
    pairs: tuple[tuple[int, float], ...]
    scale: NDArray[np.float32]
    mask: np.ndarray | None = None


@message("test_token", limit=Limit.TOKEN)
@dataclass(frozen=True, slots=True)
class Tokens:
    lists: tuple[tuple[str, ...], ...]


@message("test_guarded")
@dataclass(frozen=True, slots=True)
class Guarded:
    share: float = 0.5

    def __post_init__(self) -> None:
        if not 0 <= self.share <= 1:
            raise ValueError("share must be between 0 and 1")


def control(**changes: object) -> Control:
    fields: dict[str, object] = {
        "count": -(2**63), "ratio": 0.1, "ready": True, "name": "дие", "blob": b"\x00\xff",
    }  # fmt: skip
    return Control(**(fields | changes))  # type: ignore[arg-type]


def floats(*values: float) -> NDArray[np.float32]:
    return np.array(values, dtype=np.float32)


def bulk() -> Bulk:
    parts = (
        Part("a", np.arange(12, dtype=np.int8).reshape(3, 4)),
        Part("b", np.zeros((0, 7), dtype=np.float64)),
    )
    return Bulk(parts, ((1, 2.5), (3, float("-inf"))), floats(1.5), np.array(7, dtype=np.uint64))
