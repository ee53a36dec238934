"""The JSON bodies of the two generation endpoints, checked before anything else looks at them.

A field of a body is one of three kinds.
- *Used*: typed below. Scalars are strict (`"5"` is no number, `true` no integer), `null` is the
  same as absent. Ranges of sampling parameters are checked where they are used, by
  `SamplingParams.validate`; conversations and tools by the chat template.
- *Refused*: it would change the answer and cannot be honoured here, so it is refused by name,
  unless its value asks for what happens anyway.
- *Ignored*: everything else (`user`, `metadata`, `store`, fields of APIs to come), as OpenAI does.

Every error is a `BadInput` whose `field` is the path that OpenAI clients know as `param`.
"""

from __future__ import annotations

import json
from typing import Annotated, Any, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from libs.errors import BadInput
from libs.model.tokenizer import require_unicode

STOPS_MAX = 4
STOP_CHARS_MAX = 1000
#: The wire carries at most 4,096 items in one field; no honest client is near this.
LOGIT_BIAS_MAX = 1024
STOP_TOKENS_MAX = 64
CACHE_SALT_MAX_CHARS = 256
#: Longest piece of a client's own text that an error message repeats.
ECHO_MAX_CHARS = 80


class _Body(BaseModel):
    model_config = ConfigDict(strict=True, frozen=True, extra="ignore")


class StreamOptions(_Body):
    """What a stream says beside the text."""

    include_usage: bool | None = None


class TemplateKwargs(_Body):
    """Arguments of the chat template; `thinking` asks for a reasoning block."""

    model_config = ConfigDict(strict=True, frozen=True, extra="forbid")

    thinking: bool | None = None


class GenerationBody(_Body):
    """What both endpoints share. Values of `Any` are checked by `stops_of` and its neighbours."""

    model: str
    max_tokens: Annotated[int, Field(ge=1)] | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    n: Annotated[int, Field(ge=1)] | None = None
    stop: Any = None
    stop_token_ids: Annotated[list[int], Field(max_length=STOP_TOKENS_MAX)] | None = None
    seed: int | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    logit_bias: Annotated[dict[str, float], Field(max_length=LOGIT_BIAS_MAX)] | None = None
    min_tokens: int | None = None
    ignore_eos: bool | None = None
    return_token_ids: bool | None = None
    cache_salt: Annotated[str, Field(min_length=1, max_length=CACHE_SALT_MAX_CHARS)] | None = None


class ChatBody(GenerationBody):
    """`POST /v1/chat/completions`."""

    messages: Any
    max_completion_tokens: Annotated[int, Field(ge=1)] | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0)] | None = None
    tools: Any = None
    tool_choice: Any = None
    reasoning_effort: Literal["none", "minimal", "low", "medium", "high", "xhigh"] | None = None
    chat_template_kwargs: TemplateKwargs | None = None

    @property
    def thinking(self) -> bool:
        """Whether the answer begins with a reasoning block; it does unless told otherwise.

        `chat_template_kwargs.thinking` decides; without it `reasoning_effort` "none" says no.
        """
        if self.chat_template_kwargs and self.chat_template_kwargs.thinking is not None:
            return self.chat_template_kwargs.thinking
        return self.reasoning_effort != "none"

    @property
    def tools_forbidden(self) -> bool:
        """Whether the client explicitly wants no tool to be called."""
        return isinstance(self.tool_choice, str) and self.tool_choice == "none"


class CompletionBody(GenerationBody):
    """`POST /v1/completions`."""

    prompt: Any
    logprobs: Annotated[int, Field(ge=0)] | None = None


AnyBody = TypeVar("AnyBody", bound=GenerationBody)

#: Refused fields with the values that change nothing; null never does.
_REFUSED: dict[str, tuple[object, ...]] = {
    "add_generation_prompt": (True,),
    "allowed_token_ids": (),
    "audio": (),
    "bad_words": ([],),
    "chat_template": (),
    "continue_final_message": (False,),
    "documents": ([],),
    "function_call": ("none",),
    "functions": ([],),
    "guided_choice": (),
    "guided_grammar": (),
    "guided_json": (),
    "guided_regex": (),
    "include_stop_str_in_output": (False,),
    "length_penalty": (1, 1.0),
    "min_p": (0, 0.0),
    "modalities": (["text"],),
    "prompt_embeds": (),
    "prompt_logprobs": (),
    "response_format": ({"type": "text"},),
    "skip_special_tokens": (True,),
    "spaces_between_special_tokens": (True,),
    "structured_outputs": (),
    "truncate_prompt_tokens": (),
    "typical_p": (1, 1.0),
    "use_beam_search": (False,),
    "web_search_options": (),
}
_REFUSED_IN_COMPLETIONS: dict[str, tuple[object, ...]] = {"echo": (False,), "suffix": ("",)}


