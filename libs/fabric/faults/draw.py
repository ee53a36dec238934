"""Chance, without a generator: every draw is a hash of what it is about.

A draw names its rule, the ordered pair of dies and either the frame's number on that pair or a slot
of time. The same frame therefore meets the same fate whatever else happens in the pod, in which
order shards work, and in which process; another seed gives another history.
"""

from __future__ import annotations

import struct
from hashlib import blake2b

#: What `probability` 1.0 means: every 64-bit number is below it.
CERTAIN = 1 << 64

_KEY = struct.Struct("<qqqq")

#: What the first number of a key says the draw is about, so that no two purposes share a draw.
_FRAME, _LINK, _DIE, _PHASE = range(4)


def seed_of(seed: int, fault_id: str) -> bytes:
    """The hash key of one rule."""
    return blake2b(fault_id.encode(), key=struct.pack("<q", seed), digest_size=16).digest()


class Draw:
    """The chances of one frame under one rule.

    `ends` are the ends of the frame that the rule's scope is about: both dies, or the one it names.
    """

    __slots__ = ("_count", "_key", "_pair", "_threshold", "ends")

    def __init__(
        self,
        key: bytes,
        threshold: int,
        pair: tuple[int, int],
        count: int,
        ends: tuple[int, ...],
    ) -> None:
        self._key = key
        self._threshold = threshold
        self._pair = pair
        self._count = count
        self.ends = ends

    def hit(self) -> bool:
        """Whether this frame is hit."""
        return self._number(_FRAME, *self._pair, self._count) < self._threshold

    def link_hit(self, slot: int) -> bool:
        """Whether the frame's link is hit during `slot`; the same for all its frames then."""
        return self._number(_LINK, *self._pair, slot) < self._threshold

    def end_hit(self, slot: int) -> bool:
        """Whether one of the dies in scope is hit during `slot`."""
        return any(self._number(_DIE, die, 0, slot) < self._threshold for die in self.ends)

    def below(self, limit: int, salt: int = 0) -> int:
        """A number of this frame's own from 0 to `limit` - 1; another `salt`, another number."""
        assert limit >= 1, limit
        assert salt >= 0, salt
        return self._number(_PHASE + 1 + salt, *self._pair, self._count) * limit >> 64

    def phase(self, period: int) -> int:
        """A number from 0 to `period` - 1 that belongs to the link."""
        return self._number(_PHASE, *self._pair, 0) * period >> 64

    def _number(self, about: int, first: int, second: int, third: int) -> int:
        data = _KEY.pack(about, first, second, third)
        return int.from_bytes(blake2b(data, key=self._key, digest_size=8).digest(), "little")
