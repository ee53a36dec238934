"""Gate and experts: the public routing rule, and sums that any set of dies may share."""

from pathlib import Path

import numpy as np
import pytest

from libs.errors import InvariantError
from libs.model.engine import Engine, Parts
from libs.model.linear import Rows
from libs.model.moe import Gate
from libs.model.weights import load_checkpoint
from tests.unit.model.checkpoints import random_tokens, shipped, write_checkpoint

LAYER = 3


def hidden_rows(engine: Engine, count: int = 24) -> np.ndarray:
    return engine.embed(random_tokens(count))


def gate_with_bias(folder: Path, bias: list[float]) -> Gate:
    tensors = {"model.layers.1.mlp.gate.e_score_correction_bias": np.array(bias)}
    return Gate(load_checkpoint(write_checkpoint(folder, tensors=tensors)), 1, "fx")


def test_groups_win_by_their_two_best_and_experts_within_them(tmp_path: Path) -> None:
    gate = gate_with_bias(tmp_path, [0] * 8)
    scores = np.array([[0.9, 0.1, 0.6, 0.5, 0.5, 0.4, 0.2, 0.2]], np.float32)
    # group sums 1.0, 1.1, 0.9, 0.4: groups 0 and 1 stay, so expert 4 loses to expert 3
    chosen, weights = gate.choose(scores)
    assert chosen.tolist() == [[0, 2, 3]]
    np.testing.assert_allclose(weights, [[2.5 * 0.45, 2.5 * 0.3, 2.5 * 0.25]], rtol=1e-6)


def test_the_bias_moves_the_choice_but_not_the_weight(tmp_path: Path) -> None:
    gate = gate_with_bias(tmp_path, [0, 0, 0, 0, 0, 0, 5, 5])
    chosen, weights = gate.choose(np.full((1, 8), 0.5, np.float32))
    assert chosen.tolist() == [[6, 7, 0]]
    np.testing.assert_allclose(weights, 2.5 / 3, rtol=1e-6)


def test_ties_go_to_the_lower_expert(tmp_path: Path) -> None:
    chosen, _ = gate_with_bias(tmp_path, [0] * 8).choose(np.full((4, 8), 0.25, np.float32))
    assert chosen.tolist() == [[0, 1, 2]] * 4


def test_losing_groups_stay_out_even_when_every_bias_is_negative(tmp_path: Path) -> None:
    gate = gate_with_bias(tmp_path, [-9, -9, -9, -9, -8, -8, -8, -8])
    chosen, _ = gate.choose(np.full((1, 8), 0.5, np.float32))
    assert chosen.tolist() == [[4, 5, 6]]


@pytest.mark.parametrize("mode", ["int8", "fx"])
def test_any_placement_replica_choice_and_order_gives_the_same_sum(mode: str) -> None:
    engine = shipped(mode)
    x = hidden_rows(engine)
    routed = engine.gate(LAYER, x)
    everything = engine.args.expert_ids()
    wanted = engine.combine(
        x,
        [
            engine.expert_partial(
                LAYER, routed.rows, routed.topk_idx, routed.topk_weights, everything
            )
        ],
    )
    rng = np.random.default_rng(5)
    for _ in range(6):
        # Two replicas of each expert on two of five dies; each choice goes to one of them.
        homes = np.array([rng.choice(5, 2, replace=False) for _ in everything])
        replica = rng.integers(0, 2, routed.topk_idx.shape)
        die_of = homes[routed.topk_idx, replica]
        partials = []
        for die in rng.permutation(5):
            here = np.where(die_of == die, routed.topk_idx, np.int32(-1))
            routed_here = rng.permutation(engine.args.n_routed_experts).tolist()
            partials.append(
                engine.expert_partial(LAYER, routed.rows, here, routed.topk_weights, routed_here)
            )
        shared = [engine.args.n_routed_experts]
        partials.insert(
            int(rng.integers(5)),
            engine.expert_partial(LAYER, routed.rows, routed.topk_idx, routed.topk_weights, shared),
        )
        assert engine.combine(x, partials).tobytes() == wanted.tobytes()


