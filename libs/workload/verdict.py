"""Compares what clients saw with what the reference says, and counts every kind of difference."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

from libs.model.output_parser import ToolCallPiece
from libs.model.reference import Reference
from libs.model.resources import ModelResources
from libs.wire.request import RequestSpec
from libs.workload.expected import Answer, expected_answer

#: Called with what is being done, how many are done, and of how many.
Progress = Callable[[str, int, int], None]


def untold(_what: str, _done: int, _total: int) -> None:
    """The progress that nobody wants to hear of."""


@dataclass(slots=True)
class Seen:
    """One client's view: chunks in the order in which they came, until the end it was told.

    `ended` is the finish reason, `cancelled` when the client left, or `failed: ...`.
    """

    indices: list[int] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)
    content: str = ""
    reasoning: str = ""
    tool_calls: list[ToolCallPiece] = field(default_factory=list)
    ended: str | None = None
    left: bool = False
    stamps_ns: list[int] = field(default_factory=list)


@dataclass(slots=True)
class Verdict:
    """Counts over a whole run; `ok` means that nothing differs and every request ended."""

    requests: int = 0
    completed: int = 0
    cancelled: int = 0
    failed: int = 0
    tokens: int = 0
    mismatched: int = 0
    lost: int = 0
    duplicated: int = 0
    unended: int = 0
    examples: list[str] = field(default_factory=list)

    @property
    def ok(self) -> bool:
        """Whether the run is beyond reproach."""
        return not (self.mismatched or self.lost or self.duplicated or self.unended or self.failed)

    def add(self, name: str, seen: Seen, expected: Answer) -> None:
        """Judge one request."""
        self.requests += 1
        self.tokens += len(seen.tokens)
        self.duplicated += len(seen.indices) - len(set(seen.indices))
        self._ending(name, seen)
        self._compare_tokens(name, seen, expected)
        if not seen.left and seen.ended == expected.finish_reason:
            self._compare_text(name, seen, expected)

    def _ending(self, name: str, seen: Seen) -> None:
        if seen.left:
            self.cancelled += 1
        elif seen.ended is None:
            self.unended += 1
            self._example(f"{name}: never ended")
        elif seen.ended.startswith("failed"):
            self.failed += 1
            self._example(f"{name}: {seen.ended}")
        else:
            self.completed += 1

    def _compare_tokens(self, name: str, seen: Seen, expected: Answer) -> None:
        wrong = [
            index
            for index, token in zip(seen.indices, seen.tokens, strict=True)
            if index >= len(expected.tokens) or token != expected.tokens[index]
        ]
        self.mismatched += len(wrong)
        if wrong:
            self._example(f"{name}: token {wrong[0]} differs from the reference")
        # A client that left or was told of a failure has no claim to the rest.
        complete = not seen.left and seen.ended is not None and not seen.ended.startswith("failed")
        claim = len(expected.tokens) if complete else max(seen.indices, default=-1) + 1
        missing = len(set(range(claim)) - set(seen.indices))
        self.lost += missing
        if missing:
            self._example(f"{name}: {missing} tokens missing")
        if complete and seen.ended != expected.finish_reason:
            self.mismatched += 1
            self._example(f"{name}: ended {seen.ended}, reference {expected.finish_reason}")

    def _compare_text(self, name: str, seen: Seen, expected: Answer) -> None:
        pairs: Sequence[tuple[str, object, object]] = (
            ("content", seen.content, expected.content),
            ("reasoning", seen.reasoning, expected.reasoning),
            ("tool_calls", joined_calls(seen.tool_calls), joined_calls(expected.tool_calls)),
        )
        for what, found, wanted in pairs:
            if found != wanted:
                self.mismatched += 1
                self._example(f"{name}: {what} differs: {found!r} != {wanted!r}")

    def _example(self, text: str) -> None:
        if len(self.examples) < 10:
            self.examples.append(text)


def judge(
    answers: Iterable[tuple[str, RequestSpec, Seen]], model: ModelResources, tell: Progress
) -> Verdict:
    """Hold each `(name, spec, seen)` against what the reference answers."""
    verdict = Verdict()
    reference = Reference(model.engine())
    answers = list(answers)
    for name, spec, seen in answers:
        verdict.add(name, seen, expected_answer(spec, reference, model.tokenizer))
        tell("reference", verdict.requests, len(answers))
    return verdict


def joined_calls(pieces: Sequence[ToolCallPiece]) -> list[tuple[str | None, str]]:
    """Name and arguments of each call, however they were cut; ids differ from run to run."""
    calls: dict[int, tuple[str | None, str]] = {}
    for piece in pieces:
        name, arguments = calls.get(piece.index, (None, ""))
        calls[piece.index] = (piece.name or name, arguments + piece.arguments)
    return [calls[index] for index in sorted(calls)]
