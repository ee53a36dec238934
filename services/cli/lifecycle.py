"""Starting and stopping the embedded pod: `xds up`, `xds down`."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
import time

from libs.clock.pod_clock import monotonic_s
from libs.config.topology import load_topology
from libs.errors import OperatingError, PeerLost
from services.cli.client import wait_ready
from services.pod.state import PodState, is_alive, log_path, read_state
from services.pod.supervisor import UpOptions, check_can_start

READY_S = 60.0
STOP_S = 15.0


def start_pod(options: UpOptions) -> PodState:
    """Start a supervisor in the background and wait until the pod is ready.

    Raises what is wrong with the options before anything is started, and the end of the
    supervisor's log when the start fails.
    """
    load_topology(options.topology)
    check_can_start(options)
    log = log_path("supervisor")
    log.parent.mkdir(parents=True, exist_ok=True)
    arguments = [options.topology, str(options.pace), str(options.http_port), options.log]
    arguments.append("1" if options.validate else "0")
    with log.open("wb") as stream:
        process = subprocess.Popen(
            [sys.executable, "-m", "services.pod", *arguments],
            stdin=subprocess.DEVNULL,
            stdout=stream,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    state = _await_state(process)
    try:
        asyncio.run(wait_ready(state.base_url, READY_S))
    except PeerLost:
        stop_pod(state)
        raise
    return state


def _await_state(process: subprocess.Popen[bytes]) -> PodState:
    deadline_s = monotonic_s() + READY_S
    while monotonic_s() < deadline_s:
        if process.poll() is not None:
            text = log_path("supervisor").read_text(errors="replace").strip()
            tail = text.splitlines()[-1] if text else "its log is empty"
            raise OperatingError(f"the pod ended at once: {tail.removeprefix('error: ')}")
        state = read_state()
        if state is not None and state.supervisor_pid == process.pid:
            return state
        time.sleep(0.05)
    process.terminate()
    raise OperatingError(f"the pod did not start within {READY_S:.0f} s")


def stop_pod(state: PodState) -> None:
    """Ask the supervisor to stop everything, and wait until it has."""
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
