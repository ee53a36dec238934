"""Starting and stopping the embedded pod: `xds up`, `xds down`."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from libs.clock.pod_clock import monotonic_s
from libs.config.topology import load_topology
from libs.errors import OperatingError, PeerLost
from services.cli.client import wait_ready
from services.pod.options import UpOptions, check_can_start
from services.pod.state import PodState, is_alive, log_path, read_state

READY_S = 60.0
STOP_S = 15.0


def start_pod(options: UpOptions) -> PodState:
    """Start a supervisor in the background and wait until the pod is ready.

    Raises what is wrong with the options before anything is started, and the end of the
    supervisor's log when the start fails.
    """
    load_topology(options.topology, options.carrier)
    check_can_start(options)
    log = log_path("supervisor")
    log.parent.mkdir(parents=True, exist_ok=True)
    state = _await_state(_spawn(options, log))
    try:
        asyncio.run(wait_ready(state.base_url, READY_S))
    except PeerLost:
        stop_pod(state)
        raise
    return state


def _spawn(options: UpOptions, log: Path) -> int:
    """A supervisor in a session of its own: it outlives this process, which only waits for it."""
    arguments = [options.topology, str(options.pace), str(options.http_port), options.log]
    arguments += [options.carrier, "1" if options.validate else "0"]
    write = os.O_WRONLY | os.O_CREAT | os.O_TRUNC
    return os.posix_spawn(
        sys.executable,
        [sys.executable, "-m", "services.pod", *arguments],
        os.environ,
        file_actions=[
            (os.POSIX_SPAWN_OPEN, 0, os.devnull, os.O_RDONLY, 0),
            (os.POSIX_SPAWN_OPEN, 1, str(log), write, 0o644),
            (os.POSIX_SPAWN_DUP2, 1, 2),
        ],
        setsid=True,
    )


def _await_state(pid: int) -> PodState:
    deadline_s = monotonic_s() + READY_S
    while monotonic_s() < deadline_s:
        if os.waitpid(pid, os.WNOHANG)[0]:
            text = log_path("supervisor").read_text(errors="replace").strip()
            tail = text.splitlines()[-1] if text else "its log is empty"
            raise OperatingError(f"the pod ended at once: {tail.removeprefix('error: ')}")
        state = read_state()
        if state is not None and state.supervisor_pid == pid:
            return state
        time.sleep(0.05)
    os.kill(pid, signal.SIGTERM)
    raise OperatingError(f"the pod did not start within {READY_S:.0f} s")


def stop_pod(state: PodState) -> None:
    """Ask the supervisor to stop everything, and wait until it has."""
    with contextlib.suppress(ProcessLookupError):  # it ended before we came
        os.kill(state.supervisor_pid, signal.SIGTERM)
    deadline_s = monotonic_s() + STOP_S
    while is_alive(state.supervisor_pid) and monotonic_s() < deadline_s:
        # Our own child stays a zombie until somebody asks for its status.
        with contextlib.suppress(ChildProcessError):
            os.waitpid(state.supervisor_pid, os.WNOHANG)
        time.sleep(0.05)
    if is_alive(state.supervisor_pid):
        raise OperatingError(
            f"the pod (pid {state.supervisor_pid}) did not stop within {STOP_S:.0f} s"
        )


def free_port() -> int:
    """A TCP port that is free now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@contextmanager
def own_pod(options: UpOptions) -> Iterator[PodState]:
    """A pod with a state directory of its own, so that it disturbs none that runs; stopped at the
    end.
    """
    before = os.environ.get("XDS_STATE")
    with tempfile.TemporaryDirectory(prefix="xds-") as folder:
        os.environ["XDS_STATE"] = folder
        try:
            state = start_pod(options)
            try:
                yield state
            finally:
                stop_pod(state)
        finally:
            if before is None:
                del os.environ["XDS_STATE"]
            else:
                os.environ["XDS_STATE"] = before
