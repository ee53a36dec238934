"""Builds a prefill DP group from the plan."""

from __future__ import annotations

from libs.fabric.profiles import PROFILES
from libs.runtime.build import Built, ServiceContext
from services.prefill_te.core import PrefillConfig, PrefillCore
from services.prefill_te.executor import PrefillExecutor


def build(context: ServiceContext) -> Built:
    """The core, and the executor with the whole model."""
    plan, actor = context.plan, context.actor
    topology = plan.topology
    section = next(te for te in topology.prefill_tes if te.name == actor.te)
    kv = context.model.paged_kv(topology.kv.prefill_blocks, topology.kv.block_size)
    config = PrefillConfig(
        name=actor.name,
        te=actor.te,
        die=actor.dies[0],
        profile=PROFILES[topology.profile],
        num_layers=context.model.args.num_hidden_layers,
        num_blocks=kv.num_blocks,
        block_size=kv.block_size,
        block_bytes=kv.block_bytes,
        queue_max=section.queue_max,
        life=context.incarnation,
        prefix_cache=topology.kv.prefix_cache,
        host_blocks=topology.kv.host_blocks,
    )
    executor = PrefillExecutor(context.model.engine(), kv, config.host_blocks)
    return Built(PrefillCore(config), executor)
