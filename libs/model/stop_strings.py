"""Finds stop strings in text that arrives in pieces, and lets nothing of one through.

Text that could be the beginning of a stop string is held back until the next characters decide. The
match that *ends* first wins, and of several that end together the longest: the answer is the one
that reading character by character would give, so it does not depend on how the text was cut.
"""

from __future__ import annotations

from collections.abc import Sequence


class StopFilter:
    """Passes text on up to the first stop string; its state is the text held back."""

    __slots__ = ("_held", "_stops", "matched")

    def __init__(self, stops: Sequence[str]) -> None:
        assert all(stops), "an empty stop string matches everywhere"
        self._stops = tuple(stops)
        self._held = ""
        self.matched = False

    def push(self, text: str) -> str:
        """The text that is now known to precede any stop string."""
        if self.matched:
            return ""
        text = self._held + text
        cut = self._first_match(text)
        if cut is None:
            keep = self._undecided(text)
            self._held = text[len(text) - keep :]
            return text[: len(text) - keep]
        self.matched, self._held = True, ""
        return text[:cut]

    def flush(self) -> str:
        """End the text here: what was held back turns out to be no stop string."""
        assert not (self.matched and self._held), self._held
        text, self._held = self._held, ""
        return text

    def _first_match(self, text: str) -> int | None:
        """Where the winning stop string starts in `text`."""
        found = [
            (start + len(stop), start)
            for stop in self._stops
            if (start := text.find(stop)) >= 0
        ]  # fmt: skip
        return min(found)[1] if found else None

    def _undecided(self, text: str) -> int:
        """Length of the longest end of `text` with which some stop string begins."""
        longest = max(map(len, self._stops), default=1) - 1
        for length in range(min(longest, len(text)), 0, -1):
            if any(stop.startswith(text[-length:]) for stop in self._stops):
                return length
        return 0
