from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from libs import units
from libs.actor import (
    CancelTimer,
    Compute,
    ComputeDone,
    Effect,
    Event,
    Present,
    Received,
    Record,
    Send,
    SetTimer,
    Started,
    TimerFired,
    Transmit,
    Unreachable,
)
from libs.errors import InvariantError, LocalProtocolError, TransferFailed
from libs.fabric.params import UB
from libs.runtime.sim_host import Deadlock, SimHost, SimOptions
from libs.wire.expert import E2A
from libs.wire.request import Cancel, Submit
from services.fabric_emulator.core import FabricEmulatorCore
from tests.support.cores import ScriptCore
from tests.support.requests import make_spec

ROOT = Path(__file__).resolve().parents[3]


def on_start(*effects: Effect) -> Any:
    """A reaction that returns `effects` once, at the start."""
    return lambda event: list(effects) if isinstance(event, Started) else []


def run_dry(host: SimHost) -> None:
    with pytest.raises(Deadlock, match="nothing is scheduled"):
        host.run(lambda: False)


def names(core: ScriptCore) -> list[str]:
    return [event.name for _, event in core.seen if isinstance(event, TimerFired)]


# ---------------------------------------------------------------- messages


def test_a_message_takes_the_control_latency_from_its_departure() -> None:
    host, listener = SimHost(), ScriptCore("echo.b")
    sender = ScriptCore("echo.a", on_start(Send("xds.act.echo.b", Cancel("r1", "left"), at_ns=70)))
    host.add(listener)
    host.add(sender)
    run_dry(host)
    event = listener.seen[-1][1]
    assert isinstance(event, Received)
    assert (event.at_ns, event.sender, event.incarnation) == (
        70 + UB.control_latency_ns, "echo.a", 1,
    )  # fmt: skip


def test_cores_never_share_an_object() -> None:
    host, listener = SimHost(), ScriptCore("echo.b")
    message = Submit(make_spec())
    host.add(listener)
    host.add(ScriptCore("echo.a", on_start(Send("xds.act.echo.b", message))))
    run_dry(host)
    (copy,) = listener.messages
    assert copy is not message
    assert np.array_equal(copy.spec.prompt_ids, message.spec.prompt_ids)
    assert not np.shares_memory(copy.spec.prompt_ids, message.spec.prompt_ids)


def test_a_message_that_could_not_travel_fails_here_too() -> None:
    bad: Any = Cancel("r1", reason=5)  # type: ignore[arg-type]
    host = SimHost()
    host.add(ScriptCore("echo.b"))
    host.add(ScriptCore("echo.a", on_start(Send("xds.act.echo.b", bad))))
    with pytest.raises(LocalProtocolError, match=r"cancel.reason"):
        host.run(lambda: False)


def test_a_probe_that_finds_nobody_comes_back_and_a_plain_send_is_lost() -> None:
    message = Cancel("r1", "left")
    host = SimHost()
    core = ScriptCore(
        "echo.a",
        on_start(Send("xds.act.nobody", message), Send("xds.act.nobody", message, probe=True)),
    )
    host.add(core)
    run_dry(host)
    assert [event for _, event in core.seen[1:]] == [Unreachable(0, "xds.act.nobody", message)]


def test_one_member_of_a_queue_group_gets_a_message() -> None:
    host = SimHost()
    group = [ScriptCore(f"job_executor.{index}") for index in range(3)]
    for core in group:
        host.add(core)
    submit = Submit(make_spec())
    host.add(ScriptCore("echo.a", on_start(*[Send("xds.je.submit", submit)] * 30)))
    run_dry(host)
    counts = [len(core.messages) for core in group]
    assert sum(counts) == 30
    assert all(counts), "and chance spreads them"


def test_frames_travel_through_the_fabric_and_are_unwrapped_for_the_die() -> None:
    host, target = SimHost(), ScriptCore("expert_die.d0.e0")
    answer = E2A(1, 0, 1, 0, np.zeros((1, 4), np.float32))
    host.add(FabricEmulatorCore("fabric_emulator.0", num_dies=2))
    host.add(target, dies=(1,))
    host.add(ScriptCore("echo.a", on_start(Transmit(0, 1, answer, 196_000, 1, at_ns=500))))
    host.run(lambda: bool(target.messages))
    event = target.seen[-1][1]
    assert isinstance(event, Received)
    assert isinstance(event.message, E2A)
    assert (event.at_ns, event.sender) == (500 + 1_000 + UB.ub_latency_ns, "echo.a")


# ---------------------------------------------------------------- order and timers


def test_equal_times_are_first_in_first_out() -> None:
    host, core = SimHost(), ScriptCore("echo.a")
    host.add(core)
    for index in range(20):
        host.inject("echo.a", Cancel(f"r{index}", "left"), at_ns=500)
    run_dry(host)
    assert [message.request_id for message in core.messages] == [f"r{i}" for i in range(20)]


def test_a_rearmed_timer_fires_once_at_its_last_due_time() -> None:
    host = SimHost()
    core = ScriptCore(
        "echo.a", on_start(SetTimer("t", 500), SetTimer("t", 900), SetTimer("t", 700))
    )
    host.add(core)
    run_dry(host)
    fired = [(now, event.name) for now, event in core.seen if isinstance(event, TimerFired)]
    assert fired == [(700, "t")]


