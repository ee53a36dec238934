from __future__ import annotations

from dataclasses import replace

import pytest

from libs.model.sampling import SamplingParams
from libs.scheduling.finish import finish_reason

PARAMS = SamplingParams(stop_token_ids=(1, 2))


@pytest.mark.parametrize(
    ("token", "output_tokens", "expected"),
    [(9, 1, None), (2, 1, "stop"), (9, 4, "length"), (2, 4, "stop")],
    ids=["goes on", "end token", "budget used", "end token on the last token"],
)
def test_a_request_ends_by_token_or_by_budget(
    token: int, output_tokens: int, expected: str | None
) -> None:
    assert finish_reason(PARAMS, token, output_tokens, max_tokens=4) == expected


def test_ignored_end_tokens_run_into_the_budget() -> None:
    params = replace(PARAMS, ignore_eos=True)
    assert finish_reason(params, 1, 3, max_tokens=4) is None
    assert finish_reason(params, 1, 4, max_tokens=4) == "length"


def test_more_tokens_than_the_budget_is_our_bug() -> None:
    with pytest.raises(AssertionError):
        finish_reason(PARAMS, 9, 5, max_tokens=4)
