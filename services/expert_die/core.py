"""An expert die: token rows in, partial sums out; no request state at all (P107).

A work item names itself (source DP group, work id, layer), so the die can compute whatever has
arrived in any order and answer a resend again. Work is charged by the item's own stamp on the
die's timeline.

    A2E frame -> check epoch and map -> compute -> E2A frame
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from libs.actor import Compute, ComputeDone, Effect, Event, Received, Record, Send, Transmit
from libs.config.plan import ExpertPlacement
from libs.errors import OperatingError
from libs.fabric.params import UB, FabricParams
from libs.fabric.profiles import ModelProfile, expert_ns
from libs.health.presence import Presence, describe_simple
from libs.wire import subjects
from libs.wire.control import MemberState
from libs.wire.expert import A2E, E2A, A2ERefused

#: Work items accepted but not yet computed; attention dies resend, so refusing is safe.
BACKLOG_MAX = 4096


@dataclass(frozen=True, slots=True, eq=False)
class ExpertJob:
    """One work item for the executor: rows of one layer for the experts of this die."""

    layer: int
    rows: np.ndarray
    scale: np.ndarray
    topk_idx: np.ndarray
    topk_weights: np.ndarray
    experts: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class ExpertDieConfig:
    """Place and tables of one expert die."""

    die: int
    te: str
    placement: ExpertPlacement
    profile: ModelProfile
    #: Layers of the profiled model that each real layer stands for.
    epoch: int = 1
    params: FabricParams = UB


class ExpertDieCore:
    """Receive, compute, send."""

    def __init__(self, name: str, config: ExpertDieConfig) -> None:
        self.name = name
        self.config = config
        self.experts = config.placement.experts_on(config.die)
        self.items = 0
        self.rows = 0
        self._jobs: dict[int, A2E] = {}
        self._next_job = 0
        self._presence = Presence(name, config.te, self._describe)

    def handle(self, event: Event, now_ns: int) -> list[Effect]:
        """Work items in, partial sums out."""
        handled = self._presence.handle(event)
        if handled is not None:
            return handled
        match event:
            case Received(message=A2E() as item, at_ns=at_ns):
                return self._take(item, at_ns)
            case ComputeDone(job_id=job_id, result=result, at_ns=at_ns):
                return self._answer(self._jobs.pop(job_id), result, at_ns)
            case Received(message=message):
                return [Record("unexpected_message", {"kind": type(message).__name__})]
            case _:
                raise AssertionError(f"unexpected {event!r}")

    def _take(self, item: A2E, at_ns: int) -> list[Effect]:
        refusal = self._refusal(item)
        if refusal is not None:
            return [Send(subjects.inbox(item.source_dp), refusal, at_ns)]
        job_id, self._next_job = self._next_job, self._next_job + 1
        self._jobs[job_id] = item
        job = ExpertJob(
            item.layer, item.rows, item.scale, item.topk_idx, item.topk_weights, self.experts
        )
        routed = int(np.isin(item.topk_idx, self.experts).sum())
        cost_ns = expert_ns(self.config.profile, item.repeat, routed, slots=1)
        return [Compute(job_id, job, cost_ns, at_ns)]

    def _refusal(self, item: A2E) -> A2ERefused | None:
        config = self.config
        if item.epoch != config.epoch:
            code, reason = "stale_epoch", f"epoch {item.epoch}, here {config.epoch}"
        elif item.map_version != config.placement.version:
            code = "stale_map"
            reason = f"map version {item.map_version}, here {config.placement.version}"
        elif not _well_formed(item):
            shapes = f"rows {item.rows.shape}, routes {item.topk_idx.shape}"
            code, reason = "malformed", f"{shapes}, repeat {item.repeat}"
        elif len(self._jobs) >= BACKLOG_MAX:
            code, reason = "backpressure", f"{len(self._jobs)} items wait"
        else:
            return None
        return A2ERefused(item.work_id, item.layer, config.die, code, reason)

    def _answer(self, item: A2E, result: np.ndarray | OperatingError, at_ns: int) -> list[Effect]:
        config = self.config
        if isinstance(result, OperatingError):
            refusal = A2ERefused(item.work_id, item.layer, config.die, result.code, result.message)
            return [Send(subjects.inbox(item.source_dp), refusal, at_ns)]
        self.items += 1
        self.rows += int(item.rows.shape[0])
        answer = E2A(item.work_id, item.layer, config.epoch, config.die, result)
        charge = item.repeat * item.rows.shape[0] * config.profile.e2a_row_bytes
        depart = at_ns + 2 * item.repeat * config.params.e2a_stage_ns
        return [Transmit(config.die, item.source_die, answer, charge, item.repeat, depart)]

    def _describe(self) -> MemberState:
        return describe_simple(self.name, "computing" if self._jobs else "idle")

    def validate(self) -> None:
        """The backlog is bounded."""
        assert len(self._jobs) <= BACKLOG_MAX


def _well_formed(item: A2E) -> bool:
    """Whether the tensors are tables of one height, and the exchange stands for any layer."""
    tables = (item.rows, item.topk_idx, item.topk_weights)
    return (
        item.repeat >= 1
        and all(table.ndim == 2 and len(table) == len(item.rows) for table in tables)
        and item.topk_idx.shape == item.topk_weights.shape
    )
