"""From logits to one token, the same token on every machine.

A token is a function of (logits, parameters, tokens so far, seed, choice, position) and of nothing
else: no generator state is carried from token to token. Whoever recomputes a position, after a
rollback, in another process or while verifying an MTP draft, draws the same token. Three rules make
this true down to the bit:

- Probabilities are integers. Softmax numerators come from the exponential of `libs.model.exact` and
  are rounded to multiples of 2^-40; sums, `top_k`, `top_p` and the draw then happen in integers,
  where order and SIMD width cannot matter.
- Ties go to the lower token id.
- Randomness is a counter. Philox, keyed by (seed, choice), is read at counter = position. Only its
  raw 64-bit output is used, since numpy guarantees that stream and not the methods above it.

Order of operations: `logit_bias`, then the penalties, then the ban on stop tokens before
`min_tokens`, then temperature, `top_k`, `top_p`. Log probabilities are those of the model itself:
log-softmax of the raw logits, before any of the above, as vLLM reports them.

Called by the prefill and decode executors after `Engine.head`, and by the reference.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from libs.errors import BadInput
from libs.model.exact import LOG2_E, exp2_inplace

MAX_LOGPROBS = 20
"""Most alternatives a client may ask for per token (the limit of the OpenAI API)."""

_GREEDY_BELOW = 1e-5
"""Temperatures below this are greedy: the distribution is a single token long before."""

_NUMERATOR_ONE = float(1 << 40)
"""Numerator of the likeliest token; the sum over 2^22 tokens still fits 63 bits."""

_NEGLIGIBLE = -30.0
"""exp(-30) is a tenth of the numerator's last digit, hence zero after rounding."""

# log 2 in two parts: the first has 32 significant bits, so that its multiples are exact.
_LOG_2_HIGH = 0.6931471803691238
_LOG_2_LOW = 1.9082149292705877e-10

_UINT64_MASK = (1 << 64) - 1


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How to choose tokens; plain numbers and tuples, so that it travels field by field.

    `top_k` 0 means no limit. `logprobs` is the number of alternatives to report, -1 for no log
    probabilities at all. `stop_token_ids` end a request (the checkpoint's end-of-sequence among
    them); none of them is chosen before `min_tokens`, and `ignore_eos` runs on through them.
    """

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    seed: int | None = None
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logprobs: int = -1
    min_tokens: int = 0
    ignore_eos: bool = False
    logit_bias: tuple[tuple[int, float], ...] = ()
    stop_token_ids: tuple[int, ...] = ()

    @property
    def is_greedy(self) -> bool:
        """Whether the likeliest token is always taken."""
        return self.temperature < _GREEDY_BELOW or self.top_k == 1

    @property
    def adjusts_logits(self) -> bool:
        """Whether anything but temperature and truncation touches the logits."""
        return (
            self.presence_penalty != 0
            or self.frequency_penalty != 0
            or self.repetition_penalty != 1
            or bool(self.logit_bias)
            or self.min_tokens > 0
        )

    def with_seed(self, seed: int) -> SamplingParams:
        """These parameters with the client's seed, or with `seed` when the client gave none."""
        return self if self.seed is not None else replace(self, seed=seed)

    def ends_with(self, token: int) -> bool:
        """Whether `token` ends the request."""
        return token in self.stop_token_ids and not self.ignore_eos

    def validate(self, vocab_size: int | None = None) -> None:
        """Raise `BadInput` naming the OpenAI field that is out of range.

        With `vocab_size` token ids are held against the vocabulary as well.
        """
        _check_number("temperature", self.temperature, 0, 2)
        _check_number("top_p", self.top_p, 0, 1)
        _check_number("presence_penalty", self.presence_penalty, -2, 2)
        _check_number("frequency_penalty", self.frequency_penalty, -2, 2)
        _check_number("repetition_penalty", self.repetition_penalty, 0.01, 100)
        last_id = (vocab_size or 1 << 31) - 1
        _check_integer("top_k", self.top_k, 0, (1 << 31) - 1)
        _check_integer("top_logprobs", self.logprobs, -1, MAX_LOGPROBS)
        _check_integer("min_tokens", self.min_tokens, 0, (1 << 31) - 1)
        if self.seed is not None:
            _check_integer("seed", self.seed, -(1 << 63), (1 << 63) - 1)
        for token, bias in self.logit_bias:
            _check_integer("logit_bias", token, 0, last_id)
            _check_number(f"logit_bias.{token}", bias, -100, 100)
        for token in self.stop_token_ids:
            _check_integer("stop_token_ids", token, 0, last_id)


