from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from libs.actor import Record, Send, SetTimer
from libs.health.presence import describe_simple
from libs.wire.control import Heartbeat, HeartbeatReply, Hello, MemberState, TeLoad
from libs.wire.request import AssignDecode, AssignPrefill, Cancel, LegFailed, RequestFinished
from libs.wire.tokens import TokensCommitted
from services.te_shell.core import BEAT_TIMER, TeShellConfig, TeShellCore
from tests.support.bench import Bench, Effects
from tests.support.requests import assign_decode, assign_prefill

GROUPS = ("decode_te.d0.dp0", "decode_te.d0.dp1")
MEMBERS = (*GROUPS, "output.d0.dp0", "expert_die.d0.e0")


class ShellBench(Bench):
    """A shell whose DP groups have all answered their first beat."""

    def __init__(self, leg: str = "decode", batch_max: int = 2, kv_blocks: int = 8) -> None:
        config = TeShellConfig(
            "te_shell.d0", "d0", leg, GROUPS, MEMBERS, batch_max, queue_max=1, kv_blocks=kv_blocks,
            block_size=16, silent_after=2,
        )  # fmt: skip
        self.core = TeShellCore(config)
        super().__init__(self.core)
        self.start()
        for member in MEMBERS:
            self.answer(member)

    def answer(self, member: str, sequence: int = 1, incarnation: int = 1) -> Effects:
        reply = HeartbeatReply(sequence, describe_simple(member))
        return self.take(reply, sender=member, incarnation=incarnation)

    def assign(self, request_id: str, prompt: int = 20, max_tokens: int = 8) -> Effects:
        return self.take(assign_decode(request_id, prompt, max_tokens=max_tokens))

    def finish(self, request_id: str, dp: str = GROUPS[0]) -> Effects:
        return self.take(RequestFinished(request_id, dp, "stop", 1), sender=dp)


@pytest.fixture
def bench() -> ShellBench:
    return ShellBench()


def group_of(effects: Effects) -> str:
    subject: str = effects.one(Send, message=AssignDecode).subject
    return subject.removeprefix("xds.act.")


# ---------------------------------------------------------------- dispatch


def test_a_request_is_passed_on_to_one_group_as_it_is(bench: ShellBench) -> None:
    assign = assign_decode()
    effects = bench.take(assign)
    assert effects.one(Send, message=AssignDecode).message is assign
    load = effects.one(Send, message=TeLoad).message
    assert (load.running, load.slots_free) == (1, 3)


def test_equal_groups_take_turns(bench: ShellBench) -> None:
    groups = [group_of(bench.assign(f"r{index}")) for index in range(4)]
    assert Counter(groups) == {GROUPS[0]: 2, GROUPS[1]: 2}


def test_decode_counts_the_kv_of_every_token_that_may_come(bench: ShellBench) -> None:
    crowded = group_of(bench.assign("large", prompt=20, max_tokens=100))
    assert group_of(bench.assign("small", prompt=20, max_tokens=8)) != crowded
    assert group_of(bench.assign("other", prompt=20, max_tokens=8)) != crowded


def test_prefill_counts_the_kv_of_the_prompt_alone() -> None:
    bench = ShellBench(leg="prefill")
    effects = bench.take(assign_prefill("r1", prompt=120, max_tokens=1_000))
    assert effects.has(Send, message=AssignPrefill)


def test_when_no_group_can_take_it_the_refusal_is_definite(bench: ShellBench) -> None:
    for index in range(6):
        bench.assign(f"r{index}")
    effects = bench.assign("late")
    failed = effects.one(Send).message
    assert failed == LegFailed(
        "late", "decode", "backpressure", "no DP group of d0 can take the request", definite=True
    )
    bench.finish("r0")
    assert bench.assign("late").has(Send, message=AssignDecode), "a finished request makes room"


def test_a_silent_group_gets_nothing(bench: ShellBench) -> None:
    for _ in range(3):
        bench.fire(BEAT_TIMER)
    bench.answer(GROUPS[1], sequence=4)
    assert {group_of(bench.assign(f"r{index}")) for index in range(3)} == {GROUPS[1]}


def test_a_repeated_assignment_goes_to_the_group_that_has_it(bench: ShellBench) -> None:
    first = group_of(bench.assign("r1"))
    assert group_of(bench.assign("r1")) == first
    assert bench.finish("r1").one(Send, message=TeLoad).message.running == 0


