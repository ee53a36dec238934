"""From a checked body to requests the pod can run: tokenised, within the limits, one per choice.

    body --template, tokenizer--> prompt ids --limits--> budget --sampling--> one spec per choice

Everything that can be refused is refused here, before any die is touched. Prompts that cannot fit
are refused by their length in bytes already: tokenising a megabyte takes half a second of the loop
that also answers heartbeats. Called by the HTTP edge, once per request.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import numpy as np

from libs import units
from libs.config.topology import LimitsSection
from libs.errors import BadInput, ModelNotFound
from libs.ids import choice_id
from libs.model.resources import ModelResources
from libs.model.sampling import SamplingParams, derive_seed
from libs.wire.request import OutputOptions, RequestSpec
from services.gateway.schemas import (
    ChatBody,
    CompletionBody,
    GenerationBody,
    bad,
    logit_bias_of,
    shortened,
    stops_of,
)

#: The strongest bias the API knows; with it the token is not chosen.
_BANNED = -100.0


class ContextLengthExceeded(BadInput):
    """The prompt, or prompt and answer together, are longer than the model's context."""

    code: ClassVar[str] = "context_length_exceeded"


@dataclass(frozen=True, slots=True)
class Arrival:
    """A request at the door: the id we give it, its time on the emulated timeline, its API key."""

    request_id: str
    at_ns: int
    created_s: int
    api_key: str = ""


@dataclass(frozen=True, slots=True, eq=False)
class Ask:
    """One admitted HTTP request: its choices, and how the client wants to see them.

    `specs` holds the choices of the first prompt, then those of the second, and so on;
    `choices_per_prompt` is the client's `n`.
    """

    arrival: Arrival
    chat: bool
    model: str
    specs: tuple[RequestSpec, ...]
    choices_per_prompt: int
    stream: bool
    include_usage: bool
    return_token_ids: bool

    @property
    def prompt_tokens(self) -> int:
        """Tokens of all prompts, each counted once however many choices it has."""
        return sum(spec.prompt_tokens for spec in self.specs[:: self.choices_per_prompt])


@dataclass(frozen=True, slots=True)
class _Prompt:
    """One prompt as tokens, and whether it ends inside a reasoning block."""

    ids: list[int]
    reasoning_open: bool = False


