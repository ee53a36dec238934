"""The tensor executor: what is cached is not computed, and the logits' bits do not notice."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from libs.model.resources import ModelResources
from libs.model.sampling import SamplingParams
from services.prefill_te.executor import PrefillExecutor
from services.prefill_te.jobs import ExportKv, PrefillJob

SIZE = 8
PROMPT = np.arange(300, 337, dtype=np.int32)  # four whole blocks and five tokens
#: Log probabilities of many tokens, so that a differing logit shows.
SAMPLING = SamplingParams(temperature=0.0, seed=1, logprobs=20)


@pytest.fixture(scope="module", params=["int8", "fx"])
def model(request: pytest.FixtureRequest) -> ModelResources:
    return ModelResources("xds-tiny", request.param)


@pytest.fixture
def executor(model: ModelResources) -> PrefillExecutor:
    return PrefillExecutor(model.engine(), model.paged_kv(32, SIZE), host_blocks=4)


WHOLE = PrefillJob(1, (0, 1, 2, 3, 4), PROMPT, SAMPLING, 0)


@pytest.mark.parametrize("cached", [1, 2, 4])
def test_behind_a_cached_prefix_come_the_same_logits_and_the_same_kv(
    executor: PrefillExecutor, cached: int
) -> None:
    expected = executor.run(WHOLE)
    blocks = (*WHOLE.block_ids[:cached], *range(10, 15 - cached))
    again = replace(WHOLE, sequence=2, block_ids=blocks, cached_rows=cached * SIZE)
    assert executor.run(again) == expected
    whole = executor.run(ExportKv(WHOLE.block_ids[:4])).data
    assert executor.run(ExportKv(blocks[:4])).data.tobytes() == whole.tobytes()


def test_a_wrong_block_in_front_would_be_noticed(executor: PrefillExecutor) -> None:
    expected = executor.run(WHOLE)
    executor.run(replace(WHOLE, sequence=2, block_ids=(20, 21, 22, 23, 24), prompt_ids=PROMPT + 1))
    mixed = replace(WHOLE, sequence=3, block_ids=(0, 21, 10, 11, 12), cached_rows=2 * SIZE)
    assert executor.run(mixed) != expected


def test_blocks_and_host_slots_change_places_within_one_job(executor: PrefillExecutor) -> None:
    expected = executor.run(WHOLE)
    kept = executor.run(ExportKv((0, 1))).data.tobytes()
    # The first two blocks go to the host, and another prompt into theirs.
    executor.run(replace(WHOLE, sequence=2, prompt_ids=PROMPT + 1, spills=((0, 2), (1, 3))))
    # Back again; what is in the blocks meanwhile takes the very slots.
    spills, fills = ((0, 2), (1, 3)), ((2, 0), (3, 1))
    back = replace(WHOLE, sequence=3, cached_rows=2 * SIZE, spills=spills, fills=fills)
    assert executor.run(back) == expected
    assert executor.run(ExportKv((0, 1))).data.tobytes() == kept
