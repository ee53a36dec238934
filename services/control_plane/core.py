"""The control plane: membership by heartbeat, and the view that everyone else works with (P115).

It beats the TE-shells and the pod-wide services; a shell's answer brings the members of its TE.
The view is published every period, and whenever somebody asks; the data plane keeps serving on
its last view when the control plane is away. It never touches a token.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from libs import units
from libs.actor import (
    Effect,
    Event,
    Received,
    Record,
    Reply,
    Send,
    SetTimer,
    Started,
    TimerFired,
)
from libs.health.roster import Roster
from libs.wire import subjects
from libs.wire.control import (
    ClusterView,
    Heartbeat,
    HeartbeatReply,
    Hello,
    MemberState,
    StatusQuery,
)

BEAT_TIMER = "beat"


@dataclass(frozen=True, slots=True)
class ControlPlaneConfig:
    """Who is expected: `direct` are beaten here, `all_members` is everybody but the control
    plane.
    """

    name: str
    direct: tuple[str, ...]
    all_members: tuple[str, ...]
    period_ns: int = units.ms(500)
    silent_after: int = 4


class ControlPlaneCore:
    """Membership of the pod."""

    def __init__(self, config: ControlPlaneConfig) -> None:
        self.name = config.name
        self.config = config
        self.epoch = 1
        self._roster = Roster(config.direct, config.silent_after)
        #: Members of TEs as their shell last reported them, with the shell's name.
        self._te_members: dict[str, tuple[MemberState, str]] = {}
        self._version = 0
        self._was_ready = False

    def handle(self, event: Event, now_ns: int) -> list[Effect]:
        """One event."""
        match event:
            case Started():
                return self._beat()
            case TimerFired(name=name) if name == BEAT_TIMER:
                # The beat is also when silence is noticed.
                beat = self._beat()
                return [*beat, *(self._readiness() or [Send(subjects.VIEW, self.view())])]
            case Received(message=Hello(), sender=sender):
                return [Send(subjects.inbox(sender), Heartbeat(self._roster.sequence))]
            case Received(message=HeartbeatReply() as reply):
                return self._answered(event, reply)
            case Received(message=StatusQuery(), reply_to=reply_to):
                return [Reply(reply_to, self.view())] if reply_to else []
            case Received(message=message):
                return [Record("unexpected_message", {"kind": type(message).__name__})]
            case _:
                raise AssertionError(f"unexpected {event!r}")

    def view(self) -> ClusterView:
        """The pod as known now."""
        states = {state.actor: state for state in self._roster.states()}
        for actor, (state, shell) in self._te_members.items():
            # What a silent shell last said of its members is worth nothing any more.
            states[actor] = replace(state, alive=state.alive and self._roster.is_alive(shell))
        members = tuple(states[name] for name in self.config.all_members if name in states)
        missing = tuple(
            name for name in self.config.all_members if name not in states or not states[name].alive
        )
        return ClusterView(self._version, self.epoch, not missing, members, missing)

    def _beat(self) -> list[Effect]:
        beat = Heartbeat(self._roster.beat())
        sends = [Send(subjects.inbox(member), beat) for member in self.config.direct]
        return [*sends, SetTimer(BEAT_TIMER, self.config.period_ns)]

    def _answered(self, event: Received, reply: HeartbeatReply) -> list[Effect]:
        self._roster.answered(event.sender, reply.sequence, event.incarnation, reply.state)
        planned = (m for m in reply.members if m.actor in self.config.all_members)
        self._te_members.update((member.actor, (member, event.sender)) for member in planned)
        self._version += 1
        return self._readiness()

    def _readiness(self) -> list[Effect]:
        view = self.view()
        if view.ready == self._was_ready:
            return []
        # Readiness is worth telling at once; everything else can wait for the period.
        self._was_ready = view.ready
        fields = {"ready": view.ready, "missing": list(view.missing)}
        return [Send(subjects.VIEW, view), Record("readiness_changed", fields)]

    def validate(self) -> None:
        """Only planned members are known."""
        assert set(self._te_members) <= set(self.config.all_members)
