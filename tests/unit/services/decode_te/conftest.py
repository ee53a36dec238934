from __future__ import annotations

import pytest

from tests.support.decode import DecodeBench


@pytest.fixture
def bench() -> DecodeBench:
    return DecodeBench()


@pytest.fixture
def running(bench: DecodeBench) -> DecodeBench:
    """`r1` runs its first iteration and waits for the expert dies."""
    bench.admit("r1")
    bench.reach_experts()
    return bench
