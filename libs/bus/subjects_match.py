"""Which subscriptions a subject reaches, by the rules of NATS; pure, so the simulator uses it too.

A subject is a row of non-empty tokens joined by dots. In a pattern `*` stands for exactly one token
and a final `>` for one or more. Every plain subscription that matches gets the message; of each
queue group one member does, drawn from a seeded generator.
"""

from __future__ import annotations

import random
import re
from dataclasses import dataclass
from typing import Generic, TypeVar

from libs.errors import BadInput

Target = TypeVar("Target")

SUBJECT_LENGTH_MAX = 255
_TOKEN = re.compile(r"[^\s.*>\x00-\x1f\x7f]+")
_CACHE_MAX = 4096


def check_subject(subject: str) -> None:
    """Raise `BadInput` unless `subject` can be published to."""
    if len(subject) > SUBJECT_LENGTH_MAX:
        raise BadInput(f"subject of {len(subject)} characters", field="subject")
    if not all(map(_TOKEN.fullmatch, subject.split("."))):
        raise BadInput(f"malformed subject {subject!r}", field="subject")


def check_pattern(pattern: str) -> None:
    """Raise `BadInput` unless `pattern` can be subscribed to."""
    tokens = pattern.split(".")
    if tokens[-1] == ">":
        tokens.pop()
    rest = ".".join("any" if token == "*" else token for token in tokens) if tokens else "any"
    try:
        check_subject(rest)
    except BadInput as error:
        raise BadInput(f"malformed pattern {pattern!r}", field="subject") from error


def check_queue(queue: str) -> None:
    """Raise `BadInput` unless `queue` is empty or a queue group's name."""
    if queue and _TOKEN.fullmatch(queue) is None:
        raise BadInput(f"malformed queue group {queue!r}", field="queue")


@dataclass(frozen=True, slots=True)
class _Entry(Generic[Target]):
    handle: int
    tokens: tuple[str, ...]
    target: Target
    queue: str

    @property
    def prefix(self) -> tuple[str, ...]:
        """The tokens before the first wildcard, by which the entry is indexed."""
        for index, token in enumerate(self.tokens):
            if token in ("*", ">"):
                return self.tokens[:index]
        return self.tokens


class SubjectRouter(Generic[Target]):
    """The subscriptions of one broker.

    Entries are indexed by their literal prefix, so a match looks at one bucket per token of the
    subject. The answer is remembered until the next `add` or `remove`, because a pod publishes to
    few subjects very often.
    """

    def __init__(self, seed: int = 0) -> None:
        self._entries: dict[int, _Entry[Target]] = {}
        self._by_prefix: dict[tuple[str, ...], list[_Entry[Target]]] = {}
        self._next = 0
        self._cache: dict[str, tuple[tuple[Target, ...], tuple[tuple[Target, ...], ...]]] = {}
        self._random = random.Random(seed)

    def add(self, pattern: str, target: Target, queue: str = "") -> int:
        """Subscribe `target`; returns the handle for `remove`. Raises `BadInput`."""
        check_pattern(pattern)
        check_queue(queue)
        entry = _Entry(self._next, tuple(pattern.split(".")), target, queue)
        self._next += 1
        self._entries[entry.handle] = entry
        self._by_prefix.setdefault(entry.prefix, []).append(entry)
        self._cache.clear()
        return entry.handle

    def remove(self, handle: int) -> None:
        """End a subscription; an unknown handle is fine."""
        entry = self._entries.pop(handle, None)
        if entry is None:
            return
        bucket = self._by_prefix[entry.prefix]
        bucket.remove(entry)
        if not bucket:
            del self._by_prefix[entry.prefix]
        self._cache.clear()

    def match(self, subject: str) -> list[Target]:
        """The targets of one message to `subject`, in subscription order, plain ones first."""
        found = self._cache.get(subject)
        if found is None:
            if len(self._cache) >= _CACHE_MAX:
                self._cache.clear()
            found = self._cache[subject] = self._search(tuple(subject.split(".")))
        plain, groups = found
        targets = list(plain)
        targets += [group[self._random.randrange(len(group))] for group in groups]
        return targets

    def _search(
        self, tokens: tuple[str, ...]
    ) -> tuple[tuple[Target, ...], tuple[tuple[Target, ...], ...]]:
        plain: list[Target] = []
        groups: dict[str, list[Target]] = {}
        candidates = [
            entry
            for length in range(len(tokens) + 1)
            for entry in self._by_prefix.get(tokens[:length], ())
            if _matches(entry.tokens, tokens)
        ]
        for entry in sorted(candidates, key=lambda entry: entry.handle):
            (groups.setdefault(entry.queue, []) if entry.queue else plain).append(entry.target)
        return tuple(plain), tuple(tuple(group) for group in groups.values())


def _matches(pattern: tuple[str, ...], tokens: tuple[str, ...]) -> bool:
    if pattern[-1] == ">":
        pattern = pattern[:-1]
        if len(tokens) <= len(pattern):
            return False
    elif len(tokens) != len(pattern):
        return False
    return all(want in ("*", token) for want, token in zip(pattern, tokens, strict=False))
