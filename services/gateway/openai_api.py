"""From chunks to the JSON that OpenAI clients know: stream events and whole answers.

    Chunk --ChatShape or CompletionShape--> `choices[i]` --Renderer--> event or body

The two endpoints differ in how one choice looks (a delta or message with channels, or plain text)
and in how log probabilities are laid out; everything around it is the same. What the pod adds to
OpenAI's objects:
- `xds` beside `choices`, on the event that finishes a choice and on whole answers: who served the
  request and where its emulated time went (with several choices, on each choice as well);
- with `return_token_ids`: `token_ids` on choices, in streams with `token_index` (the index of the
  first of them), and `prompt_token_ids`, beside `choices` for chat and on each choice otherwise.

Pure: no clocks, no sockets. Called by the HTTP edge.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, Protocol

from libs.model.output_parser import Delta, ToolCallPiece, joined
from libs.model.tokenizer import Tokenizer
from libs.wire.tokens import Chunk, TokenLogprob
from services.gateway.admission import Ask
from services.gateway.tally import Tally, usage_of

Json = dict[str, Any]


class Shape(Protocol):
    """How one choice of one endpoint looks."""

    name: str
    event_name: str

    def delta(self, chunk: Chunk, *, first: bool) -> Json:
        """What `chunk` adds, without the common fields; false values only if nothing is added."""
        ...

    def whole(self, chunks: Sequence[Chunk]) -> Json:
        """The whole choice."""
        ...

    def logprobs(self, chunks: Sequence[Chunk], text_chars: int) -> Json | None:
        """Log probabilities of `chunks`, which follow `text_chars` characters of text."""
        ...


class ChatShape:
    """`delta` and `message`."""

    name = "chat.completion"
    event_name = "chat.completion.chunk"

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer

    def delta(self, chunk: Chunk, *, first: bool) -> Json:
        """Channels that got something; the role comes with the first."""
        delta: Json = {}
        if chunk.reasoning:
            delta["reasoning_content"] = chunk.reasoning
        if chunk.content:
            delta["content"] = chunk.content
        if chunk.tool_calls:
            calls = joined([Delta(tool_calls=chunk.tool_calls)]).tool_calls
            delta["tool_calls"] = [{"index": call.index, **_tool_call(call)} for call in calls]
        if first:
            delta = {"role": "assistant", **(delta or {"content": ""})}
        return {"delta": delta}

    def whole(self, chunks: Sequence[Chunk]) -> Json:
        """The message; content is null when tool calls say it all."""
        text = _joined_text(chunks)
        message: Json = {
            "role": "assistant",
            "content": text.content or (None if text.tool_calls else ""),
            "refusal": None,
        }
        if text.reasoning:
            message["reasoning_content"] = text.reasoning
        if text.tool_calls:
            message["tool_calls"] = [_tool_call(call) for call in text.tool_calls]
        return {"message": message}

    def logprobs(self, chunks: Sequence[Chunk], text_chars: int) -> Json | None:
        """One entry per token, thoughts and control tokens included."""
        content = [
            {
                **self._entry(chunk.chosen),
                "top_logprobs": [self._entry(token) for token in chunk.top],
            }
            for chunk in chunks
            if chunk.chosen is not None
        ]
        return {"content": content, "refusal": None} if content else None

    def _entry(self, token: TokenLogprob) -> Json:
        data = self._tokenizer.token_bytes(token.token)
        return {"token": token.text, "logprob": token.logprob, "bytes": list(data) or None}


class CompletionShape:
    """Plain text."""

    name = event_name = "text_completion"

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer

    def delta(self, chunk: Chunk, *, first: bool) -> Json:
        """The text alone."""
        return {"text": chunk.content}

    def whole(self, chunks: Sequence[Chunk]) -> Json:
        """All of the text."""
        return {"text": _joined_text(chunks).content}

    def logprobs(self, chunks: Sequence[Chunk], text_chars: int) -> Json | None:
        """Four parallel arrays; the chosen token is always among its alternatives."""
        tokens: list[str] = []
        values: list[float] = []
        tops: list[dict[str, float]] = []
        offsets: list[int] = []
        for chunk in chunks:
            if chunk.chosen is not None:
                tokens.append(self._name(chunk.chosen))
                values.append(chunk.chosen.logprob)
                tops.append({self._name(t): t.logprob for t in (*chunk.top, chunk.chosen)})
                offsets.append(text_chars)
            text_chars += len(chunk.content)
        if not tokens:
            return None
        return {
            "tokens": tokens,
            "token_logprobs": values,
            "top_logprobs": tops,
            "text_offset": offsets,
        }

    def _name(self, token: TokenLogprob) -> str:
        """The token's text; half characters by their bytes, since many would look the same."""
        if "\ufffd" not in token.text:
            return token.text
        data = self._tokenizer.token_bytes(token.token)
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)


