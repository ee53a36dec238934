"""The iteration loop of a decode DP group, MoE-attention disaggregated (P107, P123-P124).

    start -> compute to the first MoE layer -> A2E to the dies that hold chosen experts
          -> all E2A in -> compute to the next MoE layer -> ... -> sample -> commit -> start

Every wait for experts has a deadline; after it the rows are sent again to the dies that are missing
(experts hold no state, a repeated answer is the same answer), and after `RESENDS_MAX` the
requests of the batch fail with the name of the die.

Emulated time: the die is one sequential resource. An iteration begins at the end of the last one
(or when its first request became ready), and each layer goes on at the latest stamp of its
answers.
"""

from __future__ import annotations

from libs import units
from libs.actor import CancelTimer, Compute, Effect, Record, Send, SetTimer, Transmit
from libs.errors import OperatingError
from libs.fabric import profiles
from libs.model.sampling import Sampled
from libs.patience import wait_ns
from libs.scheduling.finish import finish_reason
from libs.wire.expert import A2E, E2A, A2ERefused
from libs.wire.tokens import TokenRow, TokensCommitted
from services.decode_te.group import DecodeGroup
from services.decode_te.jobs import (
    BatchRow,
    BeginIteration,
    DieRows,
    IterationDone,
    ResumeIteration,
    Routed,
)
from services.decode_te.state import DecodeRequest, Iteration, Phase, Stage

ITERATION_TIMER = "iteration"
EXPERT_DEADLINE_NS = units.s(1)
RESENDS_MAX = 9