def parse_json_body(data: bytes) -> dict[str, Any]:
    """The JSON object in `data`; raises `BadInput`, which names no field: there is none yet."""

    def refuse(constant: str) -> None:
        raise ValueError(f"{constant} is not JSON")

    try:
        value = json.loads(data.decode("utf-8"), parse_constant=refuse)
    except UnicodeDecodeError as error:
        raise BadInput(f"the body is not UTF-8: byte {error.start}") from None
    except (ValueError, RecursionError) as error:
        raise BadInput(f"the body is not valid JSON: {shortened(str(error))}") from None
    if not isinstance(value, dict):
        raise BadInput(f"the body must be a JSON object, not {_kind(value)}")
    return value


def parse_chat(raw: dict[str, Any]) -> ChatBody:
    """Check a chat body."""
    _refuse_unsupported(raw, _REFUSED)
    body = _validated(ChatBody, raw)
    _check_common(body)
    _check_tools(body, raw)
    both = (body.max_tokens, body.max_completion_tokens)
    if None not in both and both[0] != both[1]:
        raise bad("max_tokens", "contradicts max_completion_tokens; give one of them")
    if body.top_logprobs is not None and not body.logprobs:
        raise bad("top_logprobs", "needs logprobs to be true")
    return body


def parse_completion(raw: dict[str, Any]) -> CompletionBody:
    """Check a completion body."""
    _refuse_unsupported(raw, _REFUSED | _REFUSED_IN_COMPLETIONS)
    body = _validated(CompletionBody, raw)
    _check_common(body)
    if raw.get("best_of") not in (None, body.n or 1):
        raise bad("best_of", "only the value of n is supported: every choice is returned")
    return body


def stops_of(stop: object) -> tuple[str, ...]:
    """The stop strings: one, or a list of up to four; none of them empty."""
    if stop is None:
        return ()
    given = [stop] if isinstance(stop, str) else stop
    if not isinstance(given, list) or len(given) > STOPS_MAX:
        raise bad("stop", f"must be a string or an array of up to {STOPS_MAX} strings")
    for index, text in enumerate(given):
        path = "stop" if isinstance(stop, str) else f"stop[{index}]"
        if not isinstance(text, str) or not 0 < len(text) <= STOP_CHARS_MAX:
            raise bad(path, f"must be a string of 1 to {STOP_CHARS_MAX} characters")
        require_unicode(text, path)
    return tuple(given)


def logit_bias_of(bias: dict[str, float] | None) -> tuple[tuple[int, float], ...]:
    """Pairs of token id and bias, ascending by id."""
    pairs: dict[int, float] = {}
    for key, value in (bias or {}).items():
        if not (key.isascii() and key.isdigit() and len(key) <= 10):
            raise bad("logit_bias", f"{shortened(key)!r} is not a token id")
        pairs[int(key)] = float(value)
    return tuple(sorted(pairs.items()))


def bad(field: str, problem: str) -> BadInput:
    """The error of one field."""
    return BadInput(f"{field}: {problem}", field=field)


def shortened(text: str) -> str:
    """A client's text, short enough to be repeated to it."""
    return text if len(text) <= ECHO_MAX_CHARS else text[:ECHO_MAX_CHARS] + "…"


def _refuse_unsupported(raw: dict[str, Any], refused: dict[str, tuple[object, ...]]) -> None:
    for field, harmless in refused.items():
        value = raw.get(field)
        # True == 1 in Python, not in JSON.
        same = (type(value) is type(item) and value == item for item in harmless)
        if value is not None and not any(same):
            raise bad(field, "is not supported here and would change the answer; leave it out")


def _validated(kind: type[AnyBody], raw: dict[str, Any]) -> AnyBody:
    try:
        return kind.model_validate(raw)
    except ValidationError as error:
        first = error.errors(include_url=False, include_context=False)[0]
        path = _path(first["loc"])
        problem = "is required" if first["type"] == "missing" else _problem(first["msg"])
        raise bad(path, problem) from None


def _problem(message: str) -> str:
    problem = message.removeprefix("Input should be ").removeprefix("Value error, ")
    return problem if problem == message else f"must be {problem}"


def _path(location: tuple[int | str, ...]) -> str:
    """`("messages", 1, "content")` as `messages[1].content`."""
    path = ""
    for part in location:
        path += f"[{part}]" if isinstance(part, int) else f".{shortened(part)}"
    return path.removeprefix(".")


def _check_common(body: GenerationBody) -> None:
    stops_of(body.stop)
    logit_bias_of(body.logit_bias)
    require_unicode(body.cache_salt or "", "cache_salt")
    if body.stream_options is not None and not body.stream:
        raise bad("stream_options", "is only allowed when stream is true")


def _check_tools(body: ChatBody, raw: dict[str, Any]) -> None:
    choice = body.tool_choice
    if choice not in (None, "auto", "none"):
        raise bad("tool_choice", 'only "auto" and "none" are supported: no call can be forced')
    if choice == "auto" and not body.tools:
        raise bad("tool_choice", "is only allowed when tools are given")
    if body.tools and raw.get("parallel_tool_calls") is False:
        raise bad("parallel_tool_calls", "cannot be switched off: the model decides how many")


def _kind(value: object) -> str:
    match value:
        case None:
            return "null"
        case bool():
            return "a boolean"
        case int() | float():
            return "a number"
        case str():
            return "a string"
        case list():
            return "an array"
        case _:
            raise AssertionError(f"not JSON: {type(value)}")