@dataclass(frozen=True, slots=True)
class Sampled:
    """The chosen token; `logprob` is 0 and `top` empty unless log probabilities were asked for.

    `top` lists (token, logprob) pairs, likeliest first.
    """

    token: int
    logprob: float = 0.0
    top: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True, slots=True)
class Draw:
    """One row of a batch: everything `sample` needs beside the logits."""

    params: SamplingParams
    history: Sequence[int]
    prompt: Sequence[int]
    position: int
    choice: int = 0


def sample(
    logits: NDArray[np.float32],
    params: SamplingParams,
    history: Sequence[int],
    prompt: Sequence[int],
    position: int,
    choice: int,
) -> Sampled:
    """Choose one token from `logits` [vocab].

    `history` holds the output tokens so far and `prompt` the prompt's; `position` is the index of
    the token in the sequence and must differ between the tokens of one choice.
    """
    assert logits.ndim == 1, logits.shape
    scores: NDArray[np.floating] = logits
    if params.adjusts_logits:
        scores = _adjusted(logits, params, history, prompt)
    token = int(scores.argmax()) if params.is_greedy else _draw(scores, params, position, choice)
    # argmax returns the first NaN, so this one look finds a poisoned row.
    assert math.isfinite(scores[token]), f"logits are not finite at token {token}"
    return _report(logits, token, params.logprobs)


def sample_batch(logits: NDArray[np.float32], draws: Sequence[Draw]) -> list[Sampled]:
    """Choose one token per row of `logits` [batch, vocab]; equal to `sample` row by row."""
    assert logits.shape[0] == len(draws), (logits.shape, len(draws))
    likeliest = logits.argmax(axis=1).tolist() if len(draws) else []
    chosen = []
    for row, draw, best in zip(logits, draws, likeliest, strict=True):
        params = draw.params
        if params.is_greedy and not params.adjusts_logits and params.logprobs < 0:
            assert math.isfinite(row[best]), f"logits are not finite at token {best}"
            chosen.append(Sampled(best))
            continue
        picked = sample(row, params, draw.history, draw.prompt, draw.position, draw.choice)
        chosen.append(picked)
    return chosen


def derive_seed(request_id: str) -> int:
    """A seed in [0, 2^63) for a request whose client gave none; stable across processes."""
    digest = hashlib.blake2b(request_id.encode(), digest_size=8, person=b"xds-seed").digest()
    return int.from_bytes(digest, "big") >> 1


def _adjusted(
    logits: NDArray[np.float32],
    params: SamplingParams,
    history: Sequence[int],
    prompt: Sequence[int],
) -> NDArray[np.float64]:
    """`logits` [vocab] after bias, penalties and bans, in float64.

    Presence and frequency count the output alone, as OpenAI defines them; the repetition penalty
    looks at prompt and output, as Hugging Face defines it.
    """
    scores = logits.astype(np.float64)
    for token, bias in params.logit_bias:
        assert 0 <= token < scores.size, (token, scores.size)
        scores[token] += bias
    if params.repetition_penalty != 1:
        seen = np.unique(np.concatenate([_ids(prompt), _ids(history)]))
        values = scores[seen]
        scores[seen] = np.where(
            values > 0, values / params.repetition_penalty, values * params.repetition_penalty
        )
    if params.presence_penalty != 0 or params.frequency_penalty != 0:
        repeated, counts = np.unique(_ids(history), return_counts=True)
        scores[repeated] -= counts * params.frequency_penalty
        scores[repeated] -= params.presence_penalty
    if len(history) < params.min_tokens:
        scores[_ids(params.stop_token_ids)] = -np.inf
    return scores


def _ids(tokens: Sequence[int]) -> NDArray[np.int64]:
    return np.asarray(tokens, dtype=np.int64)


def _draw(scores: NDArray[np.floating], params: SamplingParams, position: int, choice: int) -> int:
    """Draw a token with probability numerator / sum, exactly, by one 64-bit random word."""
    assert params.seed is not None, "sampling needs a seed: see derive_seed and with_seed"
    numerators = _truncated(_numerators(scores, params.temperature), params)
    cumulative = np.cumsum(numerators)
    total = int(cumulative[-1])
    # Python integers: the product needs up to 126 bits.
    target = (_random_word(params.seed, choice, position) * total) >> 64
    token = int(np.searchsorted(cumulative, target, side="right"))
    assert numerators[token] > 0, (token, target, total)
    return token