@given(
    st.lists(
        st.one_of(
            st.tuples(st.just("assign"), st.integers(0, 40), st.integers(1, 140)),
            st.tuples(st.just("finish"), st.integers(0, 40), st.just(0)),
        ),
        max_size=50,
    )
)
@settings(max_examples=60, deadline=None)
def test_a_full_group_never_gets_a_request_while_another_fits(
    steps: list[tuple[str, int, int]],
) -> None:
    bench = ShellBench(batch_max=3, kv_blocks=9)
    where: dict[str, tuple[str, int]] = {}
    for verb, number, rows in steps:
        request_id = f"r{number}"
        if verb == "finish":
            where.pop(request_id, None)
            bench.finish(request_id)
            continue
        if request_id in where:
            continue
        effects = bench.assign(request_id, prompt=rows, max_tokens=1)
        blocks = -(-(rows + 1) // 16)
        counts = Counter(dp for dp, _ in where.values())
        kv: Counter[str] = Counter()
        for dp, used in where.values():
            kv[dp] += used
        fitting = [dp for dp in GROUPS if counts[dp] < 3 and kv[dp] + blocks <= 9]
        if effects.has(Send, message=LegFailed):
            assert not fitting
            continue
        chosen = group_of(effects)
        assert not fitting or chosen in fitting
        if fitting:
            assert kv[chosen] == min(kv[dp] for dp in fitting)
        where[request_id] = (chosen, blocks)


# ---------------------------------------------------------------- cancellation


def test_a_cancellation_follows_the_request_to_its_group(bench: ShellBench) -> None:
    group = group_of(bench.assign("r1"))
    assert bench.take(Cancel("r1", "left")) == [Send(f"xds.act.{group}", Cancel("r1", "left"), 0)]
    bench.finish("r1", group)
    assert bench.take(Cancel("r1", "left")) == []


def test_a_cancellation_that_overtakes_its_request_stops_it(bench: ShellBench) -> None:
    bench.take(Cancel("r1", "left"))
    assert bench.assign("r1") == []


def test_a_request_nobody_reports_on_is_forgotten_after_its_budget(bench: ShellBench) -> None:
    """A lost report, or a group that died: its share of the group must not be taken for ever."""
    bench.take(assign_decode("r1", budget_ns=2 * bench.core.config.period_ns))
    beats = 0
    while bench.core._assigned:
        bench.fire(BEAT_TIMER)
        beats += 1
        assert beats < 10
    assert beats > 2, "not before its budget is over"


# ---------------------------------------------------------------- health


def test_every_period_every_member_is_beaten(bench: ShellBench) -> None:
    effects = bench.fire(BEAT_TIMER)
    beaten = [send.subject.removeprefix("xds.act.") for send in effects.all(Send)]
    assert beaten == list(MEMBERS)
    assert {send.message for send in effects.all(Send)} == {Heartbeat(2)}
    assert effects.has(SetTimer, name=BEAT_TIMER)


def test_a_newcomer_is_beaten_at_once(bench: ShellBench) -> None:
    effects = bench.take(Hello("output.d0.dp0", "output", 7), sender="output.d0.dp0")
    assert effects == [Send("xds.act.output.d0.dp0", Heartbeat(1))]


def test_its_own_answer_brings_its_members_with_their_incarnations(bench: ShellBench) -> None:
    bench.answer(GROUPS[0], incarnation=3)
    reply = bench.take(Heartbeat(9), sender="control_plane.0").one(Send).message
    assert reply.sequence == 9
    assert [member.actor for member in reply.members] == list(MEMBERS)
    assert reply.members[0].incarnation == 3
    assert reply.state.phase == "serving"


def test_a_missing_member_makes_it_degraded(bench: ShellBench) -> None:
    for _ in range(3):
        bench.fire(BEAT_TIMER)
    state: MemberState = bench.take(Heartbeat(9), sender="control_plane.0").one(Send).message.state
    assert (state.phase, state.waiting) == ("degraded", len(MEMBERS))


# ---------------------------------------------------------------- what it never sees


def test_it_handles_two_messages_per_request_however_long_the_answer(bench: ShellBench) -> None:
    before = bench.core.messages.copy()
    for index in range(20):
        bench.assign(f"r{index}", max_tokens=100)
        bench.finish(f"r{index}")
    seen = bench.core.messages - before
    assert seen == {"AssignDecode": 20, "RequestFinished": 20}


def test_a_token_that_strays_here_is_only_recorded(bench: ShellBench) -> None:
    effects = bench.take(TokensCommitted(GROUPS[0], 1, ()))
    assert effects.one(Record).fields == {"kind": "TokensCommitted"}
    forwarded = bench.take(assign_decode("r1")).one(Send, message=AssignDecode)
    assert bench.unreachable(forwarded.subject, forwarded.message).has(Record, name="unreachable")