class IterationLoop:
    """Runs the batch; at most one iteration is under way."""

    def __init__(self, group: DecodeGroup) -> None:
        self.group = group
        self.phase = Phase.IDLE
        self.iterations = 0
        self.tokens = 0
        self._iteration: Iteration | None = None
        self._job_id = -1
        self._work_id = 0
        self._sent: dict[int, DieRows] = {}
        self._free_at_ns = 0

    def reads(self, request: DecodeRequest) -> bool:
        """Whether the iteration under way uses the request's KV."""
        return self._iteration is not None and request in self._iteration.batch

    # ------------------------------------------------------------ start

    def start(self) -> list[Effect]:
        """Begin an iteration if none is under way and anything can run."""
        if self._iteration is not None:
            return []
        group, config = self.group, self.group.config
        begin_ns = self._join()
        batch = tuple(group.in_stage(Stage.RUNNING))
        if not batch:
            return []
        assert len(batch) <= config.batch_max
        kv_rows = sum(request.rows + 1 for request in batch)
        self._iteration = Iteration(self.iterations + 1, batch, kv_rows)
        self.phase = Phase.COMPUTING
        ended, group.ended = tuple(group.ended), []
        rows = tuple(_row_of(request) for request in batch)
        job = BeginIteration(rows, config.placement.die_of, ended)
        dense = sum(config.repeats[: config.num_dense])
        cost_ns = profiles.gap_ns(config.profile)
        cost_ns += profiles.dense_layers_ns(config.profile, dense, len(batch), kv_rows)
        cost_ns += self._attention_ns(config.num_dense)
        return [self._compute(job, cost_ns, begin_ns)]

    def _join(self) -> int:
        """Move ready requests into the running batch; returns when the iteration can begin.

        A request whose stamp lies ahead of this die's timeline joins a later iteration, unless
        nothing else runs.
        """
        group = self.group
        running = len(group.in_stage(Stage.RUNNING))
        waiting = group.in_stage(Stage.WAITING)
        begin_ns = self._free_at_ns
        if not running and waiting:
            begin_ns = max(begin_ns, min(request.ready_at_ns for request in waiting))
        for request in waiting:
            if running < group.config.batch_max and request.ready_at_ns <= begin_ns:
                request.advance(Stage.RUNNING)
                running += 1
        return begin_ns

    def _attention_ns(self, layer: int) -> int:
        iteration, config = self._current(), self.group.config
        tokens, repeat = len(iteration.batch), config.repeats[layer]
        return profiles.moe_attention_ns(config.profile, repeat, tokens, iteration.kv_rows)

    def _compute(self, job: object, cost_ns: int, at_ns: int, *, paced: bool = False) -> Compute:
        self._job_id = self.group.new_job()
        return Compute(self._job_id, job, cost_ns, at_ns, paced)

    # ------------------------------------------------------------ layers

    def computed(self, job_id: int, result: object, at_ns: int) -> list[Effect]:
        """The executor reached the next exchange, or the end."""
        if job_id != self._job_id or self._iteration is None:
            return []  # an iteration that was given up
        self._free_at_ns = max(self._free_at_ns, at_ns)
        match result:
            case Routed():
                return self._send_rows(result, at_ns)
            case IterationDone():
                return self._commit(result, at_ns)
            case OperatingError():
                return self._give_up(result.code, result.message, at_ns)
            case _:
                raise AssertionError(f"unexpected result {result!r}")

    def _send_rows(self, routed: Routed, at_ns: int) -> list[Effect]:
        iteration = self._current()
        self._work_id += 1
        iteration.layer, iteration.work_id = routed.layer, self._work_id
        iteration.asked_at_ns, iteration.answered_at_ns = at_ns, at_ns
        iteration.partials = {rows.die: None for rows in routed.dies}
        iteration.resends = 0
        self._sent = {rows.die: rows for rows in routed.dies}
        self.phase = Phase.AWAITING_EXPERTS
        sends = [self._transmit(rows, at_ns) for rows in routed.dies]
        return [*sends, SetTimer(ITERATION_TIMER, wait_ns(EXPERT_DEADLINE_NS, 0))]

    def _transmit(self, rows: DieRows, at_ns: int) -> Transmit:
        iteration, config = self._current(), self.group.config
        repeat = config.repeats[iteration.layer]
        item = A2E(
            iteration.work_id, iteration.layer, config.epoch, config.placement.version,
            config.name, config.die, repeat,
            rows.rows, rows.scale, rows.topk_idx, rows.topk_weights,
        )  # fmt: skip
        charge = repeat * int(rows.rows.shape[0]) * config.profile.a2e_row_bytes
        depart = at_ns + 2 * repeat * config.params.a2e_stage_ns
        return Transmit(config.die, rows.die, item, charge, repeat, depart)

    def answered(self, answer: E2A, at_ns: int) -> list[Effect]:
        """One die's partial sums; the layer goes on when none is missing."""
        iteration = self._iteration
        if iteration is None or answer.work_id != iteration.work_id:
            return []  # late or repeated
        if answer.die not in iteration.partials or answer.epoch != self.group.config.epoch:
            return [Record("unexpected_answer", {"die": answer.die, "layer": answer.layer})]
        if iteration.partials[answer.die] is not None:
            return []
        iteration.partials[answer.die] = answer.partial
        iteration.answered_at_ns = max(iteration.answered_at_ns, at_ns)
        if iteration.missing_dies:
            return []
        return self._resume()

    def _resume(self) -> list[Effect]:
        iteration, config = self._current(), self.group.config
        partials = tuple((die, p) for die, p in iteration.partials.items() if p is not None)
        job = ResumeIteration(iteration.layer, partials)
        self.phase = Phase.COMPUTING
        last = iteration.layer + 1 == len(config.repeats)
        if last:
            cost_ns = profiles.finish_ns(config.profile)
        else:
            cost_ns = self._attention_ns(iteration.layer + 1)
        # Pacing the last step alone keeps the loop level with the wall clock at the least cost.
        compute = self._compute(job, cost_ns, iteration.answered_at_ns, paced=last)
        iteration.partials = {}
        self._sent = {}
        return [CancelTimer(ITERATION_TIMER), compute]

    # ------------------------------------------------------------ trouble

    def overdue(self, at_ns: int) -> list[Effect]:
        """Some die has not answered in time: ask it again, then give up and name it."""
        iteration = self._iteration
        if iteration is None or self.phase is not Phase.AWAITING_EXPERTS:
            return []
        missing = iteration.missing_dies
        if iteration.resends >= RESENDS_MAX:
            return self._give_up("peer_lost", f"expert dies {list(missing)} do not answer", at_ns)
        iteration.resends += 1
        # A new departure: the fabric may have been silent for everything that left with the first.
        depart_ns = max(at_ns, iteration.asked_at_ns)
        resend = [self._transmit(self._sent[die], depart_ns) for die in missing]
        return [
            *resend,
            SetTimer(ITERATION_TIMER, wait_ns(EXPERT_DEADLINE_NS, iteration.resends)),
            Record("experts_overdue", {"dies": list(missing), "layer": iteration.layer}),
        ]

    def refused(self, refusal: A2ERefused, at_ns: int) -> list[Effect]:
        """A die cannot take our rows; back-pressure is waited out, anything else ends the batch."""
        iteration = self._iteration
        if iteration is None or refusal.work_id != iteration.work_id:
            return []
        if refusal.die not in iteration.missing_dies:
            return []  # it has answered, and refuses a repetition
        if refusal.code == "backpressure":
            return []  # the deadline sends the rows again
        return self._give_up(refusal.code, f"die {refusal.die}: {refusal.reason}", at_ns)

    def _give_up(self, code: str, reason: str, at_ns: int) -> list[Effect]:
        iteration = self._current()
        self._iteration, self.phase = None, Phase.IDLE
        self._sent = {}
        effects: list[Effect] = [CancelTimer(ITERATION_TIMER)]
        for request in iteration.batch:
            if request.leaving is not None:
                effects += self.group.leave(request, request.leaving, at_ns)
            else:
                effects += self.group.fail(request, code, reason, at_ns)
        record = {"iteration": iteration.number, "code": code, "reason": reason}
        return [*effects, Record("iteration_failed", record)]

    # ------------------------------------------------------------ commit

    def _commit(self, done: IterationDone, at_ns: int) -> list[Effect]:
        iteration, group = self._current(), self.group
        assert len(done.samples) == len(iteration.batch)
        self._iteration, self.phase = None, Phase.IDLE
        self.iterations = iteration.number
        rows: list[TokenRow] = []
        leaving: list[tuple[DecodeRequest, str]] = []
        for request, sampled in zip(iteration.batch, done.samples, strict=True):
            if request.leaving is not None:
                leaving.append((request, request.leaving))
                continue
            row = self._append(request, sampled, at_ns)
            rows.append(row)
            if row.finish_reason is not None:
                leaving.append((request, row.finish_reason))
        self.tokens += len(rows)
        committed = TokensCommitted(group.config.name, iteration.number, tuple(rows))
        effects: list[Effect] = [Send(group.output, committed, at_ns)] if rows else []
        for request, reason in leaving:
            effects += group.leave(request, reason, at_ns)
        fields = {"iteration": iteration.number, "batch": len(rows), "kv_rows": iteration.kv_rows}
        return [*effects, Record("iteration_committed", fields)]

    def _append(self, request: DecodeRequest, sampled: Sampled, at_ns: int) -> TokenRow:
        request.output.append(sampled.token)
        spec, tokens = request.spec, len(request.output)
        reason = finish_reason(spec.sampling, sampled.token, tokens, spec.max_tokens)
        return TokenRow(
            request.request_id, len(request.output) - 1, sampled.token, at_ns, reason,
            sampled.logprob, sampled.top,
        )  # fmt: skip

    def _current(self) -> Iteration:
        assert self._iteration is not None
        return self._iteration

    def validate(self) -> None:
        """The phase agrees with what is under way."""
        assert (self._iteration is None) == (self.phase is Phase.IDLE)
        if self.phase is Phase.AWAITING_EXPERTS:
            assert self._current().missing_dies, "nobody is missing, yet we wait"


def _row_of(request: DecodeRequest) -> BatchRow:
    spec = request.spec
    return BatchRow(
        request.sequence, request.block_ids, request.output[-1], request.rows, spec.sampling,
        spec.choice, spec.prompt_ids, tuple(request.output),
    )  # fmt: skip
