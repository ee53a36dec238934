"""Cores for tests of the hosts: what they do is a function, what they saw is a list."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from libs.actor import Effect, Event, Received

React = Callable[[Event], list[Effect]]


class ScriptCore:
    """Reacts by a function; `seen` holds every event with the core's now."""

    def __init__(self, name: str, react: React | None = None) -> None:
        self.name = name
        self.seen: list[tuple[int, Event]] = []
        self._react = react or (lambda _event: [])

    def handle(self, event: Event, now_ns: int) -> list[Effect]:
        self.seen.append((now_ns, event))
        return self._react(event)

    def validate(self) -> None:
        assert all(now >= event.at_ns for now, event in self.seen), "now is never behind an event"

    @property
    def messages(self) -> list[Any]:
        """The messages received, in order."""
        return [event.message for _, event in self.seen if isinstance(event, Received)]
