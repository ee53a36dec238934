"""What the pod does when something is wrong with it or with what it is sent."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from libs.bus.nats import NatsBus, NatsOptions
from libs.wire import subjects
from services.cli.chat import ChatQuestion, ask
from services.cli.client import PodClient
from services.cli.lifecycle import free_port
from services.pod.state import PodState, is_alive

pytestmark = pytest.mark.pod


def xds(*arguments: str, state: Path | None = None) -> subprocess.CompletedProcess[str]:
    env = dict(os.environ)
    if state is not None:
        env["XDS_STATE"] = str(state)
    command = [sys.executable, "-m", "services.cli", *arguments]
    return subprocess.run(command, env=env, capture_output=True, text=True, timeout=110)


async def test_malformed_frames_are_refused_and_the_pod_goes_on(pod: PodState) -> None:
    bus = await NatsBus.connect(NatsOptions(pod.nats_url, "stranger"))
    for actor in pod.actors:
        bus.publish(subjects.inbox(actor), b"\x00 this is no frame")
    bus.publish(subjects.ub(0), b"")
    await bus.flush()
    await bus.close()
    async with PodClient(pod.base_url) as client:
        question = ChatQuestion([{"role": "user", "content": "Who are you?"}])
        answer = await ask(client, question, show=False)
    assert answer.finish_reason == "stop"


def test_a_second_pod_in_the_same_folder_is_refused(pod: PodState) -> None:
    done = xds("up", "--detach", "--port", str(free_port()))
    assert done.returncode == 2
    assert "already running" in done.stderr
    assert "xds down" in done.stderr


def test_a_taken_port_is_one_sentence(pod: PodState, tmp_path: Path) -> None:
    done = xds("up", "--detach", "--port", str(pod.http_port), state=tmp_path)
    assert done.returncode == 1
    assert done.stderr.count("\n") == 1
    assert "--port" in done.stderr


def test_status_logs_and_chat_speak_json(pod: PodState) -> None:
    # The view is as old as the last heartbeat: an earlier test's blocks may still be counted in it.
    for _ in range(20):
        status = json.loads(xds("status", "--json").stdout)
        if status["kv_blocks_held"] == 0:
            break
    assert status["ready"]
    assert status["kv_blocks_held"] == 0
    answer = json.loads(xds("chat", "What is the capital of Italy?", "--json").stdout)
    assert answer["content"] == "The capital of Italy is Rome."
    assert answer["xds"]["decode_te"] == "d0"
    assert xds("logs", "gateway", "--json").returncode == 0
    assert xds("logs", "nobody").returncode == 2


def test_kill_a_process_and_the_pod_says_which_is_missing(tmp_path: Path) -> None:
    """Readiness is honest, and `down` leaves nothing behind."""
    started = xds("up", "--detach", "--port", str(free_port()), "--json", state=tmp_path)
    assert started.returncode == 0, started.stderr
    pod: dict[str, Any] = json.loads(started.stdout)
    victim = pod["processes"]["expert_die.d0.e1"]
    try:
        os.kill(victim, signal.SIGKILL)
        ready = asyncio.run(_ready_after_loss(pod["url"]))
        assert ready["missing"] == ["expert_die.d0.e1"]
    finally:
        assert xds("down", state=tmp_path).returncode == 0
    assert [pid for pid in pod["processes"].values() if is_alive(pid)] == []


async def _ready_after_loss(url: str) -> Any:
    async with PodClient(url) as client:
        for _ in range(100):
            status, body = await client.get("/ready")
            if status == 503:
                return body
            await asyncio.sleep(0.1)
    raise AssertionError("the pod stayed ready without one of its processes")
