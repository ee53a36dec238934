"""A seeded workload: mixed lengths, sampling settings, stop strings and clients that leave.

The same seed gives the same requests in every process, so a simulated pod, a running pod and the
reference can be asked the same things. Times are on the emulated timeline.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, replace

import numpy as np

from libs import units
from libs.model.chat import ChatTemplate
from libs.model.resources import ModelResources
from libs.model.sampling import SamplingParams
from libs.model.tokenizer import Tokenizer
from libs.wire.request import OutputOptions, RequestSpec
from libs.workload.prompts import chat_question, passage

#: Share of clients that leave in mid-stream.
CANCEL_SHARE = 0.12
STOPS = ((".",), (" the",), ("\n", "!"), ("and",))


@dataclass(frozen=True, slots=True)
class ClientRequest:
    """What one client asks: a chat turn (`text` is the question) or a completion (`text` the
    prompt).

    `cancel_after` is the number of tokens after which the client leaves, or None. `earlier` are
    the messages before the question, (role, text); only clients of one `cache_salt` share KV.
    """

    index: int
    chat: bool
    text: str
    thinking: bool
    sampling: SamplingParams
    max_tokens: int
    stops: tuple[str, ...]
    arrive_ns: int
    stream: bool
    cancel_after: int | None
    earlier: tuple[tuple[str, str], ...] = ()
    cache_salt: str = ""


def make_workload(seed: int, requests: int, *, rate_per_s: float = 8.0) -> list[ClientRequest]:
    """`requests` requests arriving as a Poisson process of `rate_per_s`."""
    assert requests >= 0, requests
    rng = random.Random(seed)
    arrive_ns = 0
    made = []
    for index in range(requests):
        arrive_ns += units.s(rng.expovariate(rate_per_s))
        made.append(_make_one(rng, index, arrive_ns))
    return made


def _make_one(rng: random.Random, index: int, arrive_ns: int) -> ClientRequest:
    chat = rng.random() < 0.6
    text = chat_question(rng) if chat else passage(rng, rng.choice((3, 12, 40, 120)))
    sampling = draw_sampling(rng)
    leaves = rng.random() < CANCEL_SHARE
    # A client that leaves must still be there when the tokens come, or it would leave too late.
    max_tokens = rng.choice((24, 32)) if leaves else rng.choice((1, 2, 7, 16, 24, 32))
    return ClientRequest(
        index=index,
        chat=chat,
        text=text,
        thinking=rng.random() < 0.7,
        sampling=sampling,
        max_tokens=max_tokens,
        stops=rng.choice(STOPS) if rng.random() < 0.2 else (),
        arrive_ns=arrive_ns,
        stream=leaves or rng.random() < 0.6,
        cancel_after=rng.randint(1, 6) if leaves else None,
    )


def draw_sampling(rng: random.Random) -> SamplingParams:
    """Greedy for one half; temperature, truncation and penalties for the other."""
    seed = rng.getrandbits(31)
    ignore_eos = rng.random() < 0.2
    if rng.random() < 0.5:
        return SamplingParams(temperature=0.0, seed=seed, ignore_eos=ignore_eos)
    return SamplingParams(
        temperature=rng.choice((0.5, 0.8, 1.2)),
        top_p=rng.choice((1.0, 0.9)),
        top_k=rng.choice((0, 0, 20)),
        seed=seed,
        presence_penalty=rng.choice((0.0, 0.0, 0.5)),
        frequency_penalty=rng.choice((0.0, 0.0, 0.3)),
        ignore_eos=ignore_eos,
    )


def prompt_of(
    request: ClientRequest, tokenizer: Tokenizer, template: ChatTemplate
) -> tuple[list[int], bool]:
    """Prompt ids, and whether the prompt ends inside a reasoning block."""
    if not request.chat:
        return [tokenizer.control.bos, *tokenizer.encode(request.text)], False
    said = (*request.earlier, ("user", request.text))
    messages = [{"role": role, "content": text} for role, text in said]
    prompt = template.render(messages, thinking=request.thinking)
    return list(prompt.ids), prompt.reasoning_open


def spec_of(
    request: ClientRequest, request_id: str, submitted_at_ns: int, model: ModelResources
) -> RequestSpec:
    """The request as the gateway would submit it."""
    prompt, reasoning_open = prompt_of(request, model.tokenizer, model.template)
    sampling = replace(request.sampling, stop_token_ids=(model.tokenizer.control.eos,))
    return RequestSpec(
        request_id=request_id,
        choice=0,
        prompt_ids=np.asarray(prompt, np.int32),
        sampling=sampling,
        max_tokens=request.max_tokens,
        output=OutputOptions(
            raw=not request.chat, reasoning_open=reasoning_open, stops=request.stops
        ),
        gateway="gateway.0",
        submitted_at_ns=submitted_at_ns,
        budget_ns=units.s(300),
        cache_salt=request.cache_salt,
    )
