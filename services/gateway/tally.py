"""What is counted while one choice streams by: tokens for `usage`, times for the `xds` object.

All times are emulated: what a real SuperPod would have taken, at whatever pace the pod runs.

    arrival --queue--> prefill start --prefill--> prefill end --kv transfer--> decode
    arrival ---------------first token---------> ... --per token--> ... last token = total
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from libs import units
from libs.model.tokenizer import ControlIds
from libs.wire.request import RequestSpec
from libs.wire.tokens import Chunk, RequestTiming


@dataclass(frozen=True, slots=True)
class Phases:
    """Where the time of one finished choice went; `transfer` is None when prefill ended it.

    `per_token_ns` is the mean gap after the first token, None for a single token. Of its
    `prompt_tokens`, `cached_tokens` took no time: the prefix cache had them.
    """

    queue_ns: int
    prefill_ns: int
    transfer_ns: int | None
    first_token_ns: int
    per_token_ns: float | None
    decode_ns: int
    total_ns: int
    prompt_tokens: int
    cached_tokens: int


class Tally:
    """Counts one choice, chunk by chunk."""

    def __init__(self, spec: RequestSpec, control: ControlIds) -> None:
        self.spec = spec
        self.tokens = 0
        self.reasoning_tokens = 0
        self.text_chars = 0
        self.finish_reason: str | None = None
        self._control = control
        self._in_thought = spec.output.reasoning_open
        self._first_at_ns = 0
        self._last_at_ns = 0
        self._timing: RequestTiming | None = None

    def take(self, chunk: Chunk, at_ns: int) -> None:
        """Count the next chunk, shown at `at_ns`."""
        assert self.finish_reason is None, "a chunk after the end"
        assert at_ns >= self._last_at_ns, "a client never sees time run backwards"
        if self.tokens == 0:
            self._first_at_ns = at_ns
        self._last_at_ns = at_ns
        self.tokens += 1
        self.text_chars += len(chunk.content)
        self.finish_reason = chunk.finish_reason
        self._timing = chunk.timing or self._timing
        if not self.spec.output.raw:
            self._count_thought(chunk.token)

    def _count_thought(self, token: int) -> None:
        """Tokens of a thought, the ones that open and close it included."""
        control = self._control
        self._in_thought = self._in_thought or token == control.think_open
        self.reasoning_tokens += self._in_thought
        ends = (control.think_close, control.tool_calls_open, control.tool_call_open)
        self._in_thought = self._in_thought and token not in ends

    @property
    def cached_tokens(self) -> int:
        """Prompt tokens that the prefix cache had; 0 until the choice has finished."""
        return self._timing.prefill.cached_tokens if self._timing else 0

    def phases(self) -> Phases | None:
        """Where the time went; None until the choice has finished."""
        timing = self._timing
        if self.finish_reason is None or timing is None:
            return None
        submitted = self.spec.submitted_at_ns
        gaps = self.tokens - 1
        decode_ns = self._last_at_ns - self._first_at_ns
        transfer_ns = timing.transfer_finished_at_ns - timing.transfer_started_at_ns
        return Phases(
            # Arrival is stamped by the wall clock, prefill by its own timeline: never below zero.
            queue_ns=max(0, timing.prefill.started_at_ns - submitted),
            prefill_ns=timing.prefill.finished_at_ns - timing.prefill.started_at_ns,
            transfer_ns=transfer_ns if timing.decode_te else None,
            first_token_ns=self._first_at_ns - submitted,
            per_token_ns=decode_ns / gaps if gaps else None,
            decode_ns=decode_ns,
            total_ns=self._last_at_ns - submitted,
            prompt_tokens=self.spec.prompt_tokens,
            cached_tokens=self.cached_tokens,
        )

    def account(self) -> dict[str, Any] | None:
        """The `xds` object: who served the choice, and where its emulated time went."""
        phases, timing = self.phases(), self._timing
        if phases is None or timing is None:
            return None
        return {
            "request_id": self.spec.request_id,
            "prefill_te": timing.prefill.prefill_te,
            "prefill_dp": timing.prefill.prefill_dp,
            "decode_te": timing.decode_te or None,
            "decode_dp": timing.decode_dp or None,
            "expert_dies": list(timing.expert_dies),
            "kv_bytes": timing.kv_bytes,
            "emulated_ms": {
                "queue": _ms(phases.queue_ns),
                "prefill": _ms(phases.prefill_ns),
                "kv_transfer": _ms(phases.transfer_ns),
                "first_token": _ms(phases.first_token_ns),
                "per_token": _ms(phases.per_token_ns),
                "total": _ms(phases.total_ns),
            },
        }


def usage_of(prompt_tokens: int, tallies: list[Tally], per_prompt: int) -> dict[str, Any]:
    """The `usage` object over all choices; a prompt counts once.

    Of the `per_prompt` choices of a prompt the one that found least cached speaks for it: what the
    others found is what that one computed.
    """
    firsts = range(0, len(tallies), per_prompt)
    cached = sum(min(t.cached_tokens for t in tallies[i : i + per_prompt]) for i in firsts)
    completion = sum(tally.tokens for tally in tallies)
    return {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": completion,
        "total_tokens": prompt_tokens + completion,
        "prompt_tokens_details": {"cached_tokens": cached},
        "completion_tokens_details": {
            "reasoning_tokens": sum(tally.reasoning_tokens for tally in tallies)
        },
    }


def _ms(duration_ns: float | None) -> float | None:
    return None if duration_ns is None else round(units.to_ms(round(duration_ns)), 3)