def test_a_cancelled_timer_never_fires_and_can_be_armed_again() -> None:
    def react(event: Event) -> list[Effect]:
        match event:
            case Started():
                return [
                    SetTimer("t", 500),
                    CancelTimer("t"),
                    CancelTimer("unarmed"),
                    SetTimer("u", 600),
                ]
            case TimerFired(name="u"):
                return [SetTimer("t", 50)]
            case _:
                return []

    host, core = SimHost(), ScriptCore("echo.a", react)
    host.add(core)
    run_dry(host)
    assert names(core) == ["u", "t"]
    assert host.now_ns == 650


# ---------------------------------------------------------------- computing and showing


class Doubler:
    """Doubles numbers; fails on None."""

    def run(self, job: Any) -> Any:
        if job is None:
            raise TransferFailed("nothing to double")
        return 2 * job


def test_jobs_queue_on_the_actor_and_their_end_is_stamped() -> None:
    host = SimHost()
    core = ScriptCore(
        "echo.a", on_start(Compute(1, 21, 100, at_ns=40), Compute(2, 5, 10, at_ns=50))
    )
    host.add(core, executor=Doubler())
    run_dry(host)
    assert [event for _, event in core.seen[1:]] == [
        ComputeDone(140, 1, 42),
        ComputeDone(150, 2, 10),
    ]


def test_an_operating_error_of_the_executor_is_a_result() -> None:
    host = SimHost()
    core = ScriptCore("echo.a", on_start(Compute(1, None, 100)))
    host.add(core, executor=Doubler())
    run_dry(host)
    event = core.seen[-1][1]
    assert isinstance(event, ComputeDone)
    assert isinstance(event.result, TransferFailed)


def test_what_is_shown_is_shown_at_its_time() -> None:
    host = SimHost()
    host.add(
        ScriptCore("echo.a", on_start(Present("r1", "later", 900), Present("r1", "soon", 100)))
    )
    shown: list[tuple[Any, int, int]] = []
    host.on_present(lambda key, item, at_ns: shown.append((item, at_ns, host.now_ns)))
    run_dry(host)
    assert shown == [("soon", 100, 100), ("later", 900, 900)]


def test_facts_are_kept_with_time_and_actor() -> None:
    host = SimHost()
    fact = Record("thing_happened", {"x": 1})
    host.add(ScriptCore("echo.a", on_start(fact)))
    run_dry(host)
    assert host.records == [(0, "echo.a", fact)]


# ---------------------------------------------------------------- things that go wrong


def test_a_run_that_cannot_end_tells_what_happened_last() -> None:
    host = SimHost()
    host.add(ScriptCore("echo.a", on_start(Send("xds.act.echo.b", Cancel("r1", "left")))))
    host.add(ScriptCore("echo.b"))
    with pytest.raises(Deadlock, match=r"echo.b: .*cancel from echo.a"):
        host.run(lambda: False)


def test_a_run_that_only_beats_is_stalled_and_says_so() -> None:
    def beat(_event: Event) -> list[Effect]:
        return [SetTimer("beat", units.s(1))]

    host = SimHost(SimOptions(stall_ns=units.s(10)))
    host.add(ScriptCore("echo.a", beat))
    with pytest.raises(Deadlock, match=r"nothing visible for(.|\n)*echo.a: .*timer beat"):
        host.run(lambda: False)


def test_a_run_without_end_is_bounded() -> None:
    host = SimHost()
    host.add(ScriptCore("echo.a", lambda _event: [SetTimer("t", 0)]))
    with pytest.raises(Deadlock, match="100 events and not over"):
        host.run(lambda: False, events_max=100)


def test_a_core_that_contradicts_itself_stops_the_run_with_its_story() -> None:
    def react(event: Event) -> list[Effect]:
        if isinstance(event, Received):
            raise AssertionError("impossible")
        return [SetTimer("t", 5)]

    host = SimHost()
    host.add(ScriptCore("echo.a", react))
    host.inject("echo.a", Cancel("r1", "left"), at_ns=10)
    with pytest.raises(InvariantError, match=r"echo.a failed on cancel from outside.*impossible"):
        host.run(lambda: False)


# ---------------------------------------------------------------- determinism

HISTORY = """
from tests.support.history import trace_of
print(trace_of(seed=%d))
"""


def trace(seed: int, hash_seed: str) -> str:
    environment = os.environ | {"PYTHONHASHSEED": hash_seed, "OPENBLAS_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "-c", HISTORY % seed],
        capture_output=True, text=True, check=True, cwd=ROOT, env=environment,
    )  # fmt: skip
    return done.stdout.strip()


def test_one_seed_gives_one_history_whatever_the_hash_seed() -> None:
    assert len({trace(3, hash_seed) for hash_seed in ("0", "1", "4242")}) == 1


def test_one_seed_gives_one_history_in_one_process_and_another_seed_another() -> None:
    from tests.support.history import trace_of

    assert trace_of(seed=3) == trace_of(seed=3)
    assert trace_of(seed=3) != trace_of(seed=4)


def test_the_trace_notices_a_difference_in_bytes_and_in_time() -> None:
    def hash_of(reason: str, at_ns: int) -> str:
        host = SimHost()
        host.add(ScriptCore("echo.b"))
        effect = Send("xds.act.echo.b", Cancel("r1", reason), at_ns=at_ns)
        host.add(ScriptCore("echo.a", on_start(effect)))
        run_dry(host)
        return host.trace_hash

    assert hash_of("left", 5) == hash_of("left", 5)
    assert len({hash_of("left", 5), hash_of("gone", 5), hash_of("left", 6)}) == 3
