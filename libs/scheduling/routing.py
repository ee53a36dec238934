"""The two choices of a request's life, as pure functions.

- A job executor chooses a TE by load (P096, P099).
- A TE-shell chooses a DP group: groups whose batch is full are dropped, the rest are ranked by KV
  used plus reserved (P059). Ties rotate, so that equal groups fill evenly.

The usual ways of others are here for comparison (`xds bench sched`): each keeps to the bounds of
the queues, and knows nothing of KV.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import StrEnum


class DpPolicy(StrEnum):
    """How a TE-shell chooses among the DP groups that are alive."""

    LEAST_KV = "least_kv"
    ROUND_ROBIN = "round_robin"
    SHORTEST_QUEUE = "shortest_queue"
    TWO_CHOICES = "two_choices"


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


def choose_dp(
    loads: Sequence[DpLoad], blocks: int, turn: int, policy: DpPolicy = DpPolicy.LEAST_KV
) -> str | None:
    """The DP group for a request that may need `blocks` KV blocks, or None when none can take it.

    None is the back-pressure: every group that lives and could ever hold the request has a full
    queue. `turn` counts the choices of the caller.
    """
    open_loads = [
        load
        for load in loads
        if load.alive
        and blocks <= load.kv_total_blocks
        and load.requests < load.batch_max + load.queue_max
    ]
    return _POLICIES[policy](open_loads, blocks, turn) if open_loads else None


def _least_kv(loads: Sequence[DpLoad], blocks: int, turn: int) -> str:
    """Of the groups with a batch slot and KV to spare the one with least KV used and reserved.

    When there is none, the request waits where the queue is shortest (deferred RECV).
    """
    fitting = [
        load
        for load in loads
        if load.requests < load.batch_max
        and load.kv_reserved_blocks + blocks <= load.kv_total_blocks
    ]
    if fitting:
        return _rotate(fitting, [load.kv_reserved_blocks for load in fitting], turn)
    return _shortest_queue(loads, blocks, turn)


def _round_robin(loads: Sequence[DpLoad], _blocks: int, turn: int) -> str:
    return loads[turn % len(loads)].dp


def _shortest_queue(loads: Sequence[DpLoad], _blocks: int, turn: int) -> str:
    return _rotate(loads, [load.requests for load in loads], turn)


def _two_choices(loads: Sequence[DpLoad], blocks: int, turn: int) -> str:
    """The less busy of two that chance has picked; chance is a hash of the turn."""
    draw = zlib.crc32(turn.to_bytes(8, "little"))
    first = draw % len(loads)
    second = (first + 1 + draw // len(loads) % max(1, len(loads) - 1)) % len(loads)
    return _shortest_queue([loads[first], loads[second]], blocks, turn)


_POLICIES: dict[DpPolicy, Callable[[Sequence[DpLoad], int, int], str]] = {
    DpPolicy.LEAST_KV: _least_kv,
    DpPolicy.ROUND_ROBIN: _round_robin,
    DpPolicy.SHORTEST_QUEUE: _shortest_queue,
    DpPolicy.TWO_CHOICES: _two_choices,
}


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
