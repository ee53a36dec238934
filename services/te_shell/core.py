"""The TE-shell and its three duties (P055): dispatch once per request, trigger expert load
balancing (not part of this shell's traffic until a planner asks for it), and fan out health
checks. It never sees a token.

Dispatch uses the shell's own bookkeeping: a request counts against its DP group from assignment
to the group's `RequestFinished`. Cancellations follow the request to the group it was given to.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from libs import units
from libs.actor import Effect, Event, Received, Record, Send, SetTimer, Started, TimerFired
from libs.health.presence import Presence
from libs.health.roster import Roster
from libs.scheduling.routing import DpLoad, DpPolicy, choose_dp
from libs.scheduling.tombstones import Tombstones
from libs.wire import subjects
from libs.wire.control import Heartbeat, HeartbeatReply, Hello, MemberState, TeLoad
from libs.wire.request import (
    AssignDecode,
    AssignPrefill,
    Cancel,
    LegFailed,
    RequestFinished,
    RequestSpec,
)

BEAT_TIMER = "beat"


@dataclass(frozen=True, slots=True)
class TeShellConfig:
    """One TE: its members and the limits of each DP group."""

    name: str
    te: str
    leg: str
    dp_groups: tuple[str, ...]
    members: tuple[str, ...]
    batch_max: int
    queue_max: int
    kv_blocks: int
    block_size: int
    policy: DpPolicy = DpPolicy.LEAST_KV
    period_ns: int = units.ms(500)
    silent_after: int = 4


@dataclass(frozen=True, slots=True)
class Assignment:
    """Where a request was sent, what it may need there, and the beat at which it is forgotten.

    A DP group reports every request it is done with; the beat covers a group that died with them.
    """

    dp: str
    blocks: int
    until_beat: int


class TeShellCore:
    """Dispatch and health of one TE."""

    def __init__(self, config: TeShellConfig) -> None:
        self.name = config.name
        self.config = config
        #: Messages handled, by kind: proves that the shell sees O(requests) and no tokens.
        self.messages: Counter[str] = Counter()
        self._assigned: dict[str, Assignment] = {}
        #: What is assigned to each group, counted along: hundreds of groups, thousands of requests.
        self._requests: Counter[str] = Counter()
        self._blocks: Counter[str] = Counter()
        self._roster = Roster(config.members, config.silent_after)
        self._tombstones = Tombstones()
        self._turn = 0
        self._version = 0
        self._presence = Presence(config.name, config.te, self._describe)

    def handle(self, event: Event, now_ns: int) -> list[Effect]:
        """One event."""
        match event:
            case Started():
                return [*(self._presence.handle(event) or []), *self._beat()]
            case Received(message=Heartbeat(sequence=sequence), sender=sender):
                self._presence.handle(event)
                reply = HeartbeatReply(sequence, self._describe(), self._roster.states())
                return [Send(subjects.inbox(sender), reply)]
            case TimerFired(name=name) if name == BEAT_TIMER:
                return self._beat()
            case TimerFired():
                return self._presence.handle(event) or []
            case Received():
                self.messages[type(event.message).__name__] += 1
                return self._received(event)
            case _:
                return [Record("unreachable", {"event": type(event).__name__})]

    def _received(self, event: Received) -> list[Effect]:
        match event.message:
            case AssignPrefill(spec=spec, job_executor=job_executor):
                blocks = self._blocks_for(spec.prompt_tokens)
                return self._dispatch(event, spec, job_executor, blocks)
            case AssignDecode(spec=spec, job_executor=job_executor):
                blocks = self._blocks_for(spec.max_total_tokens)
                return self._dispatch(event, spec, job_executor, blocks)
            case RequestFinished(request_id=request_id):
                self._forget(request_id)
                return [self._report(event.at_ns)]
            case Cancel(request_id=request_id):
                return self._cancel(event.message, request_id, event.at_ns)
            case HeartbeatReply(sequence=sequence, state=state):
                self._roster.answered(event.sender, sequence, event.incarnation, state)
                return []
            case Hello():
                # A newcomer need not wait for the next round to be known.
                return [Send(subjects.inbox(event.sender), Heartbeat(self._roster.sequence))]
            case _:
                return [Record("unexpected_message", {"kind": type(event.message).__name__})]

    # ------------------------------------------------------------ dispatch

    def _blocks_for(self, rows: int) -> int:
        return -(-rows // self.config.block_size)

    def _dispatch(
        self, event: Received, spec: RequestSpec, job_executor: str, blocks: int
    ) -> list[Effect]:
        request_id, at_ns = spec.request_id, event.at_ns
        if request_id in self._tombstones:
            return []
        known = self._assigned.get(request_id)
        dp = known.dp if known is not None else self._choose(blocks)
        if dp is None:
            reason = f"no DP group of {self.config.te} can take the request"
            failed = LegFailed(request_id, self.config.leg, "backpressure", reason, definite=True)
            return [Send(subjects.inbox(job_executor), failed, at_ns)]
        until = self._roster.sequence + 2 + 2 * spec.budget_ns // self.config.period_ns
        self._forget(request_id)  # a resend is counted once
        self._assigned[request_id] = Assignment(dp, blocks, until)
        self._requests[dp] += 1
        self._blocks[dp] += blocks
        forward = Send(subjects.inbox(dp), event.message, at_ns)
        return [forward, self._report(at_ns)]

    def _forget(self, request_id: str) -> None:
        assignment = self._assigned.pop(request_id, None)
        if assignment is not None:
            self._requests[assignment.dp] -= 1
            self._blocks[assignment.dp] -= assignment.blocks

    def _choose(self, blocks: int) -> str | None:
        chosen = choose_dp(self._loads(), blocks, self._turn, self.config.policy)
        self._turn += 1
        return chosen

    def _cancel(self, cancel: Cancel, request_id: str, at_ns: int) -> list[Effect]:
        assignment = self._assigned.get(request_id)
        if assignment is None:
            # It may have overtaken the request it cancels.
            self._tombstones.add(request_id)
            return []
        return [Send(subjects.inbox(assignment.dp), cancel, at_ns)]

    def _loads(self) -> list[DpLoad]:
        config = self.config
        return [
            DpLoad(
                dp, self._requests[dp], config.batch_max, config.queue_max, config.kv_blocks,
                self._blocks[dp], self._roster.is_alive(dp),
            )
            for dp in config.dp_groups
        ]  # fmt: skip

    def _report(self, at_ns: int) -> Send:
        self._version += 1
        config = self.config
        reserved = self._blocks.total()
        slots = len(config.dp_groups) * config.batch_max - len(self._assigned)
        free = len(config.dp_groups) * config.kv_blocks - reserved
        load = TeLoad(config.te, self._version, len(self._assigned), 0, max(0, slots), max(0, free))
        return Send(subjects.LOAD, load, at_ns)

    # ------------------------------------------------------------ health

    def _beat(self) -> list[Effect]:
        beat = Heartbeat(self._roster.beat())
        now = self._roster.sequence
        for request_id in [r for r, a in self._assigned.items() if a.until_beat < now]:
            self._forget(request_id)
        sends = [Send(subjects.inbox(member), beat) for member in self.config.members]
        return [*sends, SetTimer(BEAT_TIMER, self.config.period_ns)]

    def _describe(self) -> MemberState:
        missing = self._roster.missing()
        phase = "serving" if not missing else "degraded"
        return MemberState(
            self.name, "te_shell", 0, 1, True, phase, 0, len(self._assigned), len(missing)
        )

    def validate(self) -> None:
        """Requests are assigned to groups of this TE only."""
        groups = set(self.config.dp_groups)
        assert all(a.dp in groups for a in self._assigned.values())
        assert self._requests.total() == len(self._assigned), self._requests
        assert self._blocks.total() == sum(a.blocks for a in self._assigned.values())
