from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from libs.errors import LocalProtocolError, RemoteProtocolError
from libs.model.linear import Rows, int8_rows
from libs.model.moe import Routed
from libs.xccl.dispatch import gathered, scatter

HIDDEN = 8


def routed(tokens: int, k: int, experts: int, seed: int) -> Routed:
    generator = np.random.default_rng(seed)
    x = generator.standard_normal((tokens, HIDDEN)).astype(np.float32)
    order = np.argsort(generator.random((tokens, experts)), axis=1)
    weights = generator.random((tokens, k)).astype(np.float32)
    return Routed(Rows(x), order[:, :k].astype(np.int32), weights)


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 12), st.integers(1, 4), st.integers(1, 4), st.integers(0, 2**16))
def test_every_choice_arrives_at_its_owner_once_with_its_row_and_weight(
    tokens: int, k: int, ranks: int, seed: int
) -> None:
    batch = routed(tokens, k, experts=8, seed=seed)
    owners = np.random.default_rng(seed).integers(0, ranks, 8).astype(np.int32)
    sent = scatter(batch, owners, fuse_int8=False)
    seen = np.zeros(batch.topk_idx.shape, np.int64)
    for rank, part in gathered(sent.outgoing).items():
        index = sent.tokens[rank]
        assert part.rows.data.tolist() == batch.rows.data[index].tolist()
        chosen = part.topk_idx >= 0
        assert chosen.any(axis=1).all(), "no row travels for nothing"
        assert (owners[part.topk_idx[chosen]] == rank).all()
        assert (part.topk_idx[chosen] == batch.topk_idx[index][chosen]).all()
        assert part.topk_weights.tolist() == batch.topk_weights[index].tolist()
        seen[index] += chosen
    assert (seen == 1).all()


def test_quantising_is_fused_and_stays_within_half_a_step() -> None:
    batch = routed(20, 2, experts=4, seed=1)
    sent = scatter(batch, np.array([0, 1, 1, 1], np.int32))
    for rank, columns in sent.outgoing.items():
        data, scale = columns[:2]
        assert data.dtype == np.int8
        x = batch.rows.data[sent.tokens[rank]]
        step = np.abs(x).max(axis=1, keepdims=True) / 254
        assert (np.abs(data * scale - x) <= step * (1 + 1e-5)).all()


def test_rows_that_come_quantised_keep_their_bits() -> None:
    batch = routed(6, 2, experts=4, seed=2)
    ready = Routed(int8_rows(batch.rows.data), batch.topk_idx, batch.topk_weights)
    (columns,) = scatter(ready, np.zeros(4, np.int32)).outgoing.values()
    assert ready.rows.scale is not None
    assert columns[0].tobytes() == ready.rows.data.tobytes()
    assert columns[1].tobytes() == ready.rows.scale.tobytes()


def test_hidden_choices_go_nowhere() -> None:
    batch = Routed(
        Rows(np.ones((2, HIDDEN), np.float32)),
        np.array([[-1, 1], [-1, -1]], np.int32),
        np.ones((2, 2), np.float32),
    )
    sent = scatter(batch, np.array([0, 1], np.int32))
    assert {rank: index.tolist() for rank, index in sent.tokens.items()} == {1: [0]}


def test_an_unknown_expert_is_our_mistake() -> None:
    with pytest.raises(LocalProtocolError, match="expert out of range"):
        scatter(routed(3, 2, experts=8, seed=0), np.zeros(2, np.int32))


@pytest.mark.parametrize("broken", ["column", "height", "scale", "flat"])
def test_columns_that_are_no_batch_are_the_peer_s_mistake(broken: str) -> None:
    sent = scatter(routed(4, 2, experts=4, seed=3), np.zeros(4, np.int32))
    data, scale, chosen, weights = sent.outgoing[0]
    columns = {
        "column": (data, scale, chosen),
        "height": (data, scale, chosen[:-1], weights[:-1]),
        "scale": (data, np.ones((4, 2), np.float32), chosen, weights),
        "flat": (data[:, 0], scale, chosen, weights),
    }[broken]
    with pytest.raises(RemoteProtocolError, match="rank 5"):
        gathered({5: columns})