class Renderer:
    """Renders one admitted request."""

    def __init__(self, ask: Ask, tokenizer: Tokenizer) -> None:
        self.ask = ask
        self.tallies = [Tally(spec, tokenizer.control) for spec in ask.specs]
        self._shape: Shape = ChatShape(tokenizer) if ask.chat else CompletionShape(tokenizer)
        self._begun = [False] * len(ask.specs)

    # ------------------------------------------------------------ streams

    def event(self, choice: int, chunk: Chunk, at_ns: int) -> Json | None:
        """The event for the next chunk of `choice`; None when it would say nothing."""
        tally, shape, ask = self.tallies[choice], self._shape, self.ask
        text_chars, token_index = tally.text_chars, tally.tokens
        tally.take(chunk, at_ns)
        adds_text = chunk.content or chunk.reasoning or chunk.tool_calls
        if not (adds_text or chunk.finish_reason or chunk.chosen or ask.return_token_ids):
            return None
        begins, self._begun[choice] = not self._begun[choice], True
        part: Json = {
            "index": choice,
            **shape.delta(chunk, first=begins),
            "logprobs": shape.logprobs([chunk], text_chars),
            "finish_reason": chunk.finish_reason,
        }
        event = self._envelope(shape.event_name, [part])
        if ask.return_token_ids:
            part |= {"token_ids": [chunk.token], "token_index": token_index}
            if begins:
                (event if ask.chat else part)["prompt_token_ids"] = self._prompt_ids(choice)
        if ask.include_usage:
            event["usage"] = None
        account = tally.account()
        if account is not None:
            event["xds"] = account
        return event

    def usage_event(self) -> Json:
        """The event after the last choice, for clients that asked for usage."""
        return self._envelope(self._shape.event_name, []) | {"usage": self._usage()}

    # ------------------------------------------------------------ whole answers

    def body(self, choices: Sequence[Sequence[Chunk]]) -> Json:
        """The whole answer, from the chunks of every choice; their tallies must be complete."""
        assert len(choices) == len(self.tallies), (len(choices), len(self.tallies))
        parts = [self._whole(index, chunks) for index, chunks in enumerate(choices)]
        body = self._envelope(self._shape.name, parts)
        body["usage"] = self._usage()
        if self.ask.return_token_ids and self.ask.chat:
            body["prompt_token_ids"] = self._prompt_ids(0)
        body["xds"] = self.tallies[0].account()
        return body

    def _whole(self, index: int, chunks: Sequence[Chunk]) -> Json:
        tally = self.tallies[index]
        assert tally.finish_reason is not None, "a whole answer has finished"
        part: Json = {
            "index": index,
            **self._shape.whole(chunks),
            "logprobs": self._shape.logprobs(chunks, 0),
            "finish_reason": tally.finish_reason,
        }
        if self.ask.return_token_ids:
            part["token_ids"] = [chunk.token for chunk in chunks]
            if not self.ask.chat:
                part["prompt_token_ids"] = self._prompt_ids(index)
        if len(self.tallies) > 1:
            part["xds"] = tally.account()
        return part

    # ------------------------------------------------------------ common

    def _usage(self) -> Json:
        return usage_of(self.ask.prompt_tokens, self.tallies, self.ask.choices_per_prompt)

    def _envelope(self, name: str, choices: list[Json]) -> Json:
        arrival = self.ask.arrival
        return {
            "id": arrival.request_id,
            "object": name,
            "created": arrival.created_s,
            "model": self.ask.model,
            "choices": choices,
        }

    def _prompt_ids(self, choice: int) -> list[int]:
        ids: list[int] = self.ask.specs[choice].prompt_ids.tolist()
        return ids


def _joined_text(chunks: Iterable[Chunk]) -> Delta:
    return joined(Delta(chunk.content, chunk.reasoning, chunk.tool_calls) for chunk in chunks)


def _tool_call(call: ToolCallPiece) -> Json:
    """A piece of a call; id, type and name are said once, with its first piece."""
    function: Json = {"arguments": call.arguments}
    if call.call_id is None:
        return {"function": function}
    return {
        "id": call.call_id,
        "type": "function",
        "function": {"name": call.name, **function},
    }


def model_object(name: str, created_s: int, context_max_tokens: int) -> Json:
    """One entry of `/v1/models`."""
    return {
        "id": name,
        "object": "model",
        "created": created_s,
        "owned_by": "xdeepserve",
        "max_model_len": context_max_tokens,
    }
