from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from libs import units
from libs.actor import CancelTimer, Record, Send, SetTimer
from libs.wire.control import ClusterView, TeLoad
from libs.wire.request import (
    Accepted,
    AssignDecode,
    AssignPrefill,
    BindTransfer,
    Cancel,
    LegFailed,
    RequestFailed,
    RequestFinished,
    Submit,
)
from libs.wire.transfer import ReceiveDone
from services.job_executor.core import GRACE_NS, JobExecutorConfig, JobExecutorCore
from tests.support.bench import Bench, Effects
from tests.support.requests import make_spec, prefill_done

GATEWAY = "xds.act.gateway.0"


class JobBench(Bench):
    def __init__(self, jobs_max: int = 8) -> None:
        config = JobExecutorConfig("job_executor.0", ("p0", "p1"), ("d0", "d1"), jobs_max)
        self.core = JobExecutorCore(config)
        super().__init__(self.core)

    def submit(self, request_id: str = "r1", **other: Any) -> Effects:
        return self.take(Submit(make_spec(request_id, **other)), sender="gateway.0")

    def prefilled(self, request_id: str = "r1") -> Effects:
        return self.take(prefill_done(request_id))

    def refuse(self, leg: str, code: str = "backpressure", *, definite: bool = True) -> Effects:
        return self.take(LegFailed("r1", leg, code, "no room", definite))


@pytest.fixture
def bench() -> JobBench:
    return JobBench()


def te_of(effects: Effects, kind: type[Any]) -> str:
    subject: str = effects.one(Send, message=kind).subject
    return subject.rsplit(".", 1)[1]


def cancelled_tes(effects: Effects) -> list[str]:
    return [send.subject.rsplit(".", 1)[1] for send in effects.all(Send, message=Cancel)]


# ---------------------------------------------------------------- the usual way


def test_a_submission_is_accepted_and_given_to_a_prefill_te(bench: JobBench) -> None:
    effects = bench.submit(budget_ns=units.s(9))
    assert effects.one(Send, message=Accepted, subject=GATEWAY)
    assert effects.one(SetTimer, name="r1").delay_ns == units.s(9) + GRACE_NS
    assert effects.one(Send, message=AssignPrefill).probe


def test_after_prefill_the_transfer_is_bound_to_the_pair_and_decode_assigned(
    bench: JobBench,
) -> None:
    prefill_te = te_of(bench.submit(), AssignPrefill)
    effects = bench.prefilled()
    decode_te = te_of(effects, AssignDecode)
    distflow = f"distflow.{prefill_te}.{decode_te}"
    bind = effects.one(Send, message=BindTransfer)
    assert bind.subject == "xds.act.prefill_te.p0.dp0", "the group that has the KV"
    assert bind.message.distflow == distflow
    assert effects.one(Send, message=AssignDecode).message.manifest.distflow == distflow


def test_a_finished_request_is_forgotten(bench: JobBench) -> None:
    bench.submit()
    bench.prefilled()
    assert bench.take(RequestFinished("r1", "decode_te.d0.dp0", "stop", 8)) == [CancelTimer("r1")]
    assert bench.fire("r1") == []


def test_a_request_that_its_first_token_ends_never_sees_decode(bench: JobBench) -> None:
    bench.submit()
    assert bench.take(prefill_done(finish_reason="stop")) == [CancelTimer("r1")]


# ---------------------------------------------------------------- choosing


def test_equal_tes_share_the_requests(bench: JobBench) -> None:
    tes = [te_of(bench.submit(f"r{index}", prompt=10), AssignPrefill) for index in range(4)]
    assert sorted(tes) == ["p0", "p0", "p1", "p1"]


def test_the_te_with_the_fewest_outstanding_prompt_tokens_is_chosen(bench: JobBench) -> None:
    busy = te_of(bench.submit("long", prompt=500), AssignPrefill)
    tes = {te_of(bench.submit(f"r{index}", prompt=10), AssignPrefill) for index in range(3)}
    assert busy not in tes


def test_a_reported_load_counts_even_if_others_caused_it(bench: JobBench) -> None:
    bench.take(TeLoad("p0", 1, running=5, waiting=0, slots_free=1, kv_free_blocks=9))
    assert te_of(bench.submit(), AssignPrefill) == "p1"
    bench.take(TeLoad("p0", 0, running=0, waiting=0, slots_free=6, kv_free_blocks=9))
    bench.take(TeLoad("p1", 1, running=5, waiting=0, slots_free=1, kv_free_blocks=9))
    assert te_of(bench.submit("r2", prompt=1), AssignPrefill) == "p0", "a restarted shell is heard"


def test_a_te_whose_shell_is_missing_is_left_out(bench: JobBench) -> None:
    bench.take(ClusterView(1, 1, False, (), ("te_shell.p0", "gateway.0")))
    assert {te_of(bench.submit(f"r{i}"), AssignPrefill) for i in range(3)} == {"p1"}


def test_with_no_te_alive_the_request_fails_definitely(bench: JobBench) -> None:
    bench.take(ClusterView(1, 1, False, (), ("te_shell.p0", "te_shell.p1")))
    failed = bench.submit().one(Send, message=RequestFailed).message
    assert (failed.code, failed.definite) == ("backpressure", True)


def test_beyond_its_bound_it_takes_no_more(bench: JobBench) -> None:
    for index in range(8):
        bench.submit(f"r{index}")
    effects = bench.submit("late")
    assert effects.one(Send).message.code == "backpressure"
    assert not effects.has(Send, message=Accepted)


# ---------------------------------------------------------------- another TE


