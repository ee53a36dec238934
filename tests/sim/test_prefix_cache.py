"""Chats that begin alike through a pod with real tensors: the cache changes times, never tokens."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from libs.config.topology import Topology, load_topology, parse_topology
from libs.fabric.faults.active import fault_named
from libs.model.resources import ModelResources
from libs.workload.chats import TENANTS, make_chats
from services.prefill_te.core import PrefillCore
from services.superpod.verify import Run, report_of, run_workload

#: One prefill group whose pool holds a few of the prompts below; the host memory takes some more.
TIGHT = """
name: tight
prefill_tes: [{name: p0}]
decode_tes: [{name: d0, dp_groups: 1, batch_max: 8, expert_dies: 2}]
kv: {block_size: 8, prefill_blocks: 64, host_blocks: HOST}
limits: {context_max_tokens: 512, prompt_max_tokens: 400}
"""


def without_cache(topology: Topology) -> Topology:
    kv = topology.kv.model_copy(update={"prefix_cache": False, "host_blocks": 0})
    return topology.model_copy(update={"kv": kv})


def tokens_of(run: Run) -> list[list[int]]:
    """What each client that stayed saw."""
    return [client.seen.tokens for client in run.clients.values() if not client.seen.left]


def first_token_ms(run: Run) -> float:
    waits = [c.seen.stamps_ns[0] - c.spec.submitted_at_ns for c in run.clients.values()]
    return float(np.mean(waits)) / 1e6


def assert_clean(report: dict[str, Any], requests: int) -> None:
    assert report["examples"] == []
    assert report["ok"]
    assert report["completed"] + report["cancelled"] == requests


def assert_nobody_found_a_strangers_kv(run: Run) -> None:
    """What a request found is at most what was asked before it under its own salt."""
    before: dict[str, list[np.ndarray]] = {}
    for client in run.clients.values():  # in order of arrival
        salt, prompt = client.spec.cache_salt, client.spec.prompt_ids
        own = before.setdefault(salt, [])
        assert (client.cached_tokens or 0) <= max((common(prompt, p) for p in own), default=0)
        own.append(prompt)
    assert set(before) == set(TENANTS)


def common(left: np.ndarray, right: np.ndarray) -> int:
    shorter = min(len(left), len(right))
    differ = np.flatnonzero(left[:shorter] != right[:shorter])
    return int(differ[0]) if len(differ) else shorter


@pytest.mark.parametrize("requests", [40, pytest.param(200, marks=pytest.mark.slow)])
def test_tokens_are_the_references_with_and_without_the_cache(
    model: ModelResources, requests: int, record_property: Any
) -> None:
    mini, chats = load_topology("mini"), make_chats(1, requests)
    cached = run_workload(mini, model, chats, seed=1)
    computed = run_workload(without_cache(mini), model, chats, seed=1)
    report = report_of(cached, model)
    assert_clean(report, requests)
    assert tokens_of(computed) == tokens_of(cached)
    hit_rate = report["cached_tokens"] / report["prompt_tokens"]
    record_property("hit_rate", round(hit_rate, 3))
    assert hit_rate > 0.5
    assert all(not client.cached_tokens for client in computed.clients.values())
    assert first_token_ms(cached) < first_token_ms(computed)
    assert_nobody_found_a_strangers_kv(cached)


@pytest.fixture(scope="module")
def tight_runs(model: ModelResources) -> dict[int, Run]:
    """The same chats through a pool that must evict, without and with host memory."""

    def run(host_blocks: int) -> Run:
        topology = parse_topology(TIGHT.replace("HOST", str(host_blocks)), source="tight")
        return run_workload(topology, model, make_chats(2, 40), seed=2)

    return {host_blocks: run(host_blocks) for host_blocks in (0, 96)}


@pytest.mark.parametrize("host_blocks", [0, 96])
def test_a_pool_that_must_evict_stays_right(
    model: ModelResources, tight_runs: dict[int, Run], host_blocks: int
) -> None:
    run = tight_runs[host_blocks]
    assert_clean(report_of(run, model), 40)
    assert_nobody_found_a_strangers_kv(run)
    (core,) = (core for core in run.host.cores() if isinstance(core, PrefillCore))
    cached = len(core.group.pool.cached_blocks())
    assert 64 - 16 <= cached <= 64, "the pool is full of what may be asked again"
    on_host = sum(node.slot >= 0 for _, node in core.group.cache.tree.nodes())
    assert (on_host > 0) == (host_blocks > 0)


def test_host_memory_finds_what_the_pool_forgot(tight_runs: dict[int, Run]) -> None:
    hits = {
        blocks: sum(client.cached_tokens or 0 for client in run.clients.values())
        for blocks, run in tight_runs.items()
    }
    assert hits[96] > 1.1 * hits[0]


def test_a_cache_that_clients_leave_under_faults_stays_right(model: ModelResources) -> None:
    topology = parse_topology(TIGHT.replace("HOST", "16"), source="tight")
    chats = [
        replace(chat, cancel_after=1 if chat.index % 3 == 0 else None) for chat in make_chats(3, 24)
    ]
    rule = fault_named("one_way_loss", 0.05, seed=3)
    run = run_workload(topology, model, chats, seed=3, faults=[rule])
    report = report_of(run, model)
    assert_clean(report, 24)
    assert report["cancelled"] >= 6
    assert report["cached_tokens"] > 0
