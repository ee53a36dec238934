"""A job executor (JE): stateless in the large, it accompanies each request it was handed (P096,
P099).

    state \\ event | leg failed        prefill done          request finished   cancel / deadline
    --------------+-----------------------------------------------------------------------
    PREFILL       | other TE or fail  DECODE (or finished)  -                  gone
    DECODE        | fail              -                     gone               gone

The gateway picks a JE at random (a queue group). A leg that refuses before anything happened
(`definite`) is tried at another TE once each; the first leg that fails for good cancels its
sibling.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from enum import Enum

from libs import units
from libs.actor import (
    CancelTimer,
    Effect,
    Event,
    Received,
    Record,
    Send,
    SetTimer,
    Started,
    TimerFired,
    Unreachable,
)
from libs.health.presence import Presence
from libs.scheduling.routing import TeChoice, choose_te
from libs.scheduling.tombstones import Tombstones
from libs.wire import subjects
from libs.wire.control import ClusterView, MemberState, TeLoad
from libs.wire.request import (
    Accepted,
    AssignDecode,
    AssignPrefill,
    BindTransfer,
    Cancel,
    LegFailed,
    PrefillDone,
    RequestFailed,
    RequestFinished,
    RequestSpec,
    Submit,
)

#: A leg may overrun the request's budget by this much before the JE ends it itself.
GRACE_NS = units.s(5)


class Leg(Enum):
    """Which leg a request is on."""

    PREFILL = "prefill"
    DECODE = "decode"


@dataclass(slots=True)
class Job:
    """One request in the care of this JE."""

    spec: RequestSpec
    leg: Leg = Leg.PREFILL
    prefill_te: str = ""
    decode_te: str = ""
    done: PrefillDone | None = None
    refused_by: set[str] = field(default_factory=set)


@dataclass(frozen=True, slots=True)
class JobExecutorConfig:
    """The TEs that exist, and how many jobs may be open."""

    name: str
    prefill_tes: tuple[str, ...]
    decode_tes: tuple[str, ...]
    jobs_max: int = 4096


class JobExecutorCore:
    """Chooses and accompanies."""

    def __init__(self, config: JobExecutorConfig) -> None:
        self.name = config.name
        self.config = config
        self._jobs: dict[str, Job] = {}
        self._loads: dict[str, TeLoad] = {}
        self._dead: frozenset[str] = frozenset()
        #: Ties rotate per leg; one counter for both would always meet the same TE of two.
        self._turns = {Leg.PREFILL: 0, Leg.DECODE: 0}
        self._ended = Tombstones()
        self._presence = Presence(config.name, "", self._describe)

    def handle(self, event: Event, now_ns: int) -> list[Effect]:
        """One event."""
        handled = self._presence.handle(event)
        if handled is not None:
            return handled
        match event:
            case Received(message=Submit(spec=spec), at_ns=at_ns):
                return self._submit(spec, at_ns)
            case Received(message=PrefillDone() as done, at_ns=at_ns):
                return self._prefill_done(done, at_ns)
            case Received(message=LegFailed() as failed, at_ns=at_ns):
                return self._leg_failed(failed, at_ns)
            case Received(message=RequestFinished() as finished):
                return self._finished(finished)
            case Received(message=Cancel() as cancel, at_ns=at_ns):
                return self._cancel(cancel, at_ns)
            case Received(message=TeLoad() as load):
                return self._learn(load)
            case Received(message=ClusterView() as view):
                self._dead = _dead_shells(view)
                return []
            case Unreachable(message=AssignPrefill(spec=spec), at_ns=at_ns):
                return self._unreachable(spec.request_id, Leg.PREFILL, at_ns)
            case Unreachable(message=AssignDecode(spec=spec), at_ns=at_ns):
                return self._unreachable(spec.request_id, Leg.DECODE, at_ns)
            case TimerFired(name=request_id, at_ns=at_ns):
                return self._expire(request_id, at_ns)
            case Received(message=message):
                return [Record("unexpected_message", {"kind": type(message).__name__})]
            case Started() | Unreachable():
                return []
            case _:
                raise AssertionError(f"unexpected {event!r}")

    # ------------------------------------------------------------ prefill

    def _submit(self, spec: RequestSpec, at_ns: int) -> list[Effect]:
        gateway = subjects.inbox(spec.gateway)
        accepted = Accepted(spec.request_id, self.name)
        if spec.request_id in self._ended:
            return []
        if spec.request_id in self._jobs:
            # The gateway asks again because our answer was lost.
            return [Send(gateway, accepted, at_ns)]
        if len(self._jobs) >= self.config.jobs_max:
            reason = f"{self.config.jobs_max} requests are open at {self.name}"
            failed = RequestFailed(spec.request_id, "backpressure", reason, True, "dispatch")
            return [Send(gateway, failed, at_ns)]
        job = Job(spec)
        self._jobs[spec.request_id] = job
        return [
            Send(gateway, accepted, at_ns),
            SetTimer(spec.request_id, spec.budget_ns + GRACE_NS),
            *self._assign_prefill(job, at_ns),
        ]

    def _assign_prefill(self, job: Job, at_ns: int) -> list[Effect]:
        te = self._choose(self.config.prefill_tes, job)
        if te is None:
            return self._fail(
                job, "backpressure", "no prefill TE can take the request", True, at_ns
            )
        job.prefill_te = te
        self._turns[Leg.PREFILL] += 1
        assign = AssignPrefill(job.spec, self.name)
        return [Send(subjects.inbox(f"te_shell.{te}"), assign, at_ns, probe=True)]

    def _prefill_done(self, done: PrefillDone, at_ns: int) -> list[Effect]:
        job = self._jobs.get(done.request_id)
        if job is None:
            # Cancelled meanwhile: the KV must not wait for its lease.
            cancel = Cancel(done.request_id, "cancelled")
            return [Send(subjects.inbox(done.manifest.source_dp), cancel, at_ns)]
        if job.leg is not Leg.PREFILL:
            return []
        if done.finish_reason is not None:
            return self._forget(job)
        job.leg, job.done = Leg.DECODE, done
        job.refused_by.clear()
        return self._assign_decode(job, at_ns)

    # ------------------------------------------------------------ decode

    def _assign_decode(self, job: Job, at_ns: int) -> list[Effect]:
        done = job.done
        assert done is not None
        te = self._choose(self.config.decode_tes, job)
        if te is None:
            return self._fail(job, "backpressure", "no decode TE can take the request", True, at_ns)
        job.decode_te = te
        self._turns[Leg.DECODE] += 1
        distflow = f"distflow.{job.prefill_te}.{te}"
        manifest = replace(done.manifest, distflow=distflow)
        bind = BindTransfer(done.request_id, manifest.transfer_id, distflow)
        assign = AssignDecode(job.spec, self.name, manifest, done.first, done.timing)
        return [
            Send(subjects.inbox(manifest.source_dp), bind, at_ns),
            Send(subjects.inbox(f"te_shell.{te}"), assign, at_ns, probe=True),
        ]

    def _finished(self, finished: RequestFinished) -> list[Effect]:
        job = self._jobs.get(finished.request_id)
        if job is None or job.leg is not Leg.DECODE or finished.reason == "failed":
            return []  # a failure is reported as such, with its reason
        return self._forget(job)

    # ------------------------------------------------------------ trouble

    def _leg_failed(self, failed: LegFailed, at_ns: int) -> list[Effect]:
        job = self._jobs.get(failed.request_id)
        if job is None or failed.leg != job.leg.value:
            return []
        if failed.definite and failed.code in ("backpressure", "peer_lost"):
            return self._elsewhere(job, failed.code, failed.reason, at_ns)
        return self._fail(job, failed.code, failed.reason, failed.definite, at_ns)

    def _unreachable(self, request_id: str, leg: Leg, at_ns: int) -> list[Effect]:
        job = self._jobs.get(request_id)
        if job is None or job.leg is not leg:
            return []
        te = job.prefill_te if job.leg is Leg.PREFILL else job.decode_te
        return self._elsewhere(job, "peer_lost", f"nobody listens at TE {te}", at_ns)

    def _elsewhere(self, job: Job, code: str, reason: str, at_ns: int) -> list[Effect]:
        """Nothing happened yet: try a TE that has not refused."""
        if job.leg is Leg.PREFILL:
            job.refused_by.add(job.prefill_te)
            tes, again = self.config.prefill_tes, self._assign_prefill
        else:
            job.refused_by.add(job.decode_te)
            tes, again = self.config.decode_tes, self._assign_decode
        if self._choose(tes, job) is None:
            return self._fail(job, code, reason, True, at_ns)
        return again(job, at_ns)

    def _fail(self, job: Job, code: str, reason: str, definite: bool, at_ns: int) -> list[Effect]:
        request_id = job.spec.request_id
        failed = RequestFailed(request_id, code, reason, definite, job.leg.value)
        return [
            Send(subjects.inbox(job.spec.gateway), failed, at_ns),
            *self._cancel_legs(job, code, at_ns),
            *self._forget(job),
        ]

    def _cancel(self, cancel: Cancel, at_ns: int) -> list[Effect]:
        job = self._jobs.get(cancel.request_id)
        if job is None:
            self._ended.add(cancel.request_id)
            return []
        return [*self._cancel_legs(job, cancel.reason, at_ns), *self._forget(job)]

    def _expire(self, request_id: str, at_ns: int) -> list[Effect]:
        job = self._jobs.get(request_id)
        if job is None:
            return []
        reason = f"not finished within its budget ({job.leg.value})"
        return self._fail(job, "deadline_exceeded", reason, False, at_ns)

    def _cancel_legs(self, job: Job, reason: str, at_ns: int) -> list[Effect]:
        cancel = Cancel(job.spec.request_id, reason)
        tes = [te for te in (job.prefill_te, job.decode_te) if te]
        return [Send(subjects.inbox(f"te_shell.{te}"), cancel, at_ns) for te in tes]

    def _forget(self, job: Job) -> list[Effect]:
        del self._jobs[job.spec.request_id]
        self._ended.add(job.spec.request_id)
        return [CancelTimer(job.spec.request_id)]

    # ------------------------------------------------------------ choosing

    def _choose(self, tes: tuple[str, ...], job: Job) -> str | None:
        """By what this JE has outstanding there plus what the TE's shell last reported."""
        choices = []
        for te in tes:
            mine = [j for j in self._jobs.values() if te in (j.prefill_te, j.decode_te)]
            tokens = sum(j.spec.prompt_tokens for j in mine if j.leg is Leg.PREFILL)
            load = self._loads.get(te)
            reported = 0 if load is None else load.running + load.waiting
            alive = te not in self._dead and te not in job.refused_by
            choices.append(TeChoice(te, max(len(mine), reported), tokens, alive))
        return choose_te(choices, self._turns[job.leg])

    def _learn(self, load: TeLoad) -> list[Effect]:
        known = self._loads.get(load.te)
        # A smaller version means that the shell was restarted; loads are soft, so believe it.
        if known is None or load.version != known.version:
            self._loads[load.te] = load
        return []

    def _describe(self) -> MemberState:
        return MemberState(self.name, "job_executor", 0, 1, True, "serving", 0, len(self._jobs), 0)

    def validate(self) -> None:
        """A job on its decode leg knows where its KV is."""
        assert len(self._jobs) <= self.config.jobs_max
        for job in self._jobs.values():
            assert (job.leg is Leg.DECODE) == (job.done is not None)


def _dead_shells(view: ClusterView) -> frozenset[str]:
    """TEs whose shell the control plane misses; before the first view nobody is called dead."""
    shells = [name for name in view.missing if name.startswith("te_shell.")]
    return frozenset(name.split(".", 1)[1] for name in shells)
