"""Builds one shard of the fabric emulator from the plan."""

from __future__ import annotations

from libs.fabric.superpod import superpod_of
from libs.runtime.build import Built, ServiceContext
from services.fabric_emulator.core import FabricEmulatorCore


def build(context: ServiceContext) -> Built:
    """Every shard knows all dies."""
    pod = superpod_of(context.plan)
    core = FabricEmulatorCore(context.actor.name, pod.num_dies, pod=pod, check=context.validate)
    return Built(core)