def _numerators(scores: NDArray[np.floating], temperature: float) -> NDArray[np.int64]:
    """Integer softmax numerators [vocab]; the likeliest token has 2^40."""
    wide = scores.astype(np.float64)
    highest = float(wide.max())
    assert math.isfinite(highest), f"the largest of {wide.size} logits is {highest}"
    exponents = np.maximum((wide - highest) / temperature, _NEGLIGIBLE)
    weights = exp2_inplace(exponents * LOG2_E)
    numerators: NDArray[np.int64] = np.rint(weights * _NUMERATOR_ONE).astype(np.int64)
    return numerators


def _truncated(numerators: NDArray[np.int64], params: SamplingParams) -> NDArray[np.int64]:
    """`numerators` with everything outside `top_k` and `top_p` set to zero.

    Both rules keep a number of the largest numerators, `top_p` as many as it takes to reach its
    share of what `top_k` left; at least one is kept. Only values are sorted, which no sorting
    algorithm can do in two ways; equal values at the border are kept from the lowest id on.
    """
    unlimited = not 0 < params.top_k < numerators.size
    if unlimited and params.top_p >= 1:
        return numerators
    largest_first = np.sort(numerators)[::-1]
    if not unlimited:
        largest_first = largest_first[: params.top_k]
    keep = largest_first.size
    if params.top_p < 1:
        cumulative = np.cumsum(largest_first)
        share, unit = float(params.top_p).as_integer_ratio()
        wanted = max(1, -(-share * int(cumulative[-1]) // unit))
        keep = int(np.searchsorted(cumulative, wanted, side="left")) + 1
    border = largest_first[keep - 1]
    kept = np.where(numerators > border, numerators, 0)
    at_border = np.flatnonzero(numerators == border)[: keep - np.count_nonzero(kept)]
    kept[at_border] = border
    return kept


def _random_word(seed: int, choice: int, position: int) -> int:
    """64 random bits that belong to (seed, choice, position) alone."""
    assert position >= 0, position
    assert choice >= 0, choice
    key = np.array([seed & _UINT64_MASK, choice], dtype=np.uint64)
    counter = np.array([position, 0, 0, 0], dtype=np.uint64)
    return int(np.random.Philox(key=key, counter=counter).random_raw())


def _report(logits: NDArray[np.float32], token: int, alternatives: int) -> Sampled:
    """Attach log-softmax of the raw `logits` [vocab] for `token` and the likeliest alternatives."""
    if alternatives < 0:
        return Sampled(token)
    highest = float(logits.max())
    log_total = _log(float(_numerators(logits, 1.0).sum()) / _NUMERATOR_ONE)

    def logprob(index: int) -> float:
        return float(logits[index]) - highest - log_total

    top = tuple((index, logprob(index)) for index in _likeliest(logits, alternatives))
    return Sampled(token, logprob(token), top)


def _likeliest(logits: NDArray[np.float32], count: int) -> list[int]:
    """Ids of the `count` largest logits, largest first, ties to the lower id."""
    count = min(count, logits.size)
    if count == 0:
        return []
    # The border is a value, so partition's freedom of order cannot show.
    border = np.partition(logits, logits.size - count)[logits.size - count]
    candidates = np.flatnonzero(logits >= border)
    order = np.argsort(-logits[candidates], kind="stable")[:count]
    return [int(index) for index in candidates[order]]


def _log(value: float) -> float:
    """Natural logarithm to about an ulp from IEEE operations alone (libraries differ in it).

    With value = m * 2^e and s = (m - 1) / (m + 1): log m = 2 * (s + s^3/3 + s^5/5 + ...).
    """
    assert value > 0, value
    mantissa, exponent = math.frexp(value)
    if mantissa < 0.7071067811865476:
        mantissa, exponent = mantissa * 2, exponent - 1
    s = (mantissa - 1) / (mantissa + 1)
    squared = s * s
    series = 0.0
    # |s| < 0.172, so the term after s^23 is below 2^-63.
    for power in range(23, 0, -2):
        series = series * squared + 1 / power
    return exponent * _LOG_2_HIGH + (exponent * _LOG_2_LOW + 2 * s * series)


def _check_number(field: str, value: float, low: float, high: float) -> None:
    known = isinstance(value, int | float) and not isinstance(value, bool)
    if not known or not low <= value <= high:
        raise BadInput(f"{field} must be a number from {low} to {high}, not {value!r}", field=field)


def _check_integer(field: str, value: int, low: int, high: int) -> None:
    known = isinstance(value, int) and not isinstance(value, bool)
    if not known or not low <= value <= high:
        raise BadInput(
            f"{field} must be an integer from {low} to {high}, not {value!r}", field=field
        )
