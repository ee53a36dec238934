"""The three planes of the interconnect, and which of them connects two dies (P024).

    UB     inside the SuperPod, any die to any die at one cost     a link per die and direction
    RoCE   every die, also those of 910B servers                   a link per die and direction
    VPC    every server, towards the world                         a link per server and direction

Two dies of the SuperPod talk over UB; as soon as one of them is in a 910B server, over the plane
that connects those. A frame may name another plane that both dies have.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from libs.fabric.params import FabricParams
from libs.fabric.superpod import SuperPod


class Plane(StrEnum):
    """A network of its own, with its own links."""

    UB = "ub"
    ROCE = "roce"
    VPC = "vpc"

    # Links are found by plane and number for every frame; an enumeration hashes its name in Python.
    __hash__ = str.__hash__


@dataclass(frozen=True, slots=True)
class PlaneLimits:
    """What one link of a plane can do."""

    bytes_per_s: int
    latency_ns: int


def plane_limits(params: FabricParams) -> dict[Plane, PlaneLimits]:
    """The limits of every plane."""
    return {
        Plane.UB: PlaneLimits(params.ub_bytes_per_s, params.ub_latency_ns),
        Plane.ROCE: PlaneLimits(params.roce_bytes_per_s, params.roce_latency_ns),
        Plane.VPC: PlaneLimits(params.vpc_bytes_per_s, params.vpc_latency_ns),
    }


def plane_between(pod: SuperPod, source: int, target: int, wanted: str = "") -> Plane | None:
    """The plane from `source` to `target`; None when `wanted` does not connect them.

    Without a wish it is UB inside the SuperPod, and what connects the 910B servers otherwise.
    """
    outside = pod.is_outside(max(source, target))  # 910B servers come behind all others
    if not wanted:
        return Plane(pod.outside_plane) if outside else Plane.UB
    if wanted == Plane.UB:
        return None if outside else Plane.UB
    return Plane(wanted) if wanted in (Plane.ROCE, Plane.VPC) else None


def link_of(pod: SuperPod, plane: Plane, die: int) -> int:
    """The number of the link that `die` uses on `plane`: its own, or its server's on the VPC."""
    return pod.server_of(die) if plane is Plane.VPC else die


def is_shared(plane: Plane) -> bool:
    """Whether several dies, and so several processes, share one link of `plane`."""
    return plane is Plane.VPC
