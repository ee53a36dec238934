"""The pod over shared memory: the same tokens, no needless frame on the broker, no litter."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from libs.bus.api import BusMessage
from libs.bus.nats import NatsBus, NatsOptions
from libs.bus.server import NatsServer, NatsServerOptions
from libs.carrier.segment import DEFAULT_ROOT, remove_abandoned
from libs.clock.pod_clock import wall_ns
from libs.model.resources import ModelResources
from libs.wire.fabric import FaultArm
from services.cli.client import wait_ready
from services.cli.lifecycle import free_port, own_pod, stop_pod
from services.cli.verify_pod import verify_pod
from services.pod.options import UpOptions
from services.pod.state import PodState, is_alive

pytestmark = pytest.mark.pod

PACE = 0.1


def shm_options(*, validate: bool = True) -> UpOptions:
    return UpOptions("mini", PACE, free_port(), "warning", carrier="shm", validate=validate)


@pytest.fixture(scope="module")
def shm_pod() -> Iterator[PodState]:
    with own_pod(shm_options()) as state:
        yield state


def shared_directory(pid: int) -> Path:
    """The shared memory that a process has mapped."""
    maps = Path(f"/proc/{pid}/maps").read_text()
    found = set(re.findall(rf"{DEFAULT_ROOT}/xds-shm-[^/]+", maps))
    assert len(found) == 1, found
    return Path(found.pop())


async def broker_traffic(url: str) -> tuple[NatsBus, list[str]]:
    """A listener on every subject that carries frames of the fabric."""
    heard: list[str] = []

    async def hear(message: BusMessage) -> None:
        heard.append(message.subject)

    bus = await NatsBus.connect(NatsOptions(url, "listener"))
    for pattern in ("xds.fabric.*", "xds.ub.*"):
        await bus.subscribe(pattern, hear)
    await bus.flush()
    return bus, heard


async def test_tokens_equal_the_reference_and_no_frame_meets_the_broker(
    shm_pod: PodState, model: ModelResources
) -> None:
    bus, heard = await broker_traffic(shm_pod.nats_url)
    report = await verify_pod(shm_pod, model, requests=12, seed=2)
    await bus.flush()
    await bus.close()
    assert report["examples"] == []
    assert (report["ok"], report["carrier"]) == (True, "shm")
    assert heard == []
    decode = shm_pod.actors["decode_te.d0.dp0"]
    rings = {path.name for path in shared_directory(decode).glob("ring-8-*")}
    assert rings >= {"ring-8-10-1", "ring-8-11-1"}, "from its die to both expert dies"


async def test_faults_reach_the_shards_beside_the_dies(
    shm_pod: PodState, model: ModelResources
) -> None:
    """Lost frames are asked for again, damaged ones too: the shard in the process does both."""
    fault = FaultArm("twice", "duplicate", 0.3, seed=1)
    report = await verify_pod(shm_pod, model, requests=4, seed=3, faults=[fault])
    assert report["examples"] == []
    assert report["ok"]
    done = report["faults"]["twice"]
    assert 0.1 < done["touched"] / done["seen"] < 0.5


def test_killed_processes_leave_nothing_behind() -> None:
    with own_pod(shm_options(validate=False)) as state:
        victims = [state.actors["expert_die.d0.e1"], state.actors["decode_te.d0.dp0"]]
        directory = shared_directory(victims[0])
        for victim in victims:
            os.kill(victim, signal.SIGKILL)
        stop_pod(state)
        assert not directory.exists()


def test_a_killed_supervisors_memory_is_removed_by_the_next_one() -> None:
    with own_pod(shm_options(validate=False)) as state:
        directory = shared_directory(state.actors["expert_die.d0.e1"])
        os.kill(state.supervisor_pid, signal.SIGKILL)
        os.waitpid(state.supervisor_pid, 0)
        deadline = time.perf_counter() + 10
        while any(is_alive(pid) for pid in state.actors.values()):
            assert time.perf_counter() < deadline, "children die with their supervisor"
            time.sleep(0.05)
        assert directory.exists(), "nobody was left to remove it"
        assert directory in remove_abandoned(DEFAULT_ROOT), "what every start does first"


@contextmanager
def group(env: dict[str, str], *prefixes: str) -> Iterator[None]:
    """A group of actors, as a container runs it: it shares memory with nobody outside."""
    command = [sys.executable, "-m", "services.pod.group", *prefixes]
    process = subprocess.Popen(command, env={**os.environ, **env})
    try:
        yield
    finally:
        process.terminate()
        assert process.wait(timeout=15) == 0


async def test_what_another_host_sends_comes_over_the_broker(
    tmp_path: Path, model: ModelResources
) -> None:
    """Prefill in one group, decode and experts in another: KV by broker, expert rows by memory."""
    port, epoch_ns = free_port(), wall_ns()
    with NatsServer(NatsServerOptions(directory=tmp_path)) as broker:
        env = {
            "XDS_NATS": broker.url, "XDS_TOPOLOGY": "mini", "XDS_CARRIER": "shm",
            "XDS_PACE": str(PACE), "XDS_EPOCH_NS": str(epoch_ns), "XDS_HTTP_PORT": str(port),
            "XDS_LOG": "warning",
        }  # fmt: skip
        control = ("control_plane", "fabric_emulator", "distflow", "job_executor", "gateway")
        decode = ("te_shell.d0", "decode_te", "output.d0", "expert_die")
        with group(env, "prefill_te", "te_shell.p", "output.p"), group(env, *control, *decode):
            actors = {"fabric_emulator.0": 0}
            state = PodState(0, port, broker.url, "mini", PACE, epoch_ns, "shm", actors)
            await wait_ready(state.base_url, 60.0)
            bus, heard = await broker_traffic(broker.url)
            report = await verify_pod(state, model, requests=6, seed=4)
            await bus.flush()
            await bus.close()
    assert report["examples"] == []
    assert report["ok"]
    assert {re.sub(r"\d+$", "", subject) for subject in heard} == {"xds.fabric.d"}
    dies = {"xds.fabric.d0", "xds.fabric.d4", "xds.fabric.d8", "xds.fabric.d9"}
    assert set(heard) <= dies, "KV and its acknowledgements; no rows of experts"
