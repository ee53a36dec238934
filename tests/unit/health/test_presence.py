from __future__ import annotations

import pytest

from libs.actor import CancelTimer, Received, Send, SetTimer, Started, TimerFired
from libs.health.presence import HELLO_TIMER, Presence, describe_simple, supervisor_of
from libs.wire.control import Heartbeat, HeartbeatReply, Hello
from libs.wire.request import Cancel
from tests.support.bench import Effects

ACTOR = "expert_die.d0.e0"


@pytest.fixture
def presence() -> Presence:
    return Presence(ACTOR, "d0", lambda: describe_simple(ACTOR, "computing"))


def beat(presence: Presence, sequence: int = 7) -> Effects:
    event = Received(0, Heartbeat(sequence), "te_shell.d0", 1, 1)
    return Effects(presence.handle(event) or [])


@pytest.mark.parametrize(
    ("actor", "te", "supervisor"),
    [
        ("expert_die.d0.e0", "d0", "te_shell.d0"),
        ("output.p0.dp0", "p0", "te_shell.p0"),
        ("te_shell.d0", "d0", "control_plane.0"),
        ("gateway.0", "", "control_plane.0"),
    ],
)
def test_who_beats_whom(actor: str, te: str, supervisor: str) -> None:
    assert supervisor_of(actor, te) == supervisor


def test_hello_is_repeated_until_the_first_beat(presence: Presence) -> None:
    for event in (Started(0), TimerFired(1, HELLO_TIMER)):
        effects = Effects(presence.handle(event) or [])
        assert effects.one(Send, subject="xds.act.te_shell.d0").message == Hello(
            ACTOR, "expert_die", 0
        )
        assert effects.has(SetTimer, name=HELLO_TIMER)
    assert beat(presence).has(CancelTimer, name=HELLO_TIMER)
    assert presence.handle(TimerFired(2, HELLO_TIMER)) == [], "a late timer says nothing"


def test_a_beat_is_answered_with_its_own_number_and_the_present_state(presence: Presence) -> None:
    sent = beat(presence, sequence=7).one(Send, subject="xds.act.te_shell.d0")
    assert sent.message == HeartbeatReply(7, describe_simple(ACTOR, "computing"))


def test_everything_else_is_somebody_elses_business(presence: Presence) -> None:
    assert presence.handle(Received(0, Cancel("r1", "left"), "peer", 1, 1)) is None
    assert presence.handle(TimerFired(0, "r1")) is None