def test_float_sums_depend_on_the_placement() -> None:
    engine = shipped("f32")
    x = hidden_rows(engine)
    routed = engine.gate(LAYER, x)

    def partial(experts: list[int]) -> np.ndarray:
        return engine.expert_partial(
            LAYER, routed.rows, routed.topk_idx, routed.topk_weights, experts
        )

    together = engine.combine(x, [partial(list(range(17)))])
    apart = engine.combine(x, [partial([e]) for e in reversed(range(17))])
    assert together.tobytes() != apart.tobytes()
    np.testing.assert_allclose(together, apart, atol=1e-4)


@pytest.mark.parametrize("mode", ["int8", "fx"])
def test_an_expert_die_with_only_its_weights_computes_the_same_partial(mode: str) -> None:
    engine = shipped(mode)
    die = Engine(load_checkpoint(), mode, Parts(attention=False, experts={LAYER: {2, 5, 16}}))
    routed = engine.gate(LAYER, hidden_rows(engine))
    # What arrives over the wire are bytes, not the attention side's own arrays.
    rows = Rows(routed.rows.data.copy(), None if routed.rows.scale is None else routed.rows.scale)
    arguments = (LAYER, rows, routed.topk_idx, routed.topk_weights, [2, 5, 16])
    assert die.expert_partial(*arguments).tobytes() == engine.expert_partial(*arguments).tobytes()


def test_int8_rows_travel_as_bytes_with_one_scale_per_token() -> None:
    routed = shipped("int8").gate(LAYER, hidden_rows(shipped("int8"), 7))
    assert routed.rows.data.dtype == np.int8
    assert routed.rows.scale is not None
    assert routed.rows.scale.shape == (7, 1)
    assert routed.topk_idx.dtype == np.int32


def test_partials_are_integers_of_the_grid() -> None:
    engine = shipped("int8")
    routed = engine.gate(LAYER, hidden_rows(engine))
    partial = engine.expert_partial(
        LAYER, routed.rows, routed.topk_idx, routed.topk_weights, [0, 1, 2, 3]
    )
    assert partial.dtype == np.float64
    assert np.array_equal(partial, np.rint(partial))


def test_rows_that_chose_nothing_here_stay_zero() -> None:
    engine = shipped("int8")
    routed = engine.gate(LAYER, hidden_rows(engine, 2))
    absent = sorted(set(range(16)) - set(routed.topk_idx.ravel().tolist()))
    partial = engine.expert_partial(
        LAYER, routed.rows, routed.topk_idx, routed.topk_weights, absent
    )
    assert not partial.any()


def test_a_die_without_work_answers_with_no_rows() -> None:
    engine = shipped("int8")
    rows = engine.gate(LAYER, hidden_rows(engine, 3)).rows.take(np.arange(0))
    none = np.zeros((0, 4), np.int32)
    partial = engine.expert_partial(LAYER, rows, none, none.astype(np.float32), [0, 16])
    assert partial.shape == (0, 128)


def test_a_die_refuses_an_expert_that_it_does_not_hold() -> None:
    die = Engine(load_checkpoint(), "int8", Parts(attention=False, experts={LAYER: {1}}))
    routed = shipped("int8").gate(LAYER, hidden_rows(shipped("int8"), 2))
    with pytest.raises(InvariantError, match="expert 4 of layer 3 is not held"):
        die.expert_partial(LAYER, routed.rows, routed.topk_idx, routed.topk_weights, [4])
    with pytest.raises(InvariantError, match="no gate for layer 3"):
        die.gate(LAYER, hidden_rows(shipped("int8"), 2))


def test_experts_move_in_and_out_of_a_die() -> None:
    die = Engine(load_checkpoint(), "int8", Parts(attention=False, experts={}))
    die.hold_experts(LAYER, [3, 1, 16])
    die.release_experts(LAYER, [1, 9])
    assert die.held_experts(LAYER) == (3, 16)
    with pytest.raises(InvariantError, match="no expert 17"):
        die.hold_experts(LAYER, [17])


def test_several_shared_experts_are_one_wide_expert(tmp_path: Path) -> None:
    engine = Engine(load_checkpoint(write_checkpoint(tmp_path)), "fx")
    x = engine.embed([3, 4, 5])
    routed = engine.gate(1, x)
    parts = [
        engine.expert_partial(1, routed.rows, routed.topk_idx, routed.topk_weights, [e])
        for e in engine.args.expert_ids()
    ]
    together = engine.expert_partial(
        1, routed.rows, routed.topk_idx, routed.topk_weights, engine.args.expert_ids()
    )
    assert np.array_equal(sum(parts[1:], parts[0]), together)
    assert parts[-1].all()
