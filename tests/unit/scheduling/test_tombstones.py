from __future__ import annotations

from libs.scheduling.tombstones import Tombstones


def test_the_oldest_are_forgotten_first() -> None:
    stones = Tombstones(limit=2)
    for key in ("a", "b", "c"):
        stones.add(key)
    assert ["a" in stones, "b" in stones, "c" in stones] == [False, True, True]


def test_adding_again_makes_young_again() -> None:
    stones = Tombstones(limit=2)
    for key in ("a", "b", "a", "c"):
        stones.add(key)
    assert ["a" in stones, "b" in stones, "c" in stones] == [True, False, True]
