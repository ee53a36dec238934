"""KV stores: two memories, one behaviour."""

import numpy as np
import pytest

from libs.errors import BadInput, InvariantError
from libs.model.kv import ContiguousKv, PagedKv


def rows(count: int, first: int = 0) -> np.ndarray:
    return (np.arange(count * 3, dtype=np.float32) + 100 * first).reshape(count, 3)


def test_paged_and_contiguous_hold_the_same_rows() -> None:
    contiguous, paged = ContiguousKv(2, 3), PagedKv(10, 4, 2, 3)
    paged.bind(7, [5, 0, 9])
    for start, count in ((0, 3), (3, 1), (4, 6), (8, 2)):
        for kv in (contiguous, paged):
            kv.write(7, 1, start, rows(count, start))
    assert np.array_equal(contiguous.read(7, 1, 10), paged.read(7, 1, 10))


def test_contiguous_grows_without_losing_rows() -> None:
    kv = ContiguousKv(1, 3)
    for i in range(300):
        kv.write(0, 0, i, rows(1, i))
    assert np.array_equal(kv.read(0, 0, 300)[250], rows(1, 250)[0])


def test_contiguous_refuses_gaps_and_unwritten_rows() -> None:
    kv = ContiguousKv(1, 3)
    with pytest.raises(InvariantError, match="gap after row 0"):
        kv.write(0, 0, 1, rows(1))
    with pytest.raises(InvariantError, match="5 rows asked, 0 written"):
        kv.read(3, 0, 5)


def test_contiguous_overwriting_shortens_the_sequence() -> None:
    kv = ContiguousKv(1, 3)
    kv.write(0, 0, 0, rows(9))
    kv.write(0, 0, 4, rows(1))
    with pytest.raises(InvariantError, match="9 rows asked, 5 written"):
        kv.read(0, 0, 9)


def test_paged_refuses_to_write_past_the_table() -> None:
    kv = PagedKv(4, 4, 1, 3)
    kv.bind(0, [1, 2])
    with pytest.raises(InvariantError, match="row 8 lies past its 2 blocks of 4"):
        kv.write(0, 0, 7, rows(2))
    with pytest.raises(InvariantError, match="no block table"):
        kv.read(1, 0, 1)
    with pytest.raises(InvariantError, match=r"outside 0\.\.3"):
        kv.bind(2, [4])


def test_paged_rows_that_nobody_wrote_are_not_numbers() -> None:
    kv = PagedKv(2, 4, 1, 3)
    kv.bind(0, [0])
    kv.write(0, 0, 0, rows(2))
    assert np.isnan(kv.read(0, 0, 3)[2]).all()


def test_a_block_travels_to_another_store() -> None:
    source, target = PagedKv(4, 4, 2, 3), PagedKv(8, 4, 2, 3)
    source.bind(0, [3])
    target.bind(5, [6])
    for layer in range(2):
        source.write(0, layer, 0, rows(4, layer))
    target.import_block(6, source.export_block(3))
    assert np.array_equal(target.read(5, 1, 4), source.read(0, 1, 4))


def test_layers_of_a_block_travel_one_by_one() -> None:
    source, target = PagedKv(1, 2, 3, 3), PagedKv(1, 2, 3, 3)
    for kv in (source, target):
        kv.bind(0, [0])
    source.write(0, 2, 0, rows(2))
    target.import_block(0, source.export_block(0, [2]), [2])
    assert np.array_equal(target.read(0, 2, 2), rows(2))
    assert np.isnan(target.read(0, 0, 1)).all()


def test_an_exported_block_is_a_copy() -> None:
    kv = PagedKv(1, 2, 1, 3)
    kv.bind(0, [0])
    kv.write(0, 0, 0, rows(2))
    taken = kv.export_block(0)
    kv.write(0, 0, 0, rows(2, 9))
    assert np.array_equal(taken[0], rows(2))


def test_a_block_of_another_shape_is_bad_input() -> None:
    with pytest.raises(BadInput, match=r"\[2, 4, 3\], expected \[2, 4, 5\]"):
        PagedKv(1, 4, 2, 5).import_block(0, np.zeros((2, 4, 3), np.float32))
