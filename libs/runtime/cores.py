"""One core of the host for each process that owns a die (P062)."""

from __future__ import annotations

import os

from libs.config.plan import ActorPlan, PodPlan


def core_of(plan: PodPlan, actor: ActorPlan, cores: tuple[int, ...]) -> int | None:
    """The core for `actor`, in turn over `cores`; None for an actor without a die."""
    owners = [other.name for other in plan.processes if other.dies]
    if actor.name not in owners or not cores:
        return None
    return cores[owners.index(actor.name) % len(cores)]


def pin_to_core(plan: PodPlan, actor: ActorPlan) -> None:
    """Keep this process on its core."""
    core = core_of(plan, actor, tuple(sorted(os.sched_getaffinity(0))))
    if core is not None:
        os.sched_setaffinity(0, {core})
