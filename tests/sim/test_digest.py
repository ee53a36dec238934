"""A pod on digests: the same services, executors and reference, at a fraction of the cost."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from libs import units
from libs.config.topology import Topology, load_topology, parse_topology
from libs.fabric.faults.active import fault_named
from libs.model.resources import ModelResources
from libs.model.sampling import SamplingParams
from libs.workload.requests import ClientRequest, spec_of
from libs.workload.verdict import judge, untold
from services.gateway.core import ClientSubmit
from services.superpod.verify import WARM_UP_NS, Client, kv_blocks_held, verify_sim
from services.superpod.wiring import simulate_pod

LONG = """
name: long
model: {checkpoint: xds-tiny, engine: digest}
prefill_tes: [{name: p0}]
decode_tes: [{name: d0, dp_groups: 1, batch_max: 4, expert_dies: 2}]
kv: {block_size: 128, prefill_blocks: 1200, decode_blocks: 1200}
limits:
  {context_max_tokens: 140000, prompt_max_tokens: 131072, output_max_tokens: 64,
   output_default_tokens: 32}
"""

#: Expert dies that divide the 16 experts evenly, unevenly, and leave most dies with one.
SHAPES = """
name: shapes
model: {{checkpoint: xds-tiny, engine: digest}}
prefill_tes: [{{name: p0}}]
decode_tes: [{{name: d0, dp_groups: 1, expert_dies: {dies}}}]
kv: {{block_size: {block}, prefill_blocks: 2048, decode_blocks: 2048}}
"""


@pytest.fixture(scope="module")
def digests() -> ModelResources:
    return ModelResources("xds-tiny", "digest")


def digest_pod(carrier: str = "") -> Topology:
    return load_topology("digest", carrier)


@pytest.mark.parametrize("seed", [1, 2])
def test_every_token_equals_the_reference(digests: ModelResources, seed: int) -> None:
    report = verify_sim(digest_pod(), digests, requests=16, seed=seed)
    assert report["examples"] == []
    assert report["ok"]
    assert report["tokens"] > 60
    assert report["kv_blocks_held"] == 0


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(100, 112))
def test_a_sweep_over_seeds_and_faults(digests: ModelResources, seed: int) -> None:
    kinds = ("corruption", "one_way_loss", "duplicate", "reorder")
    rule = fault_named(kinds[seed % 4], 0.1, seed)
    report = verify_sim(digest_pod(), digests, requests=20, seed=seed, faults=[rule])
    assert report["ok"], report["examples"]


@pytest.mark.parametrize("kind", ["corruption", "one_way_loss"])
def test_faults_on_the_fabric_change_no_token(digests: ModelResources, kind: str) -> None:
    rule = fault_named(kind, 0.1, seed=1)
    report = verify_sim(digest_pod(), digests, requests=8, seed=1, faults=[rule])
    assert report["ok"], report["examples"]
    assert report["faults"][rule.fault_id]["touched"] > 0


def test_stamps_do_not_depend_on_the_carrier(digests: ModelResources) -> None:
    broker = verify_sim(digest_pod("nats"), digests, requests=8, seed=6)
    shared = verify_sim(digest_pod("shm"), digests, requests=8, seed=6)
    assert broker["ok"]
    assert shared["ok"]
    assert broker["timeline_hash"] == shared["timeline_hash"]


@pytest.mark.parametrize(("dies", "block"), [(1, 16), (3, 1), (20, 64)])
def test_any_number_of_expert_dies_and_any_block_size(
    digests: ModelResources, dies: int, block: int
) -> None:
    topology = parse_topology(SHAPES.format(dies=dies, block=block), source="shapes")
    assert verify_sim(topology, digests, requests=6, seed=3)["ok"]


@pytest.mark.parametrize(
    "prompt_tokens", [16_384, 65_536, pytest.param(100_000, marks=pytest.mark.slow)]
)
def test_long_prompts(digests: ModelResources, prompt_tokens: int) -> None:
    """Two of them together, greedy and sampled, each held against the monolith."""
    host = simulate_pod(parse_topology(LONG, source="long"), digests, seed=1)
    clients: dict[str, Client] = {}
    for index, temperature in enumerate((0.0, 1.0)):
        sampling = SamplingParams(temperature=temperature, seed=index, ignore_eos=True)
        request = ClientRequest(
            index=index, chat=False, text="", thinking=False, sampling=sampling, max_tokens=12,
            stops=(), arrive_ns=0, stream=True, cancel_after=None,
        )  # fmt: skip
        name = f"long-{index}"
        ids = np.random.default_rng(index).integers(16, 2048, prompt_tokens - 100 * index)
        plain = spec_of(request, name, WARM_UP_NS, digests)
        spec = replace(plain, prompt_ids=ids.astype(np.int32))
        clients[name] = Client(host, request, spec)
        host.inject("gateway.0", ClientSubmit(spec), WARM_UP_NS)
    host.on_present(lambda key, item, at_ns: clients[key].take(item, at_ns))
    host.run(lambda: all(client.over for client in clients.values()))
    end_ns = host.now_ns + units.s(5)
    host.run(lambda: host.now_ns >= end_ns)
    answers = [(name, client.spec, client.seen) for name, client in clients.items()]
    verdict = judge(answers, digests, untold)
    assert verdict.examples == []
    assert verdict.ok
    assert verdict.tokens == 24
    assert kv_blocks_held(host) == 0
