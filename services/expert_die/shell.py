"""Builds an expert die from the plan."""

from __future__ import annotations

from libs.config.plan import expert_placement
from libs.fabric.profiles import PROFILES
from libs.runtime.build import Built, ServiceContext
from services.expert_die.core import ExpertDieConfig, ExpertDieCore
from services.expert_die.executor import ExpertExecutor


def build(context: ServiceContext) -> Built:
    """The core, and the executor with the experts placed on this die."""
    plan, actor = context.plan, context.actor
    die = actor.dies[0]
    placement = expert_placement(plan, actor.te, context.model.args.n_routed_experts)
    config = ExpertDieConfig(die, actor.te, placement, PROFILES[plan.topology.profile])
    engine = context.model.expert_engine(placement.experts_on(die))
    # One work item takes a fraction of a millisecond: less than a trip to another thread and back.
    return Built(ExpertDieCore(actor.name, config), ExpertExecutor(engine), inline=True)
