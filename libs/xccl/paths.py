"""Which engine moves the bytes: MTE, DMA or URMA (P027, P036, P046).

    MTE    an AIV core loads into its unified buffer and stores from there; lowest start-up, 36 GB/s
           per core, at most half a buffer at a time
    DMA    an engine of its own moves up to gigabytes, past the unified buffer and the AIV cores;
           higher start-up
    URMA   a DMA that an AIV core starts itself; one core, between the two

The paper gives the trade and no rule. The rule here takes the path with the least expected time,
counting AIV cores as free only if nobody else wants them.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from libs import units
from libs.errors import BadInput, CapacityExceeded
from libs.fabric.superpod import AIV_PER_DIE
from libs.xccl import p2p_cost

#: The longest single DMA (given: "several GB", P027).
DMA_BYTES_MAX = 4 << 30


class Path(StrEnum):
    """An engine."""

    MTE = "mte"
    DMA = "dma"
    URMA = "urma"


@dataclass(frozen=True, slots=True)
class Occupancy:
    """How busy the die is: AIV cores that nobody uses, and transfers that share the link now."""

    free_aivs: int = AIV_PER_DIE
    flows: int = 1

    def __post_init__(self) -> None:
        if not 0 <= self.free_aivs <= AIV_PER_DIE or self.flows < 1:
            raise BadInput(f"not a load: {self}", field="load")


IDLE = Occupancy()


def expected_ns(path: Path, nbytes: int, aivs: int, load: Occupancy = IDLE) -> int | None:
    """The time of a send over `path` under `load`; None when the path is not to be had."""
    link = p2p_cost.UB_BYTES_PER_S // load.flows
    match path:
        case Path.MTE:
            usable = min(aivs, load.free_aivs)
            if usable == 0:
                return None
            return p2p_cost.MTE_STARTUP_NS + units.transfer_ns(
                nbytes, min(usable * p2p_cost.AIV_BYTES_PER_S, link)
            )
        case Path.DMA:
            return p2p_cost.DMA_STARTUP_NS + units.transfer_ns(nbytes, link)
        case Path.URMA:
            if min(aivs, load.free_aivs) == 0:
                return None
            return p2p_cost.URMA_STARTUP_NS + units.transfer_ns(nbytes, link)
        case _:
            raise AssertionError(f"unknown path {path!r}")


def choose_path(nbytes: int, aivs: int, load: Occupancy = IDLE) -> Path:
    """The fastest path; of equals the one listed first.

    Raises `BadInput` for an impossible request, `CapacityExceeded` for one no engine can serve.
    """
    if nbytes < 0 or not 0 <= aivs <= AIV_PER_DIE:
        raise BadInput(f"{nbytes} bytes with {aivs} AIV cores", field="aivs")
    if nbytes > DMA_BYTES_MAX:
        raise CapacityExceeded(f"{nbytes} bytes exceed one transfer of {DMA_BYTES_MAX}")
    times = {path: expected_ns(path, nbytes, aivs, load) for path in Path}
    possible = {path: time for path, time in times.items() if time is not None}
    return min(possible, key=lambda path: possible[path])
