from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from libs import units
from libs.actor import CancelTimer, Present, Record, Send, SetTimer
from libs.wire.control import ClusterView, Heartbeat, HeartbeatReply
from libs.wire.request import Accepted, Cancel, RequestFailed, Submit
from libs.wire.tokens import Chunk, StreamChunks
from services.gateway.core import (
    ACCEPT_DEADLINE_NS,
    EARLY_MAX,
    SUBMIT_TRIES,
    ClientGone,
    ClientSubmit,
    Failure,
    GatewayConfig,
    GatewayCore,
)
from tests.support.bench import Bench, Effects
from tests.support.requests import make_spec

JE = "job_executor.0"


def chunk(
    index: int, *, finish: str | None = None, at_ns: int = 0, request_id: str = "r1"
) -> Chunk:
    return Chunk(request_id, index, 40 + index, at_ns, f"t{index}", "", (), finish)


def chunks(*items: Chunk) -> StreamChunks:
    return StreamChunks("output.d0.dp0", items)


class GatewayBench(Bench):
    core: GatewayCore

    def __init__(self, requests_max: int = 4) -> None:
        self.core = GatewayCore(GatewayConfig("gateway.0", requests_max))
        super().__init__(self.core)

    def submit(self, request_id: str = "r1", **other: Any) -> Effects:
        return self.take(ClientSubmit(make_spec(request_id, **other)))

    def accept(self, request_id: str = "r1", job_executor: str = JE) -> Effects:
        return self.take(Accepted(request_id, job_executor), sender=job_executor)


@pytest.fixture
def bench() -> GatewayBench:
    return GatewayBench()


@pytest.fixture
def accepted(bench: GatewayBench) -> GatewayBench:
    bench.submit()
    bench.accept()
    return bench


def shown(effects: Effects) -> list[int]:
    return [effect.item.index for effect in effects.all(Present) if isinstance(effect.item, Chunk)]


# ---------------------------------------------------------------- admission


def test_a_submission_goes_to_any_job_executor_under_two_deadlines(bench: GatewayBench) -> None:
    effects = bench.submit(budget_ns=units.s(9))
    assert effects.one(Send, message=Submit).probe
    assert effects.one(SetTimer, name="accept:r1").delay_ns == ACCEPT_DEADLINE_NS
    assert effects.one(SetTimer, name="budget:r1").delay_ns == units.s(9)
    assert bench.accept() == [CancelTimer("accept:r1")]


def test_beyond_its_bound_a_request_is_told_to_come_back(bench: GatewayBench) -> None:
    for index in range(4):
        bench.submit(f"r{index}")
    assert not bench.core.can_admit(1)
    failure = bench.submit("late").one(Present, key="late").item
    assert (failure.code, failure.definite) == ("backpressure", True)
    assert bench.core.open_requests == 4


def test_an_unanswered_submission_is_repeated_and_then_given_up(bench: GatewayBench) -> None:
    bench.submit()
    for _ in range(SUBMIT_TRIES - 1):
        effects = bench.fire("accept:r1")
        assert effects.has(Send, message=Submit)
        assert effects.has(SetTimer, name="accept:r1")
    failure = bench.fire("accept:r1").one(Present).item
    assert (failure.code, failure.stage) == ("peer_lost", "dispatch")
    assert bench.core.open_requests == 0


def test_nobody_listening_is_tried_again_at_once(bench: GatewayBench) -> None:
    submit = bench.submit().one(Send, message=Submit)
    for _ in range(SUBMIT_TRIES - 1):
        assert bench.unreachable(submit.subject, submit.message).has(Send, message=Submit)
    assert bench.unreachable(submit.subject, submit.message).has(Present, item__code="peer_lost")
    assert bench.unreachable(submit.subject, submit.message) == [], "it is over"


def test_an_accepted_request_is_not_submitted_again(accepted: GatewayBench) -> None:
    assert accepted.fire("accept:r1") == []


# ---------------------------------------------------------------- the stream


def test_tokens_pass_in_order_and_the_last_one_ends_the_request(accepted: GatewayBench) -> None:
    effects = accepted.take(chunks(chunk(0, at_ns=50), chunk(1, at_ns=90, finish="stop")))
    assert shown(effects) == [0, 1]
    assert effects.one(Record, name="first_token").fields["ttft_ns"] == 50
    assert effects.one(Record, name="token").fields["gap_ns"] == 40
    ended = effects.one(Record, name="request_ended").fields
    assert (ended["outcome"], ended["finish_reason"], ended["output_tokens"]) == ("ok", "stop", 2)
    assert effects.has(CancelTimer, name="budget:r1")
    assert accepted.core.open_requests == 0


def test_the_first_token_is_shown_once_though_both_legs_deliver_it(accepted: GatewayBench) -> None:
    assert shown(accepted.take(chunks(chunk(0)))) == [0]
    assert accepted.take(chunks(chunk(0))) == []
    assert accepted.core.duplicates == 1


def test_an_early_token_waits_for_the_gap_to_close(accepted: GatewayBench) -> None:
    assert accepted.take(chunks(chunk(2, at_ns=70), chunk(1, at_ns=60))) == []
    assert shown(accepted.take(chunks(chunk(0, at_ns=80)))) == [0, 1, 2]


def test_a_client_never_sees_time_run_backwards(accepted: GatewayBench) -> None:
    effects = accepted.take(chunks(chunk(0, at_ns=80), chunk(1, at_ns=60)))
    assert [effect.at_ns for effect in effects.all(Present)] == [80, 80]