class Admission:
    """What this gateway admits: one model, the topology's limits."""

    def __init__(self, model: ModelResources, limits: LimitsSection, gateway: str) -> None:
        self.model = model
        self.limits = limits
        self._gateway = gateway
        tokenizer = model.tokenizer
        longest = max(len(tokenizer.token_bytes(token)) for token in range(tokenizer.vocab_size))
        self._bytes_per_token_max = max(1, longest)

    def require_model(self, name: str) -> None:
        """Raise `ModelNotFound` unless `name` is served here."""
        if name != self.model.name:
            raise ModelNotFound(
                f"model: {shortened(name)!r} is not served here; there is {self.model.name!r}"
            )

    def chat(self, body: ChatBody, arrival: Arrival) -> Ask:
        """Admit a conversation."""
        self._require_few_choices(body, 1)
        self._refuse_long_messages(body.messages)
        rendered = self.model.template.render(
            body.messages, tools=body.tools, thinking=body.thinking
        )
        alternatives = (body.top_logprobs or 0) if body.logprobs else -1
        sampling = self._sampling(body, alternatives)
        if body.tools_forbidden:
            # The model may know its tools by heart: not showing them would not be enough.
            sampling = self._without_tool_calls(sampling)
        prompt = _Prompt(list(rendered.ids), rendered.reasoning_open)
        wanted = body.max_completion_tokens or body.max_tokens
        field = "max_completion_tokens" if body.max_completion_tokens else "max_tokens"
        budgets = [self._budget(prompt, "messages", wanted, field)]
        return self._ask(body, arrival, [prompt], budgets, sampling)

    def completion(self, body: CompletionBody, arrival: Arrival) -> Ask:
        """Admit one or several plain prompts."""
        sampling = self._sampling(body, -1 if body.logprobs is None else body.logprobs)
        paths = _prompt_paths(body.prompt)
        self._require_few_choices(body, len(paths))
        prompts = [_Prompt(self._plain_ids(value, path)) for path, value in paths]
        budgets = [
            self._budget(prompt, path, body.max_tokens, "max_tokens")
            for prompt, (path, _) in zip(prompts, paths, strict=True)
        ]
        return self._ask(body, arrival, prompts, budgets, sampling)

    # ------------------------------------------------------------ prompts

    def _plain_ids(self, value: object, path: str) -> list[int]:
        """Ids of one plain prompt: text gets a begin token, ids are taken as they are."""
        if isinstance(value, str):
            self._refuse_long_text(len(value.encode("utf-8", "surrogatepass")), path)
            tokenizer = self.model.tokenizer
            begin = [tokenizer.control.bos] if tokenizer.control.bos >= 0 else []
            return begin + tokenizer.encode(value, field=path)
        vocab_size = self.model.args.vocab_size
        assert isinstance(value, list), "what is neither text nor ids was refused before"
        for index, token in enumerate(value):
            if not _is_token(token) or not 0 <= token < vocab_size:
                raise bad(f"{path}[{index}]", f"must be a token id from 0 to {vocab_size - 1}")
        return list(value)

    def _refuse_long_messages(self, messages: object) -> None:
        """Texts that the template copies into the prompt as they are: the users' own."""
        if not isinstance(messages, list):
            return  # the template says what is wrong
        contents = [
            message.get("content")
            for message in messages
            if isinstance(message, dict) and message.get("role") == "user"
        ]
        texts = [content for content in contents if isinstance(content, str)]
        nbytes = sum(len(text.encode("utf-8", "surrogatepass")) for text in texts)
        self._refuse_long_text(nbytes, "messages")

    def _refuse_long_text(self, nbytes: int, path: str) -> None:
        at_least = nbytes // self._bytes_per_token_max
        if at_least > self.limits.prompt_max_tokens:
            raise self._too_long(path, f"at least {at_least}")

    def _too_long(self, path: str, found: str) -> ContextLengthExceeded:
        limit = self.limits.prompt_max_tokens
        message = f"{path}: the prompt has {found} tokens, the limit is {limit}"
        return ContextLengthExceeded(message, field=path)

    # ------------------------------------------------------------ budget

    def _require_few_choices(self, body: GenerationBody, prompts: int) -> None:
        limit, per_prompt = self.limits.choices_max, body.n or 1
        if per_prompt > limit:
            raise bad("n", f"must be at most {limit}")
        if prompts * per_prompt > limit:
            raise bad("prompt", f"{prompts} prompts times n must not exceed {limit} choices")

    def _budget(self, prompt: _Prompt, path: str, wanted: int | None, field: str) -> int:
        """Output tokens of one choice; raises `BadInput` naming prompt or `field`."""
        limits, found = self.limits, len(prompt.ids)
        if found == 0:
            raise bad(path, "must hold at least one token")
        if found > limits.prompt_max_tokens:
            raise self._too_long(path, str(found))
        room = limits.context_max_tokens - found
        assert room >= 1, "the topology keeps prompts below the context"
        if wanted is None:
            return min(limits.output_default_tokens, room)
        if wanted > limits.output_max_tokens:
            raise bad(field, f"must be at most {limits.output_max_tokens}, not {wanted}")
        if wanted > room:
            message = (
                f"{path}: this model's maximum context length is {limits.context_max_tokens} "
                f"tokens, but {found + wanted} were requested ({found} in the prompt, {wanted} "
                "for the answer); shorten either"
            )
            raise ContextLengthExceeded(message, field=path)
        return wanted

    # ------------------------------------------------------------ sampling

    def _sampling(self, body: GenerationBody, alternatives: int) -> SamplingParams:
        """Sampling parameters without a seed of ours; raises `BadInput` naming the field."""
        eos = self.model.tokenizer.control.eos
        ends = ([eos] if eos >= 0 else []) + (body.stop_token_ids or [])
        given = {
            name: value
            for name in (
                "temperature", "top_p", "top_k", "seed", "presence_penalty", "frequency_penalty",
                "repetition_penalty", "min_tokens", "ignore_eos",
            )
            if (value := getattr(body, name)) is not None
        }  # fmt: skip
        if given.get("top_k") == -1:  # how vLLM's clients say "no limit"
            del given["top_k"]
        sampling = SamplingParams(
            **given,
            logprobs=alternatives,
            logit_bias=logit_bias_of(body.logit_bias),
            stop_token_ids=tuple(dict.fromkeys(ends)),
        )
        try:
            sampling.validate(self.model.args.vocab_size)
        except BadInput as error:
            if error.field == "top_logprobs" and isinstance(body, CompletionBody):
                problem = error.message.removeprefix("top_logprobs ")
                raise bad("logprobs", problem) from None
            raise
        return sampling

    def _without_tool_calls(self, sampling: SamplingParams) -> SamplingParams:
        control = self.model.tokenizer.control
        banned = {
            token: _BANNED
            for token in (control.tool_calls_open, control.tool_call_open)
            if token >= 0
        }
        bias = dict(sampling.logit_bias) | banned
        return replace(sampling, logit_bias=tuple(sorted(bias.items())))

    # ------------------------------------------------------------ specs

    def _ask(
        self,
        body: GenerationBody,
        arrival: Arrival,
        prompts: list[_Prompt],
        budgets: list[int],
        sampling: SamplingParams,
    ) -> Ask:
        stops, per_prompt = stops_of(body.stop), body.n or 1
        chat = isinstance(body, ChatBody)
        specs: list[RequestSpec] = []
        for prompt, max_tokens in zip(prompts, budgets, strict=True):
            if sampling.min_tokens > max_tokens:
                raise bad("min_tokens", f"must be at most max_tokens, which is {max_tokens}")
            ids = np.asarray(prompt.ids, np.int32)
            output = OutputOptions(
                raw=not chat,
                reasoning_open=prompt.reasoning_open,
                stops=stops,
                logprobs=sampling.logprobs >= 0,
            )
            # A seed is drawn per prompt: choices differ by their number, prompts by their seed.
            seeded = sampling.with_seed(derive_seed(choice_id(arrival.request_id, len(specs))))
            specs += [
                RequestSpec(
                    request_id=choice_id(arrival.request_id, len(specs) + choice),
                    choice=choice,
                    prompt_ids=ids,
                    sampling=seeded,
                    max_tokens=max_tokens,
                    output=output,
                    gateway=self._gateway,
                    submitted_at_ns=arrival.at_ns,
                    budget_ns=units.s(self.limits.request_timeout_s),
                    cache_salt=cache_salt_of(arrival.api_key, body.cache_salt or ""),
                )
                for choice in range(per_prompt)
            ]
        options = body.stream_options
        return Ask(
            arrival=arrival,
            chat=chat,
            model=self.model.name,
            specs=tuple(specs),
            choices_per_prompt=per_prompt,
            stream=bool(body.stream),
            include_usage=bool(options and options.include_usage),
            return_token_ids=bool(body.return_token_ids),
        )


