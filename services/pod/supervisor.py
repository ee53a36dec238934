"""The supervisor of the embedded pod: a broker of its own, every actor of the plan, one state
file.
"""

from __future__ import annotations

import os
import socket
from dataclasses import dataclass

from libs.bus.server import NatsServer, NatsServerOptions
from libs.clock.pod_clock import wall_ns
from libs.config.plan import plan_pod
from libs.config.topology import load_topology
from libs.errors import BadInput, OperatingError
from libs.runtime.service import ServiceSettings
from services.pod.fleet import Fleet
from services.pod.state import PodState, clear_state, log_path, read_state, state_dir, write_state


@dataclass(frozen=True, slots=True)
class UpOptions:
    """How to start a pod."""

    topology: str = "mini"
    pace: float = 1.0
    http_port: int = 8000
    log: str = "info"
    validate: bool = False


class PortTaken(OperatingError):
    """Somebody else listens on the HTTP port."""

    code = "port_taken"


def run_pod(options: UpOptions) -> int:
    """Start, serve until SIGTERM or SIGINT, stop; returns the exit code."""
    plan = plan_pod(load_topology(options.topology))
    check_can_start(options)
    fleet = Fleet(plan, log_path("supervisor").parent)
    fleet.load()
    os.environ["XDS_HTTP_PORT"] = str(options.http_port)
    with NatsServer(NatsServerOptions(directory=state_dir() / "nats")) as broker:
        settings = ServiceSettings(
            actor="",
            topology=options.topology,
            nats=broker.url,
            epoch_ns=wall_ns(),
            pace=options.pace,
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
                fleet.processes,
            )
            write_state(state)
            return fleet.serve()
        finally:
            fleet.stop()
            clear_state()


def check_can_start(options: UpOptions) -> None:
    """Raise one clear error for what would make the start fail."""
    running = read_state()
    if running is not None:
        pid = running.supervisor_pid
        message = f"a pod is already running here (pid {pid}, {running.base_url}); run: xds down"
        raise BadInput(message, field="state")
    if options.pace < 0:
        raise BadInput("--pace must be 0 or more", field="pace")
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", options.http_port))
        except OSError as error:
            where = f"port {options.http_port} ({error.strerror})"
            raise PortTaken(f"cannot listen on {where}; choose another with --port") from error
