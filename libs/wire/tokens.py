"""Committed tokens on their way to the client, around the TE-shell (output shortcutting, P056).

    DP master --OpenStream, TokensCommitted--> output process --StreamChunks--> gateway
    DP master <--------------StopMatched-------- output process

A token leaves its DP group only after its iteration is committed. Chunks are numbered by token
index; the index is the commit point in the client's view: prefill and decode both deliver index
0, and the gateway keeps one.
"""

from __future__ import annotations

from dataclasses import dataclass

from libs.model.output_parser import ToolCallPiece
from libs.wire.registry import Limit, message
from libs.wire.request import OutputOptions, PrefillTiming


@dataclass(frozen=True, slots=True)
class RequestTiming:
    """Where the request's time went on the emulated timeline, and which dies served it.

    The decode fields are empty when the first token already ended the request.
    """

    prefill: PrefillTiming
    decode_te: str = ""
    decode_dp: str = ""
    expert_dies: tuple[int, ...] = ()
    kv_bytes: int = 0
    transfer_started_at_ns: int = 0
    transfer_finished_at_ns: int = 0


@message("open_stream", limit=Limit.TOKEN)
@dataclass(frozen=True, slots=True)
class OpenStream:
    """A request starts to produce tokens here; `dp` is told when a stop string matches.

    It shares a lane with the tokens that follow, so that it cannot be overtaken by them. The stream
    is forgotten after `budget_ns` if nothing ends it before.
    """

    request_id: str
    dp: str
    gateway: str
    output: OutputOptions
    timing: RequestTiming
    budget_ns: int = 600_000_000_000


@dataclass(frozen=True, slots=True)
class TokenRow:
    """One committed token of one request."""

    request_id: str
    index: int
    token: int
    at_ns: int
    finish_reason: str | None
    logprob: float
    top: tuple[tuple[int, float], ...] = ()


@message("tokens_committed", limit=Limit.TOKEN)
@dataclass(frozen=True, slots=True)
class TokensCommitted:
    """The tokens of one committed iteration."""

    dp: str
    iteration: int
    rows: tuple[TokenRow, ...]


@message("close_stream", limit=Limit.TOKEN)
@dataclass(frozen=True, slots=True)
class CloseStream:
    """The request left this DP group without finishing (cancelled or failed): forget its parser."""

    request_id: str


@message("stop_matched")
@dataclass(frozen=True, slots=True)
class StopMatched:
    """A stop string ended the text at token `index`; generate no further."""

    request_id: str
    index: int


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """The text of a token and its log probability, for the `logprobs` fields."""

    token: int
    text: str
    logprob: float


@dataclass(frozen=True, slots=True)
class Chunk:
    """What one token adds to the client's view; texts may be empty while bytes are held back."""

    request_id: str
    index: int
    token: int
    at_ns: int
    content: str
    reasoning: str
    tool_calls: tuple[ToolCallPiece, ...]
    finish_reason: str | None
    chosen: TokenLogprob | None = None
    top: tuple[TokenLogprob, ...] = ()
    timing: RequestTiming | None = None


@message("stream_chunks", limit=Limit.TOKEN)
@dataclass(frozen=True, slots=True)
class StreamChunks:
    """The chunks of one iteration for one gateway."""

    output: str
    chunks: tuple[Chunk, ...]
