"""How an actor is known to be there: it says hello until its supervisor beats it, then answers
beats.

The supervisor of a TE's member is the TE-shell, of everything else the control plane (P115). The
answer to a heartbeat is an effect of the actor's own queue, so a core that cannot get to its
queue is silent.
"""

from __future__ import annotations

from collections.abc import Callable

from libs import units
from libs.actor import CancelTimer, Effect, Event, Received, Send, SetTimer, Started, TimerFired
from libs.ids import role_of
from libs.wire import subjects
from libs.wire.control import Heartbeat, HeartbeatReply, Hello, MemberState

HELLO_TIMER = "hello"
HELLO_PERIOD_NS = units.ms(200)
CONTROL_PLANE = "control_plane.0"


def supervisor_of(actor: str, te: str) -> str:
    """Who beats `actor`: its TE-shell, or the control plane."""
    if te and role_of(actor) != "te_shell":
        return f"te_shell.{te}"
    return CONTROL_PLANE


class Presence:
    """The part of a core that answers for it. `describe()` gives its current state."""

    def __init__(self, actor: str, te: str, describe: Callable[[], MemberState]) -> None:
        self.actor = actor
        self.supervisor = supervisor_of(actor, te)
        self._describe = describe
        self._greeted = False

    def handle(self, event: Event) -> list[Effect] | None:
        """Effects when the event is about presence, None when it is somebody else's business."""
        match event:
            case Started():
                return self._hello()
            case TimerFired(name=name) if name == HELLO_TIMER:
                return [] if self._greeted else self._hello()
            case Received(message=Heartbeat(sequence=sequence), sender=sender):
                self._greeted = True
                reply = HeartbeatReply(sequence, self._describe())
                return [CancelTimer(HELLO_TIMER), Send(subjects.inbox(sender), reply)]
            case _:
                return None

    def _hello(self) -> list[Effect]:
        hello = Hello(self.actor, role_of(self.actor), 0)
        return [
            Send(subjects.inbox(self.supervisor), hello),
            SetTimer(HELLO_TIMER, HELLO_PERIOD_NS),
        ]


def describe_simple(actor: str, phase: str = "serving") -> MemberState:
    """The state of an actor without queues worth reporting; the host fills in the incarnation."""
    return MemberState(
        actor, role_of(actor), incarnation=0, epoch=1, alive=True, phase=phase,
        iteration=0, running=0, waiting=0,
    )  # fmt: skip
