"""What the steps of a send and a receive cost, each constant with its source.

The law of Fig. 5 is T = 5 us + S / min(n x 36 GB/s, 196 GB/s). Nothing here computes it: the state
machines are charged for their steps, and the law is what comes out (`services.superpod.bench_p2p`).
The 5 us are a kernel start, the flight of the last byte with its tail right behind it, the copy of
the last piece and the flight of the ACK.
"""

from __future__ import annotations

from libs import units
from libs.fabric.params import UB

#: One die's UB link (given: CloudMatrix384, arXiv 2506.12708).
UB_BYTES_PER_S = UB.ub_bytes_per_s
#: Remote stores of one AIV core (fitted: Fig. 5 leaves 34-38 GB/s).
AIV_BYTES_PER_S = 36_000_000_000
#: AIV cores from which on the link, not the cores, limits a send.
FILLING_AIVS = -(-UB_BYTES_PER_S // AIV_BYTES_PER_S)
#: Launch of a kernel up to its first transfer (fitted: 19.6 us of the law at 1 MiB, 2 AIV).
KERNEL_START_NS = units.us(0.75)
#: Local transfers between one AIV core's buffer and HBM (assumed; above 36 GB/s, so that copies
#: overlap with the wire, as the ratio of Fig. 5 demands), and of all cores together (given:
#: 1.6 TB/s of HBM per die).
LOCAL_BYTES_PER_S = 200_000_000_000
HBM_BYTES_PER_S = 1_600_000_000_000
#: A sleeping receiver is woken instead of polling (assumed; asynchronous mode only).
WAKE_NS = units.us(1.0)

#: Start-up of a whole send per path, for the choice between paths. MTE is the fitted law; DMA and
#: URMA are assumed: P036 and P046 say "higher" and give no figure.
MTE_STARTUP_NS = UB.p2p_startup_ns
URMA_STARTUP_NS = units.us(8.0)
DMA_STARTUP_NS = units.us(12.0)

#: What DMA and URMA need beyond an MTE kernel before the first byte moves.
EXTRA_START_NS = {
    "mte": 0,
    "urma": URMA_STARTUP_NS - MTE_STARTUP_NS,
    "dma": DMA_STARTUP_NS - MTE_STARTUP_NS,
}


def law_ns(nbytes: int, aivs: int) -> int:
    """The fitted law of Fig. 5, for comparison only."""
    return MTE_STARTUP_NS + units.transfer_ns(nbytes, min(aivs * AIV_BYTES_PER_S, UB_BYTES_PER_S))


def load_ns(nbytes: int) -> int:
    """MTE2 of one core: application area to one half of the unified buffer."""
    return units.transfer_ns(nbytes, LOCAL_BYTES_PER_S)


def store_ns(nbytes: int, path: str) -> int:
    """The engine's part of a remote write: MTE3 of one core, or a DMA at link speed."""
    return units.transfer_ns(nbytes, AIV_BYTES_PER_S if path == "mte" else UB_BYTES_PER_S)


def copy_ns(nbytes: int) -> int:
    """Managed slot to application area by one core: through both halves, in and out overlap."""
    return units.transfer_ns(nbytes + -(-nbytes // 2), LOCAL_BYTES_PER_S)


def hbm_ns(nbytes: int) -> int:
    """What reading or writing takes of the memory that all cores of a die share."""
    return units.transfer_ns(nbytes, HBM_BYTES_PER_S)
