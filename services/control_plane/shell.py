"""Builds the control plane from the plan."""

from __future__ import annotations

from libs import units
from libs.runtime.build import Built, ServiceContext
from services.control_plane.core import ControlPlaneConfig, ControlPlaneCore


def build(context: ServiceContext) -> Built:
    """Beat what belongs to no TE, and the TE-shells; expect everybody."""
    health = context.plan.topology.health
    others = [actor for actor in context.plan.actors if actor.name != context.actor.name]
    direct = tuple(a.name for a in others if not a.te or a.role == "te_shell")
    config = ControlPlaneConfig(
        context.actor.name,
        direct,
        tuple(actor.name for actor in others),
        units.s(health.control_period_s),
        health.silent_after_periods,
    )
    return Built(ControlPlaneCore(config))
