"""The state of a decode DP group as data: requests with their stage, and the iteration under way.

A request's life here, in the words of P101-P103:

    stage \\ event | blocks free  all blocks in  written+paired  iteration starts  last token
    --------------+----------------------------------------------------------------------------
    PREALLOC      | TRANSFER
    TRANSFER      |              IMPORTING
    IMPORTING     |                             WAITING
    WAITING       |                                             RUNNING
    RUNNING       |                                                               (gone)

Any stage may also end by cancellation or failure; blocks are freed at once unless an iteration that
is under way still reads them, and then at its end.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum

import numpy as np

from libs.wire.request import FirstToken, PrefillTiming, RequestSpec, TransferManifest


class Stage(Enum):
    """Where a request is."""

    PREALLOC = "prealloc"
    TRANSFER = "transfer"
    IMPORTING = "importing"
    WAITING = "waiting"
    RUNNING = "running"


#: The legal moves; anything else is our bug.
STAGES: dict[Stage, Stage] = {
    Stage.PREALLOC: Stage.TRANSFER,
    Stage.TRANSFER: Stage.IMPORTING,
    Stage.IMPORTING: Stage.WAITING,
    Stage.WAITING: Stage.RUNNING,
}


@dataclass(slots=True)
class DecodeRequest:
    """One request at this DP group."""

    spec: RequestSpec
    job_executor: str
    manifest: TransferManifest
    first: FirstToken
    timing: PrefillTiming
    sequence: int
    stage: Stage = Stage.PREALLOC
    generation: int = 0
    block_ids: tuple[int, ...] = ()
    kv_bytes: int = 0
    written: bool = False
    ready_at_ns: int = 0
    transfer_started_at_ns: int = 0
    transfer_finished_at_ns: int = 0
    output: list[int] = field(default_factory=list)
    #: Set when the request must go as soon as the iteration that reads its KV is over.
    leaving: str | None = None

    @property
    def request_id(self) -> str:
        """The request's id."""
        return self.spec.request_id

    @property
    def rows(self) -> int:
        """KV rows written so far: the last output token has none yet."""
        return self.spec.prompt_tokens + len(self.output) - 1

    def advance(self, stage: Stage) -> None:
        """Move to the next stage; only the moves of the table are legal."""
        assert STAGES.get(self.stage) is stage, f"{self.stage} -> {stage}"
        self.stage = stage


class Phase(Enum):
    """What the iteration loop is doing."""

    IDLE = "idle"
    COMPUTING = "computing"
    AWAITING_EXPERTS = "awaiting_experts"


@dataclass(slots=True)
class Iteration:
    """The iteration under way; `partials[die]` is None until the die has answered."""

    number: int
    batch: tuple[DecodeRequest, ...]
    kv_rows: int
    layer: int = -1
    work_id: int = -1
    asked_at_ns: int = 0
    answered_at_ns: int = 0
    partials: dict[int, np.ndarray | None] = field(default_factory=dict)
    resends: int = 0

    @property
    def missing_dies(self) -> tuple[int, ...]:
        """Dies that have not answered, ascending."""
        return tuple(sorted(die for die, partial in self.partials.items() if partial is None))
