from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from libs.errors import BadInput, CapacityExceeded
from libs.xccl import p2p_cost
from libs.xccl.paths import DMA_BYTES_MAX, Occupancy, Path, choose_path, expected_ns

KB = 1024


@pytest.mark.parametrize(
    ("nbytes", "aivs", "load", "path"),
    [
        (36 * KB, 2, Occupancy(), Path.MTE),  # small: the lowest start-up wins
        (9216 * KB, 2, Occupancy(), Path.URMA),  # two cores are too slow for 9 MB
        (9216 * KB, 48, Occupancy(), Path.MTE),  # 48 fill the link
        (9216 * KB, 48, Occupancy(free_aivs=0), Path.DMA),  # computing needs every core
        (9216 * KB, 0, Occupancy(), Path.DMA),
        (9216 * KB, 48, Occupancy(free_aivs=1), Path.URMA),  # one core can start it
        (1152 * KB, 2, Occupancy(flows=4), Path.MTE),  # a quarter of the link: two cores suffice
    ],
)
def test_the_path_depends_on_size_cores_and_contention(
    nbytes: int, aivs: int, load: Occupancy, path: Path
) -> None:
    assert choose_path(nbytes, aivs, load) is path


@given(st.integers(0, 1 << 26), st.integers(0, 48), st.integers(0, 48), st.integers(1, 8))
def test_no_path_is_faster_than_the_chosen_one(
    nbytes: int, aivs: int, free: int, flows: int
) -> None:
    load = Occupancy(free, flows)
    chosen = expected_ns(choose_path(nbytes, aivs, load), nbytes, aivs, load)
    assert chosen is not None
    others = [expected_ns(path, nbytes, aivs, load) for path in Path]
    assert all(other is None or chosen <= other for other in others)


def test_an_idle_mte_path_is_expected_to_follow_the_law() -> None:
    assert expected_ns(Path.MTE, KB * KB, 2) == p2p_cost.law_ns(KB * KB, 2)


@pytest.mark.parametrize(("nbytes", "aivs"), [(-1, 2), (1, -1), (1, 49)])
def test_an_impossible_request_is_refused(nbytes: int, aivs: int) -> None:
    with pytest.raises(BadInput):
        choose_path(nbytes, aivs)


def test_more_than_one_transfer_can_carry_is_refused() -> None:
    with pytest.raises(CapacityExceeded):
        choose_path(DMA_BYTES_MAX + 1, 2)


@pytest.mark.parametrize("wrong", [{"free_aivs": -1}, {"free_aivs": 49}, {"flows": 0}])
def test_an_impossible_load_is_refused(wrong: dict[str, int]) -> None:
    with pytest.raises(BadInput):
        Occupancy(**wrong)
