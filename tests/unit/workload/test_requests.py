"""A workload is a function of its seed."""

from __future__ import annotations

from itertools import pairwise

from libs.model.resources import ModelResources
from libs.workload.requests import make_workload, spec_of


def test_the_same_seed_gives_the_same_requests_and_another_seed_others() -> None:
    assert make_workload(3, 20) == make_workload(3, 20)
    assert make_workload(3, 20) != make_workload(4, 20)


def test_a_longer_workload_begins_like_a_shorter_one() -> None:
    assert make_workload(1, 30)[:10] == make_workload(1, 10)


def test_it_mixes_what_a_pod_must_cope_with() -> None:
    requests = make_workload(1, 200)
    assert {request.chat for request in requests} == {True, False}
    assert {request.stream for request in requests} == {True, False}
    assert any(request.cancel_after is not None for request in requests)
    assert any(request.stops for request in requests)
    assert any(request.sampling.is_greedy for request in requests)
    assert any(not request.sampling.is_greedy for request in requests)
    assert all(a.arrive_ns <= b.arrive_ns for a, b in pairwise(requests))


def test_a_client_that_leaves_would_have_had_tokens_left() -> None:
    for request in make_workload(2, 300):
        if request.cancel_after is not None:
            assert request.stream
            assert request.cancel_after < request.max_tokens


def test_specs_carry_a_seed_and_the_end_of_sequence_token() -> None:
    model = ModelResources("xds-tiny")
    for request in make_workload(5, 10):
        spec = spec_of(request, "r", 0, model)
        assert spec.sampling.seed is not None
        assert spec.sampling.stop_token_ids == (model.tokenizer.control.eos,)
        assert spec.prompt_tokens >= 1
