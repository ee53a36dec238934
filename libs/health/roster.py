"""A supervisor's list of members: who was beaten, who answered, who has fallen silent.

Pure bookkeeping over `(actor, sequence)` pairs: a member is alive while its last answer is at most
`silent_after` beats old. Counting beats instead of reading a clock makes a supervisor that was
itself stopped forgive its members.
"""

from __future__ import annotations

from dataclasses import replace

from libs.wire.control import MemberState


class Roster:
    """The members that one supervisor beats; `expected` come from the plan and never change."""

    def __init__(self, expected: tuple[str, ...], silent_after: int) -> None:
        assert silent_after >= 1, silent_after
        self.expected = expected
        self.sequence = 0
        self._silent_after = silent_after
        self._answered: dict[str, int] = {}
        self._states: dict[str, MemberState] = {}

    def beat(self) -> int:
        """Start the next round; returns its sequence number."""
        self.sequence += 1
        return self.sequence

    def answered(self, actor: str, sequence: int, incarnation: int, state: MemberState) -> None:
        """Take an answer; answers out of the blue or from an older round than known are ignored."""
        if actor not in self.expected or sequence > self.sequence:
            return
        if sequence < self._answered.get(actor, 0):
            return
        self._answered[actor] = sequence
        self._states[actor] = replace(state, incarnation=incarnation)

    def is_alive(self, actor: str) -> bool:
        """Whether `actor` has answered recently enough."""
        last = self._answered.get(actor)
        return last is not None and self.sequence - last <= self._silent_after

    def states(self) -> tuple[MemberState, ...]:
        """Everybody who has ever answered, in plan order, with `alive` as judged here."""
        return tuple(
            replace(self._states[actor], alive=self.is_alive(actor))
            for actor in self.expected
            if actor in self._states
        )

    def missing(self) -> tuple[str, ...]:
        """Expected members that are not alive."""
        return tuple(actor for actor in self.expected if not self.is_alive(actor))
