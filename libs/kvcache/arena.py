"""Contiguous ranges of one stretch of memory, each with one owner; first fit.

A die's application area is lent out in such ranges while KV is on its way: a message is one piece
of memory, and the blocks of a request lie anywhere in the pool.

Invariant: ranges are disjoint, inside the arena, and free + taken = total.
"""

from __future__ import annotations

from libs.errors import Backpressure


class Arena:
    """`nbytes` of memory; an owner has at most one range."""

    def __init__(self, nbytes: int) -> None:
        assert nbytes > 0, nbytes
        self.nbytes = nbytes
        self._taken: dict[str, tuple[int, int]] = {}

    @property
    def taken_bytes(self) -> int:
        """What is lent out now."""
        return sum(nbytes for _, nbytes in self._taken.values())

    def can_take(self, nbytes: int) -> bool:
        """Whether `take` would succeed."""
        return self._gap(nbytes) is not None

    def take(self, owner: str, nbytes: int) -> int:
        """The offset of a range for `owner`; raises `Backpressure` when no gap is long enough."""
        assert owner not in self._taken, f"{owner} has a range already"
        offset = self._gap(nbytes)
        if offset is None:
            raise Backpressure(f"no gap of {nbytes} bytes in an arena of {self.nbytes}")
        self._taken[owner] = offset, nbytes
        return offset

    def range_of(self, owner: str) -> tuple[int, int] | None:
        """Offset and length of what `owner` has, if anything."""
        return self._taken.get(owner)

    def give_back(self, owner: str) -> None:
        """Free the owner's range; an owner without one is fine."""
        self._taken.pop(owner, None)

    def _gap(self, nbytes: int) -> int | None:
        at = 0
        for offset, length in sorted(self._taken.values()):
            if offset - at >= nbytes:
                break
            at = offset + length
        return at if self.nbytes - at >= nbytes else None

    def validate(self) -> None:
        """No two ranges overlap, none leaves the arena."""
        end = 0
        for offset, length in sorted(self._taken.values()):
            assert offset >= end, "two owners of one byte"
            end = offset + length
        assert end <= self.nbytes, (end, self.nbytes)
