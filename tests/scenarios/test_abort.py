"""The client leaves at every instant of its request's way, while another wants the same blocks.

Late writes are the danger: KV of the one who left is under way when its blocks and its range of
memory are given to the next one (frames are delayed so that they do come late). Whatever the
instant, the other's answer is its own, and nothing is kept.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from libs import units
from libs.config.topology import parse_topology
from libs.fabric.faults.active import FaultRule
from libs.fabric.faults.catalogue import build_fault
from libs.fabric.faults.scope import Scope
from libs.model.sampling import SamplingParams
from libs.wire.tokens import Chunk
from services.decode_te.core import DecodeCore
from services.fabric_emulator.core import FabricEmulatorCore
from services.gateway.core import ClientGone, ClientSubmit
from services.prefill_te.core import PrefillCore
from tests.support.pod import Pod, build_pod
from tests.support.requests import END_TOKEN, make_spec

#: Blocks for one request at a time, on either side.
TOPOLOGY = """
name: abort
job_executors: 1
prefill_tes: [{name: p0}]
decode_tes: [{name: d0, dp_groups: 1, batch_max: 2, queue_max: 4, expert_dies: 1}]
kv: {block_size: 16, prefill_blocks: 8, decode_blocks: 8}
limits: {context_max_tokens: 128, prompt_max_tokens: 100}
health: {control_period_s: 20, te_period_s: 20}
"""
PROMPT, ANSWER = 80, [*range(40, 46), END_TOKEN]
START_NS = units.s(1)


@dataclass(frozen=True, slots=True)
class Late:
    """How late some frames come."""

    probability: float = 0.0
    extra_us: int = 0


def build(late: Late) -> Pod:
    pod = build_pod(parse_topology(TOPOLOGY, source="abort"))
    if late.probability:
        fault = build_fault("latency", (("extra_ns", units.us(late.extra_us)),))
        for watched in pod.watched.values():
            if isinstance(watched.core, FabricEmulatorCore):
                rule = FaultRule("late", fault, Scope("everything"), late.probability, seed=7)
                watched.core.faults.arm(rule)
    return pod


def submit(pod: Pod, name: str, at_ns: int) -> list[int]:
    """A request; what its client has been shown, so far."""
    prompt_ids = np.arange(ord(name), ord(name) + PROMPT, dtype=np.int32)
    pod.answers.learn(prompt_ids, ANSWER)
    shown: list[int] = []

    def present(key: str, item: object, _at_ns: int) -> None:
        if key == name and isinstance(item, Chunk):
            shown.append(item.token)

    pod.host.on_present(present)
    sampling = SamplingParams(temperature=0.0, seed=0, stop_token_ids=(END_TOKEN,))
    spec = make_spec(
        name, prompt_ids=prompt_ids, sampling=sampling, max_tokens=16, submitted_at_ns=at_ns
    )
    pod.host.inject("gateway.0", ClientSubmit(spec), at_ns)
    return shown


def check_clean(pod: Pod) -> None:
    for watched in pod.watched.values():
        core: Any = watched.core
        if isinstance(core, PrefillCore):
            kv, pool = core.group.sender.kv, core.group.pool
        elif isinstance(core, DecodeCore):
            kv, pool = core.group.receiver.kv, core.group.pool
        else:
            continue
        assert pool.free_blocks == pool.num_blocks, f"{core.name} keeps blocks"
        assert kv.arena.taken_bytes == 0, f"{core.name} keeps memory"


def instants() -> list[int]:
    """When anything happens to an undisturbed request, from its arrival to its first iteration."""
    pod = build(Late())
    submit(pod, "a", START_NS)
    pod.run_for(START_NS + units.ms(300))
    times = {step.at_ns for step in pod.journal if "a" in step.ids or "kv-a" in step.ids}
    return sorted(time for time in times if time < START_NS + units.ms(110))


INSTANTS = instants()


@pytest.mark.parametrize("late", [Late(), Late(0.5, 400)], ids=["on time", "late"])
@given(
    at=st.sampled_from(INSTANTS),
    before_us=st.integers(0, 220),
    after_ns=st.integers(-1, 1),
)
@settings(max_examples=60, deadline=None)
def test_whenever_the_client_leaves_the_next_one_gets_its_own_answer(
    late: Late, at: int, before_us: int, after_ns: int
) -> None:
    """`before_us` is about the way of a cancellation, so that it arrives at every instant too."""
    leaves_ns = max(START_NS, at - units.us(before_us) + after_ns)
    pod = build(late)
    submit(pod, "a", START_NS)
    shown = submit(pod, "b", START_NS + 1)
    pod.host.inject("gateway.0", ClientGone("a"), leaves_ns)
    pod.run_for(START_NS + units.s(30))
    assert shown == ANSWER
    check_clean(pod)


def test_the_instants_reach_from_the_queue_into_decode() -> None:
    pod = build(Late())
    submit(pod, "a", START_NS)
    pod.run_for(START_NS + units.ms(300))
    lived = {actor for step in pod.journal if step.at_ns in INSTANTS for actor in [step.actor]}
    assert {"prefill_te.p0.dp0", "distflow.p0.d0", "decode_te.d0.dp0"} <= lived
    assert len(INSTANTS) > 20
