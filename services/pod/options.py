"""How to start a pod, and what would keep it from starting; light enough for the command line."""

from __future__ import annotations

import socket
from dataclasses import dataclass

from libs.errors import BadInput, OperatingError
from services.pod.state import read_state


@dataclass(frozen=True, slots=True)
class UpOptions:
    """How to start a pod."""

    topology: str = "mini"
    pace: float = 1.0
    http_port: int = 8000
    log: str = "info"
    carrier: str = ""  # as the topology says
    validate: bool = False


class PortTaken(OperatingError):
    """Somebody else listens on the HTTP port."""

    code = "port_taken"


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
