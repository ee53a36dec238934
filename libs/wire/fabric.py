"""The envelope of the interconnect: frames handed to the fabric emulator, and delivered by it.

any die --UbFrame--> shard of the emulator --UbDelivery--> owner of the target die
whoever tests --FaultArm, FaultHeal--> shard --FaultState--> back
shard --LinkReport, once a second while anything moves--> gateways
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from libs.wire.registry import Limit, message


@message("ub_frame", limit=Limit.BULK)
@dataclass(frozen=True, slots=True, eq=False)
class UbFrame:
    """A frame at its departure; `payload` is the encoded inner frame, `[nbytes]` uint8.

    `depart_ns` is when it was ready, `begin_ns` when its egress link took it (-1: that link is not
    the sender's to reserve). `charge_bytes` and `repeat` are what it costs on the emulated
    timeline; `plane` is empty for the one that connects the two dies anyway.
    """

    source: int
    target: int
    depart_ns: int
    charge_bytes: int
    repeat: int
    payload: np.ndarray
    begin_ns: int = -1
    plane: str = ""


@message("ub_delivery", limit=Limit.BULK)
@dataclass(frozen=True, slots=True, eq=False)
class UbDelivery:
    """The same frame with its delivery stamp."""

    source: int
    target: int
    deliver_ns: int
    payload: np.ndarray


@message("fault_arm")
@dataclass(frozen=True, slots=True)
class FaultArm:
    """Arm a fault of class `kind`, or replace the armed one of the same id.

    The scope is that of `libs.fabric.faults.scope`, `probability` the share of the traffic there
    that is touched (`libs.fabric.faults.catalogue`); `duration_ns` 0 lasts until healed.
    """

    fault_id: str
    kind: str
    probability: float
    seed: int
    parameters: tuple[tuple[str, int], ...] = ()
    scope: str = "everything"
    numbers: tuple[int, ...] = ()
    plane: str = ""
    direction: str = "both"
    start_ns: int = 0
    duration_ns: int = 0


@message("fault_heal")
@dataclass(frozen=True, slots=True)
class FaultHeal:
    """Disarm a fault; an unknown id is fine."""

    fault_id: str


@message("fault_state")
@dataclass(frozen=True, slots=True)
class FaultState:
    """The answer to both: whether it is armed now, and what it has done (the witness).

    `seen` counts frames in scope, `touched` those it changed, delayed, repeated or lost; `problem`
    says why it could not be armed.
    """

    fault_id: str
    armed: bool
    seen: int
    touched: int
    problem: str = ""


@dataclass(frozen=True, slots=True)
class LinkRow:
    """What one link carried in the window of its report.

    Of an ingress link that is all it carried; of an egress link what went to the reporter's dies,
    so that a reader adds up the rows of all reporters.
    """

    plane: str
    link: int
    direction: str
    frames: int
    nbytes: int
    busy_ns: int


@dataclass(frozen=True, slots=True)
class PlaneTotal:
    """What one plane brought to the reporter's dies since the reporter's life began."""

    plane: str
    frames: int
    nbytes: int


@message("link_report")
@dataclass(frozen=True, slots=True)
class LinkReport:
    """One shard on its links, from `begin_ns` to `end_ns` of the emulated timeline.

    `links` are those that carried anything, the busiest first; `left_out` more did not fit. A
    report without rows says that the links have come to rest, and is followed by silence until
    something moves. Totals count every frame once, by its arrival; they never go back within one
    life, so that a lost report costs a reader nothing but time.
    """

    begin_ns: int
    end_ns: int
    links: tuple[LinkRow, ...]
    left_out: int
    totals: tuple[PlaneTotal, ...]
