"""The output process of one DP group: detokenise, parse, stream straight to the gateway (P056).

It lives beside the DP master and takes the per-token work off it; the TE-shell sees none of this.
Each request has a parser; the chunk of a token depends on the tokens before it and on nothing
else, so prefill's and decode's processes agree on every chunk they both produce.

A stop string can only be seen here, where there is text: the chunk that completes it ends the
stream, and the DP master is told to stop.
"""

from __future__ import annotations

from dataclasses import dataclass

from libs.actor import (
    CancelTimer,
    Effect,
    Event,
    Received,
    Record,
    Send,
    SetTimer,
    TimerFired,
)
from libs.health.presence import Presence
from libs.model.output_parser import OutputParser
from libs.model.tokenizer import Tokenizer
from libs.scheduling.tombstones import Tombstones
from libs.wire import subjects
from libs.wire.control import MemberState
from libs.wire.request import RequestFailed
from libs.wire.tokens import (
    Chunk,
    CloseStream,
    OpenStream,
    StopMatched,
    StreamChunks,
    TokenLogprob,
    TokenRow,
    TokensCommitted,
)

#: Parsers kept at once; a DP group has fewer requests than this by its own bounds.
STREAMS_MAX = 8192


@dataclass(slots=True)
class Stream:
    """One request's text in the making; `next_index` is the token it waits for."""

    opened: OpenStream
    parser: OutputParser
    next_index: int = 0


class OutputCore:
    """Tokens in, chunks out."""

    def __init__(self, name: str, te: str, tokenizer: Tokenizer) -> None:
        self.name = name
        self.chunks = 0
        self._tokenizer = tokenizer
        self._streams: dict[str, Stream] = {}
        self._ended = Tombstones()
        self._presence = Presence(name, te, self._describe)

    def handle(self, event: Event, now_ns: int) -> list[Effect]:
        """One event."""
        handled = self._presence.handle(event)
        if handled is not None:
            return handled
        match event:
            case Received(message=TokensCommitted() as committed, at_ns=at_ns):
                return self._committed(committed, at_ns)
            case Received(message=OpenStream() as opened):
                return self._open(opened)
            case Received(message=CloseStream(request_id=request_id)):
                closed = self._streams.pop(request_id, None)
                return [] if closed is None else [CancelTimer(request_id)]
            case Received(message=message):
                return [Record("unexpected_message", {"kind": type(message).__name__})]
            case TimerFired(name=request_id):
                self._streams.pop(request_id, None)  # its DP group died, or its end was lost
                return []
            case _:
                raise AssertionError(f"unexpected {event!r}")

    def _open(self, opened: OpenStream) -> list[Effect]:
        if opened.request_id in self._streams or opened.request_id in self._ended:
            return []
        if len(self._streams) >= STREAMS_MAX:
            return [Record("stream_refused", {"request_id": opened.request_id})]
        options = opened.output
        parser = OutputParser(
            self._tokenizer,
            opened.request_id,
            raw=options.raw,
            reasoning_open=options.reasoning_open,
            stops=options.stops,
        )
        self._streams[opened.request_id] = Stream(opened, parser)
        # Longer than any leg may hold the request: only what nobody will ever end is swept.
        return [SetTimer(opened.request_id, 2 * opened.budget_ns)]

    def _committed(self, committed: TokensCommitted, at_ns: int) -> list[Effect]:
        effects: list[Effect] = []
        by_gateway: dict[str, list[Chunk]] = {}
        for row in committed.rows:
            stream = self._streams.get(row.request_id)
            if stream is None or row.index < stream.next_index:
                continue  # ended by a stop string, or a repetition
            if row.index > stream.next_index:
                effects += self._lost(stream, row.index, at_ns)
                continue
            stream.next_index += 1
            chunk, stopped = self._parse(stream, row)
            by_gateway.setdefault(stream.opened.gateway, []).append(chunk)
            if stopped:
                stop = StopMatched(row.request_id, row.index)
                effects.append(Send(subjects.inbox(stream.opened.dp), stop, at_ns))
            if chunk.finish_reason is not None:
                effects += self._end(row.request_id)
        self.chunks += sum(len(chunks) for chunks in by_gateway.values())
        for gateway, chunks in by_gateway.items():
            message = StreamChunks(self.name, tuple(chunks))
            effects.append(Send(subjects.inbox(gateway), message, at_ns))
        return effects

    def _lost(self, stream: Stream, index: int, at_ns: int) -> list[Effect]:
        """A token never came: no later one may be shown, so the client is told at once."""
        request_id = stream.opened.request_id
        reason = f"token {stream.next_index} was lost before token {index}"
        failed = RequestFailed(request_id, "peer_lost", reason, definite=False, stage="stream")
        return [
            Send(subjects.inbox(stream.opened.gateway), failed, at_ns),
            *self._end(request_id),
            Record("tokens_lost", {"request_id": request_id}),
        ]

    def _end(self, request_id: str) -> list[Effect]:
        del self._streams[request_id]
        self._ended.add(request_id)
        return [CancelTimer(request_id)]

    def _parse(self, stream: Stream, row: TokenRow) -> tuple[Chunk, bool]:
        delta = stream.parser.push(row.token, row.finish_reason is not None, row.finish_reason)
        chosen: TokenLogprob | None = None
        top: tuple[TokenLogprob, ...] = ()
        if stream.opened.output.logprobs:
            chosen = self._logprob(row.token, row.logprob)
            top = tuple(self._logprob(token, value) for token, value in row.top)
        ended = delta.finish_reason is not None
        chunk = Chunk(
            row.request_id,
            row.index,
            row.token,
            row.at_ns,
            delta.content,
            delta.reasoning,
            delta.tool_calls,
            delta.finish_reason,
            chosen,
            top,
            stream.opened.timing if ended else None,
        )
        return chunk, delta.stop_matched and row.finish_reason is None

    def _logprob(self, token: int, value: float) -> TokenLogprob:
        return TokenLogprob(token, self._tokenizer.token_text(token), value)

    def _describe(self) -> MemberState:
        return MemberState(self.name, "output", 0, 1, True, "serving", 0, len(self._streams), 0)

    def validate(self) -> None:
        """Streams are bounded and under their own names."""
        assert len(self._streams) <= STREAMS_MAX
        assert all(name == s.opened.request_id for name, s in self._streams.items())
