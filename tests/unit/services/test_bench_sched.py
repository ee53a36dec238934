"""The comparison of decode routing: the real shell, and an order that chance does not explain."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from libs.fabric import profiles
from libs.fabric.profiles import DEEPSEEK_R1
from libs.scheduling.routing import DpPolicy
from services.superpod.bench_sched import (
    INPUT_MAX,
    KV_BLOCKS,
    Case,
    DecodeTe,
    _attention_us,
    run,
    workload,
)

CASE = Case(groups=12, requests=900)


@pytest.fixture(scope="module", params=[1, 2])
def rows(request: pytest.FixtureRequest) -> dict[str, dict[str, Any]]:
    report = run(Case(CASE.groups, CASE.requests, seed=request.param))
    return {row["policy"]: row for row in report["decode"]}


def test_by_kv_is_better_than_every_baseline(rows: dict[str, dict[str, Any]]) -> None:
    ours = rows.pop("least_kv")
    assert len(rows) == 3
    for baseline in rows.values():
        for figure in ("kv_stdev_tokens", "dispatch_wait_us", "tpot_ms"):
            assert ours[figure] < baseline[figure], (figure, baseline)


def test_nothing_is_lost_and_the_shell_forgets_what_is_over() -> None:
    te = DecodeTe(CASE, DpPolicy.LEAST_KV)
    jobs, now_ns = workload(CASE)[:200], 0
    for job in jobs:
        te.submit(job, now_ns)
    while te.busy:
        now_ns, _, kv = te.iterate(now_ns)
        te.shell.validate()
        assert all(group.reserved <= KV_BLOCKS for group in te.groups.values())
        assert kv.min() >= 0
    assert len(te.wait_ns) == len(jobs)
    assert not te.shell._assigned
    assert te._kv.max() == te._batch.max() == 0


def test_the_workload_is_the_published_one() -> None:
    jobs = workload(Case(requests=20_000))
    prompts = [job.prompt for job in jobs]
    assert sum(prompts) / len(prompts) == pytest.approx(13_000, rel=0.1)
    assert max(prompts) <= INPUT_MAX
    assert [job.arrive_ns for job in jobs] == sorted(job.arrive_ns for job in jobs)
    assert workload(CASE) == workload(CASE)


def test_attention_is_charged_as_the_profile_does() -> None:

    batch, kv = np.array([1, 60]), np.array([13_000, 900_000])
    for place, us in enumerate(_attention_us(batch, kv)):
        exact = profiles.attention_us(DEEPSEEK_R1, int(batch[place]), int(kv[place]))
        assert us == pytest.approx(exact, rel=0.02)
