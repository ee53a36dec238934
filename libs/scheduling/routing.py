"""The two choices of a request's life, as pure functions.

- A job executor chooses a TE by load (P096, P099).
- A TE-shell chooses a DP group: groups whose batch is full are dropped, the rest are ranked by KV
used
  plus reserved (P059). Ties rotate, so that equal groups fill evenly.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class DpLoad:
    """One DP group as its TE-shell sees it: reported state plus what was dispatched since."""

    dp: str
    requests: int
    batch_max: int
    queue_max: int
    kv_total_blocks: int
    kv_reserved_blocks: int
    alive: bool = True


@dataclass(frozen=True, slots=True)
class TeChoice:
    """One TE as a job executor sees it."""

    te: str
    requests: int
    tokens: int
    alive: bool = True


def choose_dp(loads: Sequence[DpLoad], blocks: int, turn: int) -> str | None:
    """The DP group for a request that may need `blocks` KV blocks, or None when none is alive.

    Preferred are groups with a free batch slot and enough free KV; when there is none, the request
    waits at the group with the shortest queue (deferred RECV is the back-pressure) unless every
    queue is at its bound.
    """
    alive = [load for load in loads if load.alive and blocks <= load.kv_total_blocks]
    fitting = [
        load
        for load in alive
        if load.requests < load.batch_max
        and load.kv_reserved_blocks + blocks <= load.kv_total_blocks
    ]
    if fitting:
        return _rotate(fitting, [load.kv_reserved_blocks for load in fitting], turn)
    queueing = [load for load in alive if load.requests < load.batch_max + load.queue_max]
    if queueing:
        return _rotate(queueing, [load.requests for load in queueing], turn)
    return None


def choose_te(choices: Sequence[TeChoice], turn: int) -> str | None:
    """The TE with the fewest outstanding prompt tokens (then requests), or None when none is
    alive.
    """
    alive = [choice for choice in choices if choice.alive]
    if not alive:
        return None
    best = min((choice.tokens, choice.requests) for choice in alive)
    tied = [choice.te for choice in alive if (choice.tokens, choice.requests) == best]
    return tied[turn % len(tied)]


def _rotate(loads: Sequence[DpLoad], scores: Sequence[int], turn: int) -> str:
    best = min(scores)
    tied = [load.dp for load, score in zip(loads, scores, strict=True) if score == best]
    return tied[turn % len(tied)]
