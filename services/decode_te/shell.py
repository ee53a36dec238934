"""Builds a decode DP group from the plan."""

from __future__ import annotations

from libs.config.plan import expert_placement
from libs.fabric.profiles import PROFILES, layer_repeats
from libs.runtime.build import Built, ServiceContext
from services.decode_te.core import DecodeConfig, DecodeCore
from services.decode_te.executor import DecodeExecutor


def build(context: ServiceContext) -> Built:
    """The core, and the executor with everything of the model but the experts."""
    plan, actor = context.plan, context.actor
    topology, args = plan.topology, context.model.args
    section = next(te for te in topology.decode_tes if te.name == actor.te)
    profile = PROFILES[topology.profile]
    kv = context.model.paged_kv(topology.kv.decode_blocks, topology.kv.block_size)
    config = DecodeConfig(
        name=actor.name,
        te=actor.te,
        die=actor.dies[0],
        placement=expert_placement(plan, actor.te, args.n_routed_experts),
        profile=profile,
        repeats=layer_repeats(profile, args.first_k_dense_replace, args.num_hidden_layers),
        num_dense=args.first_k_dense_replace,
        num_blocks=kv.num_blocks,
        block_size=kv.block_size,
        block_bytes=kv.block_bytes,
        batch_max=section.batch_max,
        queue_max=section.queue_max,
        distflows=tuple(actor.name for actor in plan.of_role("distflow")),
        life=context.incarnation,
    )
    executor = DecodeExecutor(context.model.attention_engine(), kv)
    # A step between two exchanges takes about a millisecond, and six of them make an iteration.
    return Built(DecodeCore(config), executor, inline=True)
