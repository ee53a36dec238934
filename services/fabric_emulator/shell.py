"""Builds one shard of the fabric emulator from the plan."""

from __future__ import annotations

from libs.runtime.build import Built, ServiceContext
from services.fabric_emulator.core import FabricEmulatorCore


def build(context: ServiceContext) -> Built:
    """Every shard knows all dies."""
    return Built(FabricEmulatorCore(context.actor.name, context.plan.num_dies))
