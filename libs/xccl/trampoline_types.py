"""What travels between attention dies, trampolines and expert dies, and what the machines want."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

#: Source die and its sequence number: the name of a work for ever.
Work = tuple[int, int]


@dataclass(frozen=True, slots=True, eq=False)
class Part:
    """The rows of one work for (or partial sums from) expert die `die`."""

    die: int
    rows: int
    payload: Any


@dataclass(frozen=True, slots=True, eq=False)
class A2EFrame:
    """Rows on their way. `via` is the trampoline that passed it on, None on the first hop;
    `again` marks a repetition, whose answers nobody holds back.
    """

    source: int
    sequence: int
    again: bool
    via: int | None
    parts: tuple[Part, ...]

    @property
    def rows(self) -> int:
        """Rows in all."""
        return sum(part.rows for part in self.parts)


@dataclass(frozen=True, slots=True, eq=False)
class E2AFrame:
    """Partial sums on their way back."""

    source: int
    sequence: int
    parts: tuple[Part, ...]

    @property
    def rows(self) -> int:
        """Rows in all."""
        return sum(part.rows for part in self.parts)


# ---------------------------------------------------------------- effects


@dataclass(frozen=True, slots=True, eq=False)
class Put:
    """Write `frame` into the memory of die `target`."""

    target: int
    frame: A2EFrame | E2AFrame


@dataclass(frozen=True, slots=True, eq=False)
class Run:
    """Compute these rows here and call `computed`; told once per work."""

    source: int
    sequence: int
    part: Part


@dataclass(frozen=True, slots=True)
class Ignored:
    """A frame that means nothing here."""

    source: int
    sequence: int
    reason: str


@dataclass(frozen=True, slots=True, eq=False)
class Answered:
    """Every die has answered `sequence`; parts by die, ascending."""

    sequence: int
    parts: tuple[Part, ...]


@dataclass(frozen=True, slots=True, eq=False)
class Unplaced:
    """Rows for dies that the new table does not have: send them to replicas as another work."""

    sequence: int
    parts: tuple[Part, ...]


@dataclass(frozen=True, slots=True)
class Unanswered:
    """These dies did not answer, however often they were asked; the work is given up."""

    sequence: int
    dies: tuple[int, ...]


NodeEffect = Put | Run | Ignored
SourceEffect = Put | Answered | Unplaced | Unanswered
