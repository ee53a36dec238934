"""The supervisor of the embedded pod: a broker of its own, every actor of the plan, one state
file.
"""

from __future__ import annotations

import os

from libs.bus.server import NatsServer, NatsServerOptions
from libs.clock.pod_clock import wall_ns
from libs.config.plan import plan_pod
from libs.config.topology import load_topology
from libs.runtime.service import ServiceSettings
from services.pod.fleet import Fleet
from services.pod.memory import shared_memory
from services.pod.options import UpOptions, check_can_start
from services.pod.state import PodState, clear_state, log_path, state_dir, write_state


def run_pod(options: UpOptions) -> int:
    """Start, serve until SIGTERM or SIGINT, stop; returns the exit code."""
    plan = plan_pod(load_topology(options.topology, options.carrier))
    check_can_start(options)
    os.environ["XDS_HTTP_PORT"] = str(options.http_port)
    broker_options = NatsServerOptions(directory=state_dir() / "nats")
    with shared_memory(plan, plan.actors) as shm, NatsServer(broker_options) as broker:
        fleet = Fleet(plan, log_path("supervisor").parent, shm)
        fleet.load()
        settings = ServiceSettings(
            actor="",
            topology=options.topology,
            nats=broker.url,
            epoch_ns=wall_ns(),
            pace=options.pace,
            carrier=plan.topology.fabric.carrier,
            log=options.log,
            validate=options.validate,
        )
        try:
            fleet.start(plan.actors, settings)
            state = PodState(
                os.getpid(),
                options.http_port,
                broker.url,
                options.topology,
                options.pace,
                settings.epoch_ns,
                plan.topology.fabric.carrier,
                fleet.processes,
            )
            write_state(state)
            return fleet.serve()
        finally:
            fleet.stop()
            clear_state()
