"""A DP group's memory for KV on its way, and the messages that carry it.

The application area of the die, as XCCL sees it, is lent out in ranges: to a sender from the export
of the blocks until its message is over, to a receiver from the offer until the import. A range is
given back only when nothing can write into it any more: the port has said how the message ended.

Who uses it: `services.prefill_te.kv_sender`, `services.decode_te.kv_receiver`.
"""

from __future__ import annotations

import numpy as np

from libs.distflow.port import XcclPort
from libs.kvcache.arena import Arena
from libs.xccl.memory import DieMemory
from libs.xccl.paths import Path, choose_path

#: AIV cores that a transfer of KV may use beside the computation (assumed: the least of Fig. 5).
KV_AIVS = 2


class KvMemory:
    """Memory of `nbytes`, lent out by request id, and the port of die `die` in its life `life`."""

    def __init__(self, die: int, life: int, nbytes: int) -> None:
        self.life = life
        self.arena = Arena(nbytes)
        # Zeroed on demand by the operating system: what nobody uses takes no memory.
        self.memory = DieMemory(np.zeros(nbytes, np.uint8).data)
        self.port = XcclPort(die, life, self.memory)

    def store(self, owner: str, data: np.ndarray) -> None:
        """Copy `data`, `[nbytes]` uint8, into the range of `owner`, which is as long."""
        offset, nbytes = self._range(owner)
        assert data.nbytes == nbytes, (owner, data.nbytes, nbytes)
        self.memory.application[offset : offset + nbytes] = data.data

    def view(self, owner: str) -> np.ndarray:
        """What lies in the range of `owner`, `[nbytes]` uint8; not a copy."""
        offset, nbytes = self._range(owner)
        return np.frombuffer(self.memory.application[offset : offset + nbytes], np.uint8)

    def _range(self, owner: str) -> tuple[int, int]:
        found = self.arena.range_of(owner)
        assert found is not None, f"{owner} has no range"
        return found

    def validate(self) -> None:
        """Ranges are disjoint, rings and accounts add up."""
        self.arena.validate()
        self.port.validate()


def kv_path(charge_bytes: int) -> Path:
    """The engine for KV that weighs `charge_bytes` (P046: a DMA leaves the cores to compute)."""
    return choose_path(charge_bytes, KV_AIVS)
