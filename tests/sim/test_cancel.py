"""A client that leaves frees its KV blocks within one iteration, wherever its request is."""

from __future__ import annotations

from typing import Any

import pytest

from libs import units
from libs.config.topology import load_topology
from libs.model.resources import ModelResources
from libs.model.sampling import SamplingParams
from libs.runtime.sim_host import SimHost
from libs.wire.tokens import Chunk
from libs.workload.requests import ClientRequest, spec_of
from services.gateway.core import ClientGone, ClientSubmit
from services.superpod.verify import GATEWAY, WARM_UP_NS, kv_blocks_held
from services.superpod.wiring import simulate_pod

#: One decode iteration of the profile is about 29 ms; cancelling takes three control messages.
ITERATION_NS = units.ms(31)
#: A prompt that is being computed is finished first: its job cannot be taken back.
PREFILL_NS = units.ms(66)

LONG = ClientRequest(
    index=0,
    chat=True,
    text="Tell me a story.",
    thinking=False,
    sampling=SamplingParams(temperature=0.0, seed=1, ignore_eos=True),
    max_tokens=64,
    stops=(),
    arrive_ns=0,
    stream=True,
    cancel_after=None,
)


def run_and_leave(model: ModelResources, after_ns: int) -> tuple[SimHost, list[Chunk]]:
    host = simulate_pod(load_topology("mini"), model, seed=1)
    chunks: list[Chunk] = []

    def present(_key: str, item: Any, _at_ns: int) -> None:
        assert isinstance(item, Chunk)
        chunks.append(item)

    host.on_present(present)
    host.inject(GATEWAY, ClientSubmit(spec_of(LONG, "leaver", WARM_UP_NS, model)), WARM_UP_NS)
    host.inject(GATEWAY, ClientGone("leaver"), WARM_UP_NS + after_ns)
    return host, chunks


def run_until(host: SimHost, at_ns: int) -> None:
    host.run(lambda: host.now_ns >= at_ns)


@pytest.mark.parametrize(
    ("stage", "after_us", "patience_ns"),
    [
        ("before any job executor answered", 1, PREFILL_NS),
        ("on its way to the prefill TE", 120, PREFILL_NS),
        ("in prefill", 20_000, PREFILL_NS),
        ("between prefill and decode", 61_900, ITERATION_NS),
        ("while DistFlow pairs", 62_250, ITERATION_NS),
        ("while KV travels", 62_400, ITERATION_NS),
        ("before its first iteration", 62_600, ITERATION_NS),
        ("in its first iteration", 75_000, ITERATION_NS),
        ("in mid-stream", 300_000, ITERATION_NS),
        ("in mid-stream, elsewhere in an iteration", 311_000, ITERATION_NS),
    ],
)
def test_blocks_are_free_within_one_iteration(
    model: ModelResources, stage: str, after_us: int, patience_ns: int
) -> None:
    host, chunks = run_and_leave(model, units.us(after_us))
    run_until(host, WARM_UP_NS + units.us(after_us) + patience_ns)
    assert kv_blocks_held(host) == 0, stage
    seen = len(chunks)
    run_until(host, host.now_ns + units.s(2))
    assert len(chunks) == seen, "nothing reaches a client that has left"
    assert kv_blocks_held(host) == 0


def test_the_stages_above_are_real(model: ModelResources) -> None:
    """The instants are not arbitrary: blocks are held from prefill until the client leaves."""
    host, chunks = run_and_leave(model, units.s(60))
    held = []
    for after_us in (1, 20_000, 62_400, 75_000, 300_000):
        run_until(host, WARM_UP_NS + units.us(after_us))
        held.append(kv_blocks_held(host))
    assert held[0] == 0
    assert all(blocks > 0 for blocks in held[1:])
    assert held[2] > held[1], "while KV travels both sides own blocks"
    assert chunks