def test_too_many_early_tokens_mean_that_one_was_lost(accepted: GatewayBench) -> None:
    accepted.take(chunks(*(chunk(index) for index in range(1, EARLY_MAX + 1))))
    effects = accepted.take(chunks(chunk(EARLY_MAX + 1)))
    failure = effects.one(Present).item
    assert failure == Failure("r1", "peer_lost", "tokens were lost", False, "stream")
    assert effects.has(Send, subject=f"xds.act.{JE}", message=Cancel), "nobody needs the rest"


def test_a_full_early_buffer_still_takes_the_token_that_closes_the_gap(
    accepted: GatewayBench,
) -> None:
    accepted.take(chunks(*(chunk(index) for index in range(1, EARLY_MAX + 1))))
    assert shown(accepted.take(chunks(chunk(0)))) == list(range(EARLY_MAX + 1))


def test_tokens_of_a_request_that_has_ended_are_dropped(accepted: GatewayBench) -> None:
    accepted.take(chunks(chunk(0, finish="stop")))
    assert accepted.take(chunks(chunk(1))) == []


@given(
    st.integers(1, 12).flatmap(
        lambda count: st.tuples(
            st.just(count),
            st.permutations(list(range(count)) + list(range(count)) + [0]),
            st.lists(st.integers(0, 1_000), min_size=2 * count + 1, max_size=2 * count + 1),
        )
    )
)
@settings(max_examples=100, deadline=None)
def test_any_order_and_repetition_gives_each_index_once_in_order(
    stream: tuple[int, list[int], list[int]],
) -> None:
    count, order, stamps = stream
    bench = GatewayBench()
    bench.submit()
    bench.accept()
    effects = Effects()
    for index, at_ns in zip(order, stamps, strict=True):
        finish = "length" if index == count - 1 else None
        effects += bench.take(chunks(chunk(index, finish=finish, at_ns=at_ns)))
    presented = effects.all(Present)
    assert shown(effects) == list(range(count))
    assert [effect.at_ns for effect in presented] == sorted(effect.at_ns for effect in presented)
    assert bench.core.open_requests == 0


# ---------------------------------------------------------------- other ends


def test_a_failure_before_any_token_keeps_its_definiteness(accepted: GatewayBench) -> None:
    failed = RequestFailed("r1", "backpressure", "full", definite=True, stage="prefill")
    failure = accepted.take(failed).one(Present).item
    assert failure == Failure("r1", "backpressure", "full", definite=True, stage="prefill")
    assert accepted.take(failed) == [], "a repetition finds nothing"


def test_a_failure_after_a_token_is_never_definite(accepted: GatewayBench) -> None:
    accepted.take(chunks(chunk(0, at_ns=90)))
    failed = RequestFailed("r1", "backpressure", "full", definite=True, stage="decode")
    shown_failure = accepted.take(failed, at_ns=10).one(Present)
    assert not shown_failure.item.definite
    assert shown_failure.at_ns == 90, "after what was shown, whatever the stamp says"


def test_a_job_executor_that_failed_a_request_needs_no_cancellation(
    accepted: GatewayBench,
) -> None:
    failed = RequestFailed("r1", "peer_lost", "gone", definite=False, stage="decode")
    assert not accepted.take(failed, sender=JE).has(Send, message=Cancel)


def test_a_stream_that_broke_elsewhere_is_cancelled_at_the_job_executor(
    accepted: GatewayBench,
) -> None:
    failed = RequestFailed("r1", "peer_lost", "token 3 was lost", definite=False, stage="stream")
    effects = accepted.take(failed, sender="output.d0.dp0")
    assert effects.has(Send, subject=f"xds.act.{JE}", message__request_id="r1", message=Cancel)


def test_the_budget_ends_a_request_and_stops_its_work(accepted: GatewayBench) -> None:
    effects = accepted.fire("budget:r1")
    assert effects.one(Present).item.code == "deadline_exceeded"
    assert effects.has(Send, subject=f"xds.act.{JE}", message=Cancel("r1", "deadline"))
    assert accepted.fire("budget:r1") == []


def test_a_client_that_leaves_cancels_its_request(accepted: GatewayBench) -> None:
    effects = accepted.take(ClientGone("r1"))
    assert effects.has(Send, subject=f"xds.act.{JE}", message=Cancel("r1", "client gone"))
    assert effects.one(Record, name="request_ended").fields["outcome"] == "cancelled"
    assert not effects.has(Present), "there is nobody to show anything to"
    assert accepted.take(ClientGone("r1")) == []


def test_accepted_after_the_client_left_is_answered_with_a_cancellation(
    bench: GatewayBench,
) -> None:
    bench.submit()
    assert not bench.take(ClientGone("r1")).has(Send)
    assert bench.accept() == [Send(f"xds.act.{JE}", Cancel("r1", "superseded"), 0)]


def test_a_second_acceptance_is_noted_and_changes_nothing(accepted: GatewayBench) -> None:
    effects = accepted.accept(job_executor="job_executor.1")
    assert not effects.has(Send)
    assert effects.has(Record, name="accepted_twice")
    gone = accepted.take(ClientGone("r1"))
    assert gone.has(Send, subject=f"xds.act.{JE}", message=Cancel)


# ---------------------------------------------------------------- company


def test_the_view_is_kept_and_beats_are_answered(bench: GatewayBench) -> None:
    view = ClusterView(3, 1, True, (), ())
    bench.take(view)
    assert bench.core.view == view
    assert bench.take(Heartbeat(4), sender="control_plane.0").has(
        Send, message=HeartbeatReply, message__sequence=4
    )


def test_an_unexpected_message_is_recorded(bench: GatewayBench) -> None:
    effects = bench.take(Cancel("r1", "misrouted"))
    assert effects.one(Record).fields == {"kind": "Cancel"}
