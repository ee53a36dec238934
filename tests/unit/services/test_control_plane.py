from __future__ import annotations

import pytest

from libs.actor import Record, Reply, Send, SetTimer
from libs.health.presence import describe_simple
from libs.wire.control import (
    ClusterView,
    Heartbeat,
    HeartbeatReply,
    Hello,
    MemberState,
    StatusQuery,
)
from libs.wire.request import Cancel
from services.control_plane.core import BEAT_TIMER, ControlPlaneConfig, ControlPlaneCore
from tests.support.bench import Bench, Effects

SHELL, GATEWAY, DIE = "te_shell.d0", "gateway.0", "expert_die.d0.e0"


class PlaneBench(Bench):
    def __init__(self) -> None:
        config = ControlPlaneConfig(
            "control_plane.0", (SHELL, GATEWAY), (SHELL, GATEWAY, DIE), silent_after=2
        )
        self.core = ControlPlaneCore(config)
        super().__init__(self.core)
        self.start()

    def answer(self, actor: str, members: tuple[MemberState, ...] = ()) -> Effects:
        sequence = self.core._roster.sequence
        reply = HeartbeatReply(sequence, describe_simple(actor), members)
        return self.take(reply, sender=actor)

    def assemble(self) -> Effects:
        self.answer(GATEWAY)
        return self.answer(SHELL, (describe_simple(DIE),))


@pytest.fixture
def bench() -> PlaneBench:
    return PlaneBench()


def test_it_beats_shells_and_pod_wide_services_but_no_member_of_a_te(bench: PlaneBench) -> None:
    effects = bench.fire(BEAT_TIMER)
    beaten = {send.subject for send in effects.all(Send, message=Heartbeat)}
    assert beaten == {f"xds.act.{SHELL}", f"xds.act.{GATEWAY}"}
    assert effects.has(SetTimer, name=BEAT_TIMER)
    assert effects.one(Send, subject="xds.view").message.missing == (SHELL, GATEWAY, DIE)


def test_the_pod_is_ready_when_everybody_planned_is_alive_and_says_so_at_once(
    bench: PlaneBench,
) -> None:
    assert not bench.answer(GATEWAY).has(Send)
    effects = bench.answer(SHELL, (describe_simple(DIE),))
    view = effects.one(Send, subject="xds.view").message
    assert view.ready
    assert [member.actor for member in view.members] == [SHELL, GATEWAY, DIE]
    assert effects.one(Record, name="readiness_changed").fields["ready"]
    assert bench.answer(GATEWAY) == [], "no news"


def test_a_silent_service_makes_the_pod_unready_and_is_named(bench: PlaneBench) -> None:
    bench.assemble()
    for _ in range(3):
        effects = bench.fire(BEAT_TIMER)
        bench.answer(SHELL, (describe_simple(DIE),))
    view = effects.one(Send, subject="xds.view").message
    assert (view.ready, view.missing) == (False, (GATEWAY,))


def test_members_of_a_silent_shell_are_missing_with_it(bench: PlaneBench) -> None:
    bench.assemble()
    for _ in range(3):
        effects = bench.fire(BEAT_TIMER)
        bench.answer(GATEWAY)
    view = effects.one(Send, subject="xds.view").message
    assert view.missing == (SHELL, DIE)


def test_a_member_that_its_shell_calls_silent_is_missing(bench: PlaneBench) -> None:
    bench.assemble()
    silent = MemberState(DIE, "expert_die", 1, 1, False, "idle", 0, 0, 0)
    view = bench.answer(SHELL, (silent,)).one(Send, subject="xds.view").message
    assert view.missing == (DIE,)


def test_strangers_in_a_report_are_ignored(bench: PlaneBench) -> None:
    bench.answer(SHELL, (describe_simple("expert_die.d0.e99"),))
    assert DIE in bench.core.view().missing


def test_a_question_is_answered_and_one_without_an_address_is_not(bench: PlaneBench) -> None:
    asked = bench.take(StatusQuery(), reply_to="_INBOX.1")
    assert asked.one(Reply, reply_to="_INBOX.1").message.missing == (SHELL, GATEWAY, DIE)
    assert bench.take(StatusQuery()) == []


def test_a_newcomer_is_beaten_at_once(bench: PlaneBench) -> None:
    effects = bench.take(Hello(GATEWAY, "gateway", 7), sender=GATEWAY)
    assert effects == [Send(f"xds.act.{GATEWAY}", Heartbeat(1))]


def test_views_are_numbered(bench: PlaneBench) -> None:
    first = bench.core.view().version
    bench.answer(GATEWAY)
    assert bench.core.view().version > first


def test_an_unexpected_message_is_recorded(bench: PlaneBench) -> None:
    assert bench.take(Cancel("r1", "lost")).one(Record).fields == {"kind": "Cancel"}
    assert isinstance(bench.core.view(), ClusterView)
