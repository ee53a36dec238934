"""Builds a TE-shell from the plan."""

from __future__ import annotations

from libs import units
from libs.runtime.build import Built, ServiceContext
from libs.scheduling.routing import DpPolicy
from services.te_shell.core import TeShellConfig, TeShellCore


def build(context: ServiceContext) -> Built:
    """The shell of a prefill or a decode TE; the topology says which."""
    plan, te = context.plan, context.actor.te
    topology, health = plan.topology, plan.topology.health
    prefill = {section.name: section for section in topology.prefill_tes}.get(te)
    decode = {section.name: section for section in topology.decode_tes}.get(te)
    if prefill is not None:
        # A prefill group computes one prompt at a time; the rest of its share queues there.
        leg, role, batch_max, queue_max = "prefill", "prefill_te", 1, prefill.queue_max
        kv_blocks = topology.kv.prefill_blocks
    else:
        assert decode is not None, te
        leg, role = "decode", "decode_te"
        batch_max, queue_max = decode.batch_max, decode.queue_max
        kv_blocks = topology.kv.decode_blocks
    config = TeShellConfig(
        name=context.actor.name,
        te=te,
        leg=leg,
        dp_groups=tuple(actor.name for actor in plan.of_te(te, role)),
        members=tuple(a.name for a in plan.of_te(te) if a.role != "te_shell"),
        batch_max=batch_max,
        queue_max=queue_max,
        kv_blocks=kv_blocks,
        block_size=topology.kv.block_size,
        policy=DpPolicy(decode.routing) if decode is not None else DpPolicy.LEAST_KV,
        period_ns=units.s(health.te_period_s),
        silent_after=health.silent_after_periods,
    )
    return Built(TeShellCore(config))
