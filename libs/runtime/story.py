"""The story of an object: the last events and effects that touched it, core by core.

Kept as short summaries, never as references to messages: a story must not keep tensors alive.
Errors carry it, tests print it, and a sweep shows it beside the seed that failed.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import Any

from libs import units
from libs.actor import (
    Compute,
    ComputeDone,
    Deliver,
    Effect,
    Event,
    Present,
    Received,
    Record,
    Reply,
    Send,
    SetTimer,
    TimerFired,
    Transmit,
    Unreachable,
)

STORY_MAX = 256


@dataclass(frozen=True, slots=True)
class Chapter:
    """One event and what came of it; `ids` are the requests and transfers it touched."""

    at_ns: int
    event: str
    effects: tuple[str, ...]
    ids: frozenset[str]

    def __str__(self) -> str:
        effects = ", ".join(self.effects) or "nothing"
        return f"{units.to_ms(self.at_ns):12.3f} ms  {self.event} -> {effects}"


class Story:
    """The bounded log of one core."""

    def __init__(self, actor: str) -> None:
        self.actor = actor
        self._chapters: deque[Chapter] = deque(maxlen=STORY_MAX)

    def add(self, now_ns: int, event: Event, effects: list[Effect]) -> None:
        """Remember one step."""
        ids = ids_of(event)
        for effect in effects:
            ids |= ids_of(effect)
        summaries = tuple(summary_of(effect) for effect in effects)
        self._chapters.append(Chapter(now_ns, summary_of(event), summaries, frozenset(ids)))

    def tell(self, about: str | None = None) -> list[str]:
        """The lines about one request or transfer, or all of them."""
        return [
            f"{self.actor}: {chapter}"
            for chapter in self._chapters
            if about is None or about in chapter.ids
        ]


def ids_of(item: Any) -> set[str]:
    """Request and transfer ids that an event or effect names."""
    found: set[str] = set()
    message = getattr(item, "message", item)
    for holder in (message, getattr(message, "spec", None), getattr(message, "manifest", None)):
        for attribute in ("request_id", "transfer_id"):
            value = getattr(holder, attribute, None)
            if isinstance(value, str):
                found.add(value)
    for attribute in ("rows", "chunks"):
        parts = getattr(message, attribute, None)
        if isinstance(parts, tuple):
            found.update(part.request_id for part in parts if hasattr(part, "request_id"))
    return found


def summary_of(item: Event | Effect) -> str:
    """One short phrase."""
    match item:
        case Received():
            return f"{_kind(item.message)} from {item.sender}"
        case TimerFired():
            return f"timer {item.name}"
        case ComputeDone():
            return f"job {item.job_id} done"
        case Unreachable():
            return f"{_kind(item.message)} unreachable at {item.subject}"
        case Send():
            return f"send {_kind(item.message)} to {item.subject}"
        case Transmit():
            return f"transmit {_kind(item.message)} {item.source}->{item.target}"
        case Reply() | Deliver():
            return f"{type(item).__name__.lower()} {_kind(item.message)}"
        case SetTimer():
            return f"arm {item.name}"
        case Compute():
            return f"compute {type(item.job).__name__} as job {item.job_id}"
        case Present():
            return f"present to {item.key}"
        case Record():
            return f"record {item.name}"
        case _:
            return type(item).__name__


def _kind(message: Any) -> str:
    return str(getattr(type(message), "KIND", type(message).__name__))
