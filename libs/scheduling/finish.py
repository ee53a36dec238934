"""When a request ends by itself: one rule for prefill, decode and the reference."""

from __future__ import annotations

from libs.model.sampling import SamplingParams


def finish_reason(
    sampling: SamplingParams, token: int, output_tokens: int, max_tokens: int
) -> str | None:
    """`stop` at an end token unless ignored, `length` at the token budget, None to go on.

    `output_tokens` counts `token`.
    """
    assert 1 <= output_tokens <= max_tokens, (output_tokens, max_tokens)
    if sampling.ends_with(token):
        return "stop"
    return "length" if output_tokens == max_tokens else None
