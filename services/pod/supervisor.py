"""The supervisor of the embedded pod: starts the broker, forks every service, stops them again.

One parent imports everything and loads the model, then forks each actor: forty processes in well
under a second, sharing the weights' pages, where forty interpreters would take twenty. It forks
before any event loop or thread exists; a child dies with its parent.

It restarts nothing: a process that dies stays dead, which the control plane sees and `/ready` says.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import gc
import os
import signal
import socket
import sys
import time
from dataclasses import dataclass
from pathlib import Path

from libs.bus.server import NatsServer, NatsServerOptions
from libs.clock.pod_clock import monotonic_s, wall_ns
from libs.config.plan import ActorPlan, plan_pod
from libs.config.topology import load_topology
from libs.errors import BadInput, OperatingError, XdsError
from libs.model.resources import ModelResources
from libs.runtime.service import ServiceSettings, run_service
from libs.telemetry.logs import configure_logs
from services.gateway.shell import build as build_gateway
from services.pod.state import PodState, clear_state, log_path, read_state, state_dir, write_state
from services.superpod.wiring import SERVICE_BUILDERS

STOP_GRACE_S = 5.0
_BUILDERS = {**SERVICE_BUILDERS, "gateway": build_gateway}
_PR_SET_PDEATHSIG = 1


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


class Supervisor:
    """One embedded pod, from start to stop."""

    def __init__(self, options: UpOptions) -> None:
        self.options = options
        self._children: dict[int, str] = {}
        self._stopping = False
        self._epoch_ns = wall_ns()

    def run(self) -> int:
        """Start, serve until SIGTERM or SIGINT, stop; returns the exit code."""
        plan = plan_pod(load_topology(self.options.topology))
        check_can_start(self.options)
        log_path("supervisor").parent.mkdir(parents=True, exist_ok=True)
        section = plan.topology.model
        model = ModelResources(section.checkpoint, section.engine)
        model.engine()
        _ = model.tokenizer, model.template
        broker = NatsServer(NatsServerOptions(directory=state_dir() / "nats"))
        with broker:
            # What is alive now is alive for good: the collector need not touch shared pages again.
            gc.collect()
            gc.freeze()
            self._epoch_ns = wall_ns()
            try:
                for actor in plan.actors:
                    self._children[self._fork(actor, broker, model)] = actor.name
                self._publish(broker)
                self._serve()
            finally:
                self._stop_all()
                clear_state()
        return 0

    def _publish(self, broker: NatsServer) -> None:
        options = self.options
        actors = {name: pid for pid, name in self._children.items()}
        state = PodState(
            os.getpid(), options.http_port, broker.url, options.topology, options.pace,
            self._epoch_ns, actors,
        )  # fmt: skip
        write_state(state)

    def _fork(self, actor: ActorPlan, broker: NatsServer, model: ModelResources) -> int:
        parent = os.getpid()
        pid = os.fork()
        if pid:
            return pid
        code = 1
        try:
            _become_child(actor.name, parent)
            code = self._child(actor, broker, model)
        except BaseException as error:  # noqa: BLE001 - a child must never return into the parent
            print(f"{actor.name}: {type(error).__name__}: {error}", file=sys.stderr, flush=True)
        finally:
            os._exit(code)

    def _child(self, actor: ActorPlan, broker: NatsServer, model: ModelResources) -> int:
        options = self.options
        os.environ["XDS_HTTP_PORT"] = str(options.http_port)
        settings = ServiceSettings(
            actor=actor.name,
            topology=options.topology,
            nats=broker.url,
            epoch_ns=self._epoch_ns,
            pace=options.pace,
            log=options.log,
            validate=options.validate,
        )
        configure_logs(options.log)
        try:
            asyncio.run(run_service(_BUILDERS[actor.role], settings, model))
        except XdsError as error:
            print(f"error: {error}", file=sys.stderr, flush=True)
            return 1
        return 0

    def _serve(self) -> None:
        def stop(_signal: int, _frame: object) -> None:
            self._stopping = True

        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, stop)
        while not self._stopping:
            self._reap()
            time.sleep(0.1)

    def _reap(self) -> None:
        """Collect children that ended; their names go to the log."""
        for pid in list(self._children):
            ended, status = os.waitpid(pid, os.WNOHANG)
            if ended:
                name = self._children.pop(pid)
                code = os.waitstatus_to_exitcode(status)
                if not self._stopping:
                    print(f"{name} (pid {pid}) ended with {code}", file=sys.stderr, flush=True)

    def _stop_all(self) -> None:
        self._stopping = True
        self._signal_all(signal.SIGTERM)
        deadline_s = monotonic_s() + STOP_GRACE_S
        while self._children and monotonic_s() < deadline_s:
            self._reap()
            time.sleep(0.02)
        self._signal_all(signal.SIGKILL)
        for pid in list(self._children):
            os.waitpid(pid, 0)
        self._children.clear()

    def _signal_all(self, number: signal.Signals) -> None:
        for pid in self._children:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, number)


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


def _become_child(name: str, parent: int) -> None:
    """Own session, own log, default signals, and no life after the parent's."""
    os.setsid()
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    log = os.open(_fresh(log_path(name)), os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
    os.dup2(log, 1)
    os.dup2(log, 2)


def _fresh(path: Path) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    return path