def cache_salt_of(api_key: str, given: str) -> str:
    """What keeps tenants apart in the prefix cache: a digest of API key and the client's own salt.

    How fast a prompt is answered tells whether its prefix is cached, so nobody may share KV with a
    stranger. A digest, because neither belongs on the bus or in a log; empty when both are.
    """
    if not api_key and not given:
        return ""
    parts = (part.encode("utf-8", "surrogateescape") for part in (api_key, given))
    digests = b"".join(hashlib.blake2b(part).digest() for part in parts)
    return hashlib.blake2b(digests, digest_size=16).hexdigest()


def _is_token(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _prompt_paths(prompt: Any) -> list[tuple[str, Any]]:
    """Each prompt with its path; raises `BadInput` for what is neither text nor ids."""
    if isinstance(prompt, str):
        return [("prompt", prompt)]
    if not isinstance(prompt, list) or not prompt:
        raise bad("prompt", "must be a string, an array of strings or (arrays of) token ids")
    if _is_token(prompt[0]):
        return [("prompt", prompt)]
    kind = type(prompt[0])
    for index, item in enumerate(prompt):
        if kind not in (str, list) or type(item) is not kind:
            raise bad(
                f"prompt[{index}]", "must be a string or an array of token ids, like the rest"
            )
    return [(f"prompt[{index}]", item) for index, item in enumerate(prompt)]
