"""Chance, without a generator: every draw is a hash of what it is about.

A draw names its rule and either the ordered pair of dies with the frame's number on it, or a link
or die with a slot of time. The same frame therefore meets the same fate whatever else happens in
the pod, in which order shards work, and in which process; another seed gives another history.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from hashlib import blake2b
from math import sqrt

#: What `probability` 1.0 means: every 64-bit number is below it.
CERTAIN = 1 << 64

_KEY = struct.Struct("<qqqq")

#: What the first number of a key says the draw is about, so that no two purposes share a draw.
_FRAME, _LINK, _DIE, _PHASE = range(4)


def seed_of(seed: int, fault_id: str) -> bytes:
    """The hash key of one rule."""
    return blake2b(fault_id.encode(), key=struct.pack("<q", seed), digest_size=16).digest()


@dataclass(frozen=True, slots=True)
class Chance:
    """What all draws of one rule share: its key, its thresholds, and when it is active.

    `die_threshold` belongs to faults of dies, `end_ns` is None for a rule that lasts.
    """

    key: bytes
    threshold: int
    die_threshold: int
    start_ns: int
    end_ns: int | None

    def covers(self, at_ns: int) -> bool:
        """Whether the rule is active at `at_ns`."""
        return self.start_ns <= at_ns and (self.end_ns is None or at_ns < self.end_ns)


def threshold_of(probability: float) -> int:
    """Numbers below it are hits."""
    return min(CERTAIN, round(probability * CERTAIN))


def per_end(probability: float) -> float:
    """The chance of each of two ends, so that one of them is hit with `probability`."""
    return 1.0 - sqrt(1.0 - probability)


class Draw:
    """The chances of one frame under one rule.

    `ends` are the ends of the frame that the rule's scope is about: both dies, or the one it names.
    """

    __slots__ = ("_chance", "_count", "_ends", "_key", "_pair")

    def __init__(
        self, chance: Chance, pair: tuple[int, int], count: int, ends: tuple[int, ...]
    ) -> None:
        self._chance = chance
        self._key = chance.key
        self._pair = pair
        self._count = count
        self._ends = ends

    def hit(self) -> bool:
        """Whether this frame is hit."""
        return self._number(_FRAME, *self._pair, self._count) < self._chance.threshold

    def link_hit(self, slot: int) -> bool:
        """Whether the frame's link is hit during `slot`; the same for all its frames then."""
        return self._number(_LINK, *self._pair, slot) < self._chance.threshold

    def end_hit(self, slot: int) -> bool:
        """Whether one of the dies in scope is hit during `slot`."""
        return any(self._die_hit(die, slot) for die in self._ends)

    def is_gone(self, die: int, at_ns: int, slot_ns: int) -> bool:
        """Whether `die` is in scope, and hit in the slot of `at_ns`, when the rule is active."""
        if die not in self._ends or not self._chance.covers(at_ns):
            return False
        return self._die_hit(die, at_ns // slot_ns)

    def share_of(self, period: int) -> int:
        """The rule's probability as a part of `period`, rounded to the nearest."""
        return (period * self._chance.threshold + CERTAIN // 2) >> 64

    def _die_hit(self, die: int, slot: int) -> bool:
        return self._number(_DIE, die, 0, slot) < self._chance.die_threshold

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
