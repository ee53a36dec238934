"""Products: exactness under any cut of the batch, the K limits, and rows prepared elsewhere."""

from collections.abc import Callable

import numpy as np
import pytest

from libs.errors import BadInput
from libs.model.exact import FIXED_MAX_K
from libs.model.linear import (
    INT8_MAX_K,
    FixedLinear,
    FloatLinear,
    Int8Linear,
    Linear,
    check_mode,
    grouped_product,
    int8_rows,
)

Kind = Callable[[np.ndarray], Linear]
EXACT: list[Kind] = [Int8Linear, FixedLinear]


def normal(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


@pytest.mark.parametrize("kind", EXACT)
@pytest.mark.parametrize("cut", [1, 2, 3, 5, 8, 16])
def test_slices_of_a_batch_give_the_bits_of_the_whole(kind: Kind, cut: int) -> None:
    linear, x = kind(normal(96, 64)), normal(64, 64, seed=1)
    whole = linear(x)
    sliced = np.concatenate([linear(x[i : i + cut]) for i in range(0, 64, cut)])
    assert whole.tobytes() == sliced.tobytes()


def test_float_products_do_depend_on_the_slices() -> None:
    linear, x = FloatLinear(normal(384, 512)), normal(256, 512, seed=1)
    sliced = np.concatenate([linear(x[i : i + 1]) for i in range(256)])
    assert linear(x).tobytes() != sliced.tobytes()


@pytest.mark.parametrize("kind", EXACT)
def test_reversing_the_inputs_changes_no_bit(kind: Kind) -> None:
    weight, x = normal(40, 200), normal(9, 200, seed=1)
    straight = kind(weight)(x)
    reversed_ = kind(weight[:, ::-1])(x[:, ::-1])
    assert straight.tobytes() == reversed_.tobytes()


@pytest.mark.parametrize("k", [128, INT8_MAX_K, INT8_MAX_K + 1, 3000])
def test_int8_sums_equal_integer_arithmetic_on_worst_case_rows(k: int) -> None:
    signs = np.where(np.random.default_rng(k).random((6, k)) < 0.9, 127, -127)
    data = signs.astype(np.int8)
    linear = Int8Linear(signs.astype(np.float32))  # scale is 1: every level is 127 or -127
    sums = linear.product(data)
    assert np.array_equal(sums, signs.astype(np.int64) @ signs.T.astype(np.int64))


def test_fixed_point_is_close_to_the_double_product() -> None:
    weight, x = normal(64, 300), normal(10, 300, seed=1)
    wanted = x.astype(np.float64) @ weight.T.astype(np.float64)
    np.testing.assert_allclose(FixedLinear(weight)(x), wanted, atol=2e-4)


def test_int8_is_within_its_quantisation_error() -> None:
    weight, x = normal(64, 300), normal(10, 300, seed=1)
    error = np.abs(Int8Linear(weight)(x) - x @ weight.T)
    assert error.max() < 1.5  # of values near 17
    assert error.mean() > 0.01  # it really is quantised


def test_heads_multiply_head_by_head() -> None:
    weight, x = normal(3, 8, 16), normal(3, 5, 16, seed=1)
    stacked = FixedLinear(weight)(x)
    single = np.stack([FixedLinear(weight[h])(x[h]) for h in range(3)])
    assert stacked.tobytes() == single.tobytes()


def test_rows_prepared_elsewhere_give_the_bits_of_preparing_here() -> None:
    linear, x = Int8Linear(normal(64, 128)), normal(16, 128, seed=1)
    assert linear.apply(int8_rows(x)).tobytes() == linear(x).tobytes()


def test_int8_levels_stay_within_127_and_rows_of_zeros_are_zeros() -> None:
    rows = int8_rows(np.array([[0, 0, 0], [1e-30, 0, 0], [5, -5, 1e-3]], np.float32))
    assert rows.data.min() >= -127
    assert rows.data[2].tolist() == [127, -127, 0]
    assert not rows.data[0].any()


@pytest.mark.parametrize("kind", [Int8Linear, FixedLinear, FloatLinear])
def test_grouped_products_equal_single_ones(kind: Kind) -> None:
    linears = [kind(normal(24, 32, seed=s)) for s in range(3)]
    rows = linears[0].rows(normal(10, 32, seed=9))
    grouped = grouped_product(linears, rows, [0, 4, 4, 10])
    first = linears[0].apply(rows.take(np.arange(4)))
    last = linears[2].apply(rows.take(np.arange(4, 10)))
    assert grouped.tobytes() == np.concatenate([first, last]).tobytes()


def test_an_inexact_fixed_point_width_is_refused() -> None:
    with pytest.raises(BadInput, match=str(FIXED_MAX_K)):
        FixedLinear(np.zeros((1, FIXED_MAX_K + 1), np.float32))


def test_an_unknown_mode_names_the_field() -> None:
    with pytest.raises(BadInput, match="mode must be one of int8, fx, f32") as caught:
        check_mode("fp4")
    assert caught.value.field == "mode"
