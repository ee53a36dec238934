"""From generated tokens to what an OpenAI client sees: reasoning, content, calls, finish reason.

Control tokens move the parser between five states; ordinary tokens add text to the state's channel.
A control token that means nothing in a state is passed over.

    REASONING --</think>--> CONTENT --<think>--> REASONING
    any state --calls begin--> BETWEEN_CALLS --call begin--> CALL_NAME --sep--> CALL_ARGUMENTS
    CALL_* --call end--> BETWEEN_CALLS --calls end--> CONTENT

Promises
- Deltas belong to token indices: the same tokens give the same delta at each index in every
  process, so that a stream served twice can be merged by index.
- Every character of ordinary tokens reaches the client once, save a stop string with what follows
  it and white space around tool calls. Nothing is retracted.
- A tool call is delivered whole, when its end is seen and its arguments are a JSON object: a piece
  with id and name, then a piece with the arguments. Anything less (cut off, malformed) has not been
  shown to anybody as a call yet, and becomes content.
- Stop strings end the answer: they are looked for in content, in neither thoughts nor arguments.

The state is plain data and can be pickled or copied between any two tokens. Called by the output
process of each DP group, one parser per stream.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from enum import Enum, auto

from libs.model.chat_input import FUNCTION_NAME, parse_json_object
from libs.model.stop_strings import StopFilter
from libs.model.tokenizer import IncrementalDetokenizer, Tokenizer


@dataclass(frozen=True, slots=True)
class ToolCallPiece:
    """One streamed piece of tool call `index`: `call_id` and `name` first, then `arguments`."""

    index: int
    call_id: str | None
    name: str | None
    arguments: str


@dataclass(frozen=True, slots=True)
class Delta:
    """What one token adds to the client's view; `finish_reason` is set once, on the last one.

    `stop_matched` says that a stop string ended the text here and no further token is wanted.
    """

    content: str = ""
    reasoning: str = ""
    tool_calls: tuple[ToolCallPiece, ...] = ()
    finish_reason: str | None = None
    stop_matched: bool = False


class _State(Enum):
    CONTENT = auto()
    REASONING = auto()
    BETWEEN_CALLS = auto()
    CALL_NAME = auto()
    CALL_ARGUMENTS = auto()


_ANYWHERE = frozenset(_State)
_IN_CALLS = frozenset({_State.BETWEEN_CALLS, _State.CALL_NAME, _State.CALL_ARGUMENTS})

_MOVES = {
    "think_open": (frozenset({_State.CONTENT}), _State.REASONING),
    "think_close": (frozenset({_State.REASONING}), _State.CONTENT),
    "tool_calls_open": (_ANYWHERE, _State.BETWEEN_CALLS),
    "tool_call_open": (_ANYWHERE, _State.CALL_NAME),
    "tool_separator": (frozenset({_State.CALL_NAME}), _State.CALL_ARGUMENTS),
    "tool_call_close": (_IN_CALLS, _State.BETWEEN_CALLS),
    "tool_calls_close": (_IN_CALLS, _State.CONTENT),
}
"""Control token (field of `ControlIds`) -> the states in which it acts, and where it leads."""


@dataclass(slots=True)
class _Pieces:
    """A delta in the making."""

    content: str = ""
    reasoning: str = ""
    tool_calls: list[ToolCallPiece] = field(default_factory=list)


class OutputParser:
    """Parses the stream of one choice; `request_id` (of that choice) names its tool calls.

    `raw` (the completions API) makes everything content. `reasoning_open` says that the prompt ends
    inside a reasoning block.
    """

    __slots__ = (
        "_calls", "_detokenizer", "_finished", "_name", "_raw", "_request_id",
        "_state", "_stops", "_text", "_tokenizer",
    )  # fmt: skip

    def __init__(
        self,
        tokenizer: Tokenizer,
        request_id: str,
        *,
        raw: bool = False,
        reasoning_open: bool = False,
        stops: Sequence[str] = (),
    ) -> None:
        self._tokenizer = tokenizer
        self._detokenizer = IncrementalDetokenizer(tokenizer)
        self._request_id = request_id
        self._raw = raw
        self._state = _State.REASONING if reasoning_open and not raw else _State.CONTENT
        self._stops = StopFilter(stops)
        self._text = ""  # undecided text of the three tool-call states
        self._name = ""  # what stood before the separator
        self._calls = 0
        self._finished = False

    def push(self, token: int, last: bool, finish: str | None) -> Delta:
        """Take the next token; `finish` is why generation ended and comes with the `last` token.

        A finish of `stop` becomes `tool_calls` when there were any. After the last token or a stop
        string all deltas are empty.
        """
        assert last == (finish is not None), (last, finish)
        if self._finished:
            return Delta()
        pieces = _Pieces()
        self._add(self._detokenizer.push(token), pieces)
        if not self._raw and self._tokenizer.is_control(token):
            self._move(token, pieces)
        if last:
            self._add(self._detokenizer.flush(), pieces)
            self._leave(pieces)
        matched = self._stops.matched
        self._finished = last or matched
        if matched:
            finish = "stop"
        elif finish == "stop" and self._calls > 0:
            finish = "tool_calls"
        return Delta(pieces.content, pieces.reasoning, tuple(pieces.tool_calls), finish, matched)

    def _add(self, text: str, pieces: _Pieces) -> None:
        """Put ordinary text where the state says."""
        match self._state:
            case _State.CONTENT:
                pieces.content += self._stops.push(text)
            case _State.REASONING:
                pieces.reasoning += text
            case _State.BETWEEN_CALLS | _State.CALL_NAME | _State.CALL_ARGUMENTS:
                self._text += text
            case _:
                raise AssertionError(self._state)

    def _move(self, token: int, pieces: _Pieces) -> None:
        """Follow a control token to the next state."""
        for name, (sources, target) in _MOVES.items():
            if token != getattr(self._tokenizer.control, name) or self._state not in sources:
                continue
            if target is _State.CALL_ARGUMENTS:
                self._name, self._text = self._text, ""
            else:
                self._leave(pieces)
            self._state = target
            return

    def _leave(self, pieces: _Pieces) -> None:
        """Decide what the state has held back."""
        text, self._text = self._text, ""
        name, self._name = self._name, ""
        match self._state:
            case _State.CONTENT:
                pieces.content += self._stops.flush()
            case _State.REASONING:
                assert not text, text
            case _State.BETWEEN_CALLS:
                self._add_late(text if text.strip() else "", pieces)
            case _State.CALL_NAME:
                self._add_late(text, pieces)
            case _State.CALL_ARGUMENTS:
                call_name = name.strip()
                if FUNCTION_NAME.fullmatch(call_name) and parse_json_object(text) is not None:
                    self._add_call(call_name, text, pieces)
                else:
                    self._add_late(name + text, pieces)
            case _:
                raise AssertionError(self._state)

    def _add_late(self, text: str, pieces: _Pieces) -> None:
        """Content that was taken for part of a tool call until now."""
        pieces.content += self._stops.push(text)
        pieces.content += self._stops.flush()

    def _add_call(self, name: str, arguments: str, pieces: _Pieces) -> None:
        index = self._calls
        self._calls += 1
        call_id = tool_call_id(self._request_id, index)
        pieces.tool_calls.append(ToolCallPiece(index, call_id, name, ""))
        pieces.tool_calls.append(ToolCallPiece(index, None, None, arguments))


def tool_call_id(request_id: str, index: int) -> str:
    """The id of tool call `index`; whoever serves the request arrives at the same one."""
    digest = hashlib.blake2b(f"{request_id}/{index}".encode(), digest_size=12, person=b"xds-call")
    return f"call_{digest.hexdigest()}"


def joined(deltas: Iterable[Delta]) -> Delta:
    """All `deltas` of a stream as one, each tool call in one piece: the non-streaming answer."""
    content, reasoning, finish, matched = "", "", None, False
    calls: dict[int, ToolCallPiece] = {}
    for delta in deltas:
        assert finish is None or delta == Delta(), "text after the end of the stream"
        content += delta.content
        reasoning += delta.reasoning
        finish = finish or delta.finish_reason
        matched = matched or delta.stop_matched
        for piece in delta.tool_calls:
            known = calls.get(piece.index, piece)
            arguments = piece.arguments if known is piece else known.arguments + piece.arguments
            calls[piece.index] = ToolCallPiece(piece.index, known.call_id, known.name, arguments)
    return Delta(content, reasoning, tuple(calls.values()), finish, matched)
