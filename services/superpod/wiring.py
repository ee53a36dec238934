"""From a topology to a running simulation: every actor of the plan, built by its own service."""

from __future__ import annotations

from collections.abc import Sequence

from libs.config.plan import plan_pod
from libs.config.topology import Topology
from libs.fabric.faults.active import FaultRule
from libs.fabric.sharding import sharding_of
from libs.fabric.superpod import superpod_of
from libs.model.resources import ModelResources
from libs.runtime.build import Builder, Built, ServiceContext
from libs.runtime.sim_host import SimHost, SimOptions
from services.control_plane.shell import build as build_control_plane
from services.decode_te.shell import build as build_decode_te
from services.distflow.shell import build as build_distflow
from services.expert_die.shell import build as build_expert_die
from services.fabric_emulator.core import FabricEmulatorCore
from services.fabric_emulator.shell import build as build_fabric_emulator
from services.gateway.core import GatewayConfig, GatewayCore
from services.job_executor.shell import build as build_job_executor
from services.output.shell import build as build_output
from services.prefill_te.shell import build as build_prefill_te
from services.te_shell.shell import build as build_te_shell

#: How each role but the gateway is built; the gateway's HTTP edge exists only where there is HTTP.
SERVICE_BUILDERS: dict[str, Builder] = {
    "control_plane": build_control_plane,
    "decode_te": build_decode_te,
    "distflow": build_distflow,
    "expert_die": build_expert_die,
    "fabric_emulator": build_fabric_emulator,
    "job_executor": build_job_executor,
    "output": build_output,
    "prefill_te": build_prefill_te,
    "te_shell": build_te_shell,
}


def build_gateway(context: ServiceContext) -> Built:
    """The gateway without its HTTP edge: clients of a simulation speak to the core."""
    limits = context.plan.topology.limits
    return Built(GatewayCore(GatewayConfig(context.actor.name, limits.requests_in_flight_max)))


def simulate_pod(
    topology: Topology,
    model: ModelResources,
    *,
    seed: int = 0,
    validate: bool = True,
    faults: Sequence[FaultRule] = (),
) -> SimHost:
    """A simulation with every actor of `topology`; the model is loaded once and shared.

    `faults` are armed at every shard of the fabric from the start.
    """
    model.engine()
    plan = plan_pod(topology)
    options = SimOptions(
        seed=seed, validate=validate, sharding=sharding_of(topology), pod=superpod_of(plan)
    )
    host = SimHost(options)
    builders = {**SERVICE_BUILDERS, "gateway": build_gateway}
    for actor in plan.actors:
        built = builders[actor.role](ServiceContext(plan, actor, model, validate))
        if isinstance(built.core, FabricEmulatorCore):
            for rule in faults:
                built.core.faults.arm(rule)
        host.add(built.core, dies=actor.dies, executor=built.executor)
    return host
