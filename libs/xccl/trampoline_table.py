"""Which expert dies are trampolines, and whose rows go through which: a versioned table.

The table is a value. Everybody who holds the same version routes alike, without another word;
`replace` makes the next version, and whoever is told of it adopts it because it is newer.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from enum import Enum

from libs.errors import LocalProtocolError


class Scheme(Enum):
    """How rows find their way; see `libs.xccl.trampoline`."""

    STRAIGHT = "straight"
    PAIRED = "paired"
    GROUPED = "grouped"


@dataclass(frozen=True, slots=True)
class TrampolineTable:
    """`trampolines[i]` stands in for attention die `attention[i]`; a die may do so for several once
    dies have died and none is spare.
    """

    version: int
    attention: tuple[int, ...]
    experts: tuple[int, ...]
    trampolines: tuple[int, ...]
    scheme: Scheme
    attention_index: dict[int, int] = field(init=False, repr=False, compare=False)
    expert_index: dict[int, int] = field(init=False, repr=False, compare=False)
    #: Expert dies that are no trampolines, with their position among them.
    rest_index: dict[int, int] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        if not self.attention or not self.experts:
            raise LocalProtocolError("a table needs attention dies and expert dies")
        both = (*self.attention, *self.experts)
        if len(set(both)) != len(both):
            raise LocalProtocolError("a die occurs twice")
        if not set(self.trampolines) <= set(self.experts):
            raise LocalProtocolError("trampolines are expert dies")
        if len(self.trampolines) != len(self.attention):
            raise LocalProtocolError("as many trampolines as attention dies")
        rest = [die for die in self.experts if die not in set(self.trampolines)]
        for name, dies in (
            ("attention_index", self.attention), ("expert_index", self.experts),
            ("rest_index", rest),
        ):  # fmt: skip
            object.__setattr__(self, name, {die: index for index, die in enumerate(dies)})

    def first_hop(self, source: int, target: int) -> int:
        """The die that attention die `source` writes rows for expert die `target` to."""
        match self.scheme:
            case Scheme.STRAIGHT:
                return target
            case Scheme.PAIRED:
                return self.trampolines[self.attention_index[source]]
            case Scheme.GROUPED:
                rest = self.rest_index.get(target)
                if rest is None:
                    return target
                # Spread (rest die, source) evenly over the trampolines, neighbours together: each
                # gets the same share of rows, and no more peers than that takes.
                place = rest * len(self.attention) + self.attention_index[source]
                return self.trampolines[place // len(self.rest_index)]
            case _:
                raise AssertionError(f"unknown scheme {self.scheme!r}")

    def in_turn(self, source: int, peers: list[int]) -> list[int]:
        """`peers` beginning at a place of the source's own, so that not all start at the same."""
        peers = sorted(peers)
        if not peers:
            return []
        start = self.attention_index[source] * len(peers) // len(self.attention)
        return [*peers[start:], *peers[:start]]

    def replace(self, dead: int) -> TrampolineTable:
        """The next version, without expert die `dead`.

        Its place as a trampoline goes to the first spare expert die, or to the trampoline with
        the fewest duties when there is none. Raises `LocalProtocolError` when it is not an expert
        die or the only one.
        """
        experts = tuple(die for die in self.experts if die != dead)
        if dead not in self.expert_index or not experts:
            raise LocalProtocolError(f"die {dead} is not an expert die, or it is the last")
        trampolines = list(self.trampolines)
        for index, die in enumerate(trampolines):
            if die == dead:
                left = [other for other in trampolines if other != dead]
                trampolines[index] = min(experts, key=lambda e: (left.count(e), experts.index(e)))
        version = self.version + 1
        return replace(self, version=version, experts=experts, trampolines=tuple(trampolines))


def make_table(
    attention: tuple[int, ...], experts: tuple[int, ...], scheme: Scheme = Scheme.GROUPED
) -> TrampolineTable:
    """The first table: trampolines evenly spaced among the expert dies, so over the servers too.

    With fewer expert dies than attention dies some serve several.
    """
    count, peers = len(attention), len(experts)
    trampolines = tuple(experts[index * peers // count] for index in range(count))
    return TrampolineTable(1, attention, experts, trampolines, scheme)
