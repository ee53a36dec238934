"""What the monolithic reference answers, token for token and character for character.

One sequence, one cache, no batching, no network: the oracle that every disaggregated, faulted or
migrated answer is compared with.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from libs.model.output_parser import OutputParser, ToolCallPiece
from libs.model.reference import Reference
from libs.model.sampling import sample
from libs.model.tokenizer import Tokenizer
from libs.scheduling.finish import finish_reason
from libs.wire.request import RequestSpec


@dataclass(frozen=True, slots=True)
class Answer:
    """A whole answer in the client's view."""

    tokens: tuple[int, ...]
    content: str
    reasoning: str
    tool_calls: tuple[ToolCallPiece, ...]
    finish_reason: str


def expected_answer(spec: RequestSpec, reference: Reference, tokenizer: Tokenizer) -> Answer:
    """Run `spec` through the reference and the same text rules as the output process."""
    prompt = [int(token) for token in spec.prompt_ids]
    parser = OutputParser(
        tokenizer,
        spec.request_id,
        raw=spec.output.raw,
        reasoning_open=spec.output.reasoning_open,
        stops=spec.output.stops,
    )
    collected = _Collector(parser)

    def choose(logits: np.ndarray, position: int, before: Sequence[int]) -> int:
        output = before[len(prompt) :]
        return sample(logits, spec.sampling, output, prompt, position, spec.choice).token

    ends = () if spec.sampling.ignore_eos else spec.sampling.stop_token_ids
    for token in reference.generate(prompt, choose, spec.max_tokens, ends):
        produced = len(collected.tokens) + 1
        collected.push(token, finish_reason(spec.sampling, token, produced, spec.max_tokens))
        if collected.finish_reason is not None:
            break
    assert collected.finish_reason is not None
    return Answer(
        tuple(collected.tokens),
        collected.content,
        collected.reasoning,
        tuple(collected.tool_calls),
        collected.finish_reason,
    )


class _Collector:
    def __init__(self, parser: OutputParser) -> None:
        self.parser = parser
        self.tokens: list[int] = []
        self.content = ""
        self.reasoning = ""
        self.tool_calls: list[ToolCallPiece] = []
        self.finish_reason: str | None = None

    def push(self, token: int, reason: str | None) -> None:
        delta = self.parser.push(token, reason is not None, reason)
        self.tokens.append(token)
        self.content += delta.content
        self.reasoning += delta.reasoning
        self.tool_calls += delta.tool_calls
        self.finish_reason = delta.finish_reason
