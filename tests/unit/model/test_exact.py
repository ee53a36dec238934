"""The arithmetic itself: accuracy against libraries, and independence from how work is cut."""

import ast
import math
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from libs.model import exact


def test_exp2_is_within_its_promised_relative_error() -> None:
    x = np.linspace(-64.0, 64.0, 100_001)
    wanted = np.array([math.pow(2.0, v) for v in x])
    error = np.abs(exact.exp2_inplace(x.copy()) / wanted - 1)
    assert error.max() < 2.0**-39


def test_exp2_of_whole_numbers_is_exact() -> None:
    whole = np.arange(-60.0, 61.0)
    assert np.array_equal(exact.exp2_inplace(whole.copy()), np.ldexp(1.0, whole.astype(int)))


def test_sigmoid_agrees_with_the_library_and_saturates() -> None:
    x = np.linspace(-90, 90, 4001).astype(np.float32)
    wanted = np.array([1 / (1 + math.exp(-min(max(float(v), -80), 80))) for v in x])
    np.testing.assert_allclose(exact.sigmoid(x), wanted, rtol=2e-7)
    assert exact.sigmoid(np.array([np.float32(1000)]))[0] == 1


@given(st.lists(st.floats(-1e6, 1e6, width=32), min_size=1, max_size=40))
def test_fixed_point_keeps_every_value_to_half_a_step_of_its_row_maximum(
    values: list[float],
) -> None:
    row = np.array([values], np.float32)
    integers, scale = exact.fixed_point(row)
    assert np.abs(integers).max() <= 2**exact.FIXED_BITS
    assert np.array_equal(integers, np.rint(integers))
    assert np.abs(integers * scale - row).max() <= scale[0, 0] / 2


def test_fixed_point_of_zeros_is_zeros() -> None:
    integers, scale = exact.fixed_point(np.zeros((2, 5), np.float32))
    assert not integers.any()
    assert np.isfinite(scale).all()


def test_rms_norm_agrees_with_double_precision() -> None:
    rng = np.random.default_rng(1)
    x, weight = (
        rng.standard_normal((50, 128)).astype(np.float32),
        rng.random(128).astype(np.float32),
    )
    precise = x.astype(np.float64)
    wanted = weight * precise / np.sqrt((precise**2).mean(-1, keepdims=True) + 1e-6)
    np.testing.assert_allclose(exact.rms_norm(x, weight, 1e-6), wanted, rtol=1e-5, atol=1e-7)


def test_rms_norm_of_a_row_does_not_see_its_neighbours() -> None:
    rng = np.random.default_rng(2)
    x, weight = rng.standard_normal((33, 100)).astype(np.float32), np.ones(100, np.float32)
    together = exact.rms_norm(x, weight, 1e-6)
    alone = np.concatenate([exact.rms_norm(row[None], weight, 1e-6) for row in x])
    assert together.tobytes() == alone.tobytes()


def test_kv_rows_are_clamped_integers_of_the_grid() -> None:
    grid = exact.to_kv_grid(np.array([0.5, -1e9, 1e9, 2.0**-15, 31.99999], np.float32))
    assert grid.tolist() == [8192, -(2**19 - 1), 2**19 - 1, 0, 524288 - 1]


def test_softmax_budget_loses_one_bit_per_doubling_beyond_4096_rows() -> None:
    assert [exact.softmax_bits(n) for n in (1, 2048, 4096, 4097, 8192, 8193)] == [
        22, 22, 22, 21, 21, 20,
    ]  # fmt: skip
    assert exact.softmax_max_rows(22) == 4096


def test_softmax_budget_is_tight_enough_that_the_largest_sum_is_exact() -> None:
    bits = exact.softmax_bits(4096)
    largest = 4096 * 2**bits * int(exact.KV_LIMIT)
    assert largest < 2**53
    assert float(largest - 1) == largest - 1


def test_combine_grid_makes_sums_independent_of_order() -> None:
    rng = np.random.default_rng(3)
    rows = [
        exact.to_combine_grid(
            rng.standard_normal((4, 32)).astype(np.float32), np.full((4, 1), 0.37)
        )
        for _ in range(20)
    ]
    forward = exact.from_combine_grid(sum(rows[1:], rows[0]))
    backward = exact.from_combine_grid(sum(rows[-2::-1], rows[-1]))
    assert forward.tobytes() == backward.tobytes()


@pytest.mark.parametrize(
    "module", ["exact", "linear", "rope", "attention", "moe", "mtp", "engine", "kv"]
)
def test_exact_modules_call_no_function_that_differs_between_machines(module: str) -> None:
    unportable = {
        "exp", "exp2", "expm1", "log", "log2", "power", "sin", "cos", "tan", "tanh", "mean", "var",
        "std", "einsum", "dot", "prod", "average", "pow", "argpartition",
    }  # fmt: skip
    tree = ast.parse((Path(exact.__file__).parent / f"{module}.py").read_text(encoding="utf-8"))
    called = {
        node.attr
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute)
        and isinstance(node.value, ast.Name)
        and node.value.id in {"np", "math"}
    }
    assert not called & unportable


def test_softmax_numerators_are_integers_and_hidden_scores_vanish() -> None:
    scores = np.random.default_rng(4).standard_normal((5, 40)) * 6
    scores[:, 30:] = -1e30
    wanted = np.exp2(scores - scores.max(-1, keepdims=True))
    numerators = exact.softmax_numerators(scores, 22)
    assert np.array_equal(numerators, np.rint(numerators))
    assert not numerators[:, 30:].any()
    np.testing.assert_allclose(numerators / 2**22, wanted, atol=2.0**-22)


def test_combine_refuses_sums_beyond_the_exact_range() -> None:
    with pytest.raises(AssertionError, match="exact range"):
        exact.from_combine_grid(np.array([[2.0**53]]))
