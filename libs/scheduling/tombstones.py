"""Ids that were cancelled, remembered for a while.

A cancellation is a small message on another connection than the request it cancels and may
overtake it. Whoever receives a request looks here first. Bounded: the oldest are forgotten.
"""

from __future__ import annotations

from collections import OrderedDict

TOMBSTONES_MAX = 4096


class Tombstones:
    """A bounded set with first-in-first-out eviction."""

    def __init__(self, limit: int = TOMBSTONES_MAX) -> None:
        self._limit = limit
        self._ids: OrderedDict[str, None] = OrderedDict()

    def add(self, key: str) -> None:
        """Remember `key`."""
        self._ids[key] = None
        self._ids.move_to_end(key)
        while len(self._ids) > self._limit:
            self._ids.popitem(last=False)

    def __contains__(self, key: str) -> bool:
        return key in self._ids