def test_a_definite_refusal_is_tried_at_each_other_te_once(bench: JobBench) -> None:
    first = te_of(bench.submit(), AssignPrefill)
    second = te_of(bench.refuse("prefill"), AssignPrefill)
    assert {first, second} == {"p0", "p1"}
    effects = bench.refuse("prefill")
    assert effects.one(Send, message=RequestFailed).message.definite
    assert not effects.has(Send, message=AssignPrefill)


def test_nobody_listening_at_a_te_is_a_refusal(bench: JobBench) -> None:
    assign = bench.submit().one(Send, message=AssignPrefill)
    again = bench.unreachable(assign.subject, assign.message).one(Send, message=AssignPrefill)
    assert again.subject != assign.subject
    effects = bench.unreachable(again.subject, again.message)
    assert effects.one(Send, message=RequestFailed).message.code == "peer_lost"


def test_a_decode_refusal_moves_the_same_kv_to_another_te(bench: JobBench) -> None:
    bench.submit()
    first = bench.prefilled()
    effects = bench.refuse("decode")
    assert te_of(effects, AssignDecode) != te_of(first, AssignDecode)
    bind, old = effects.one(Send, message=BindTransfer), first.one(Send, message=BindTransfer)
    assert bind.message.distflow != old.message.distflow
    assert bind.message.transfer_id == old.message.transfer_id


def test_refusals_of_prefill_do_not_count_against_decode(bench: JobBench) -> None:
    bench.submit()
    bench.refuse("prefill")
    bench.prefilled()
    assert bench.refuse("decode").has(Send, message=AssignDecode)


def test_late_news_about_the_prefill_leg_does_not_touch_decode(bench: JobBench) -> None:
    assign = bench.submit().one(Send, message=AssignPrefill)
    bench.prefilled()
    assert bench.unreachable(assign.subject, assign.message) == []
    assert bench.refuse("prefill") == []
    assert bench.prefilled() == []


@pytest.mark.parametrize(
    ("code", "definite"),
    [("backpressure", False), ("peer_lost", False), ("capacity_exceeded", True)],
    ids=["it may have happened", "a lost peer", "it will never fit"],
)
def test_other_failures_end_the_request_and_cancel_both_legs(
    bench: JobBench, code: str, definite: bool
) -> None:
    prefill_te = te_of(bench.submit(), AssignPrefill)
    decode_te = te_of(bench.prefilled(), AssignDecode)
    effects = bench.refuse("decode", code, definite=definite)
    failed = effects.one(Send, subject=GATEWAY).message
    assert failed == RequestFailed("r1", code, "no room", definite, "decode")
    assert cancelled_tes(effects) == [prefill_te, decode_te]
    assert effects.has(CancelTimer, name="r1")


# ---------------------------------------------------------------- leaving


def test_a_cancellation_follows_the_request_to_every_te_that_has_it(bench: JobBench) -> None:
    prefill_te = te_of(bench.submit(), AssignPrefill)
    assert cancelled_tes(bench.take(Cancel("r1", "left"))) == [prefill_te]
    bench.submit("r2")
    bench.prefilled("r2")
    assert len(cancelled_tes(bench.take(Cancel("r2", "left")))) == 2
    assert bench.take(Cancel("r2", "left")) == []


def test_a_cancellation_that_overtakes_its_request_stops_it(bench: JobBench) -> None:
    bench.take(Cancel("r1", "left"))
    assert bench.submit() == []


def test_kv_of_a_cancelled_request_does_not_wait_for_its_lease(bench: JobBench) -> None:
    bench.submit()
    bench.take(Cancel("r1", "left"))
    effects = bench.prefilled()
    assert effects == [Send("xds.act.prefill_te.p0.dp0", Cancel("r1", "cancelled"), 0)]


def test_the_budget_ends_the_request_and_its_legs(bench: JobBench) -> None:
    bench.submit()
    bench.prefilled()
    effects = bench.fire("r1")
    failed = effects.one(Send, message=RequestFailed).message
    assert (failed.code, failed.definite) == ("deadline_exceeded", False)
    assert len(cancelled_tes(effects)) == 2


def test_a_repeated_submission_is_accepted_again_and_done_once(bench: JobBench) -> None:
    bench.submit()
    effects = bench.submit()
    assert effects.one(Send).message == Accepted("r1", "job_executor.0")
    bench.take(Cancel("r1", "left"))
    assert bench.submit() == [], "it has ended"


def test_a_failed_group_reports_through_its_leg_not_by_finishing(bench: JobBench) -> None:
    bench.submit()
    assert bench.take(RequestFinished("r1", "prefill_te.p0.dp0", "transferred", 0)) == []
    bench.prefilled()
    assert bench.take(RequestFinished("r1", "decode_te.d0.dp0", "failed", 3)) == []
    assert bench.refuse("decode", "peer_lost", definite=False).has(Send, message=RequestFailed)


def test_news_about_unknown_requests_is_harmless(bench: JobBench) -> None:
    assert bench.refuse("prefill") == []
    assert bench.take(RequestFinished("r9", "decode_te.d0.dp0", "stop", 1)) == []
    assert bench.unreachable("xds.act.te_shell.p0", AssignPrefill(make_spec("r9"), "je")) == []


def test_an_unexpected_message_is_recorded(bench: JobBench) -> None:
    effects = bench.take(ReceiveDone("kv-r1", "r1", "decode_te.d0.dp0"))
    assert effects.one(Record).fields == {"kind": "ReceiveDone"}


def test_the_first_token_of_the_manifest_travels_unchanged(bench: JobBench) -> None:
    bench.submit()
    done = prefill_done()
    assign = bench.take(done).one(Send, message=AssignDecode).message
    assert (assign.first, assign.timing) == (done.first, done.timing)
    assert replace(assign.manifest, distflow=done.manifest.distflow) == done.manifest
