from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from libs import units
from libs.actor import CancelTimer, Compute, Record, Send, SetTimer, Transmit
from libs.distflow.port import SERVING_LIMITS
from libs.errors import TransferFailed
from libs.fabric import profiles
from libs.fabric.profiles import XDS_TINY
from libs.kvcache.block_pool import BlockState
from libs.model.sampling import Sampled
from libs.wire.control import Heartbeat, HeartbeatReply
from libs.wire.request import (
    BindTransfer,
    Cancel,
    LegFailed,
    PrefillDone,
    RequestFinished,
    Submit,
)
from libs.wire.tokens import CloseStream, OpenStream, StopMatched, TokensCommitted
from libs.wire.transfer import (
    AbortTransfer,
    KvGoal,
    PullKv,
    RegisterTransfer,
    TransferComplete,
    TransferFailure,
)
from libs.wire.xccl import XcclWrite
from libs.xccl.p2p import Complete, Failed, Flow, Role
from services.prefill_te.core import LEASE_NS, PrefillConfig, PrefillCore
from services.prefill_te.jobs import ExportedKv, ExportKv, PrefillJob
from tests.support.bench import Bench, Effects
from tests.support.executors import block_bytes
from tests.support.kv_peer import KvPeer
from tests.support.requests import END_TOKEN, assign_prefill, make_spec

SHELL, JE, DISTFLOW = "xds.act.te_shell.p0", "xds.act.job_executor.0", "distflow.p0.d0"
BLOCKS = 4


class PrefillBench(Bench):
    """One prefill DP group with 4 blocks of 16 rows; a default prompt takes 2 of them."""

    def __init__(self, queue_max: int = 3) -> None:
        config = PrefillConfig(
            "prefill_te.p0.dp0", "p0", 0, XDS_TINY, num_layers=3, num_blocks=BLOCKS, block_size=16,
            block_bytes=block_bytes(16), queue_max=queue_max,
        )  # fmt: skip
        self.core = PrefillCore(config)
        self.peer = KvPeer(8)
        super().__init__(self.core)

    @property
    def free(self) -> int:
        return self.core.group.pool.free_blocks

    def assign(self, request_id: str = "r1", prompt: int = 20, **other: Any) -> Effects:
        return self.take(assign_prefill(request_id, prompt, **other))

    def prefill(self, request_id: str = "r1", token: int = 40, **other: Any) -> Effects:
        job = self.assign(request_id, **other).one(Compute, job=PrefillJob)
        return self.done(job, Sampled(token))

    def bind(self, distflow: str = DISTFLOW) -> Effects:
        return self.take(BindTransfer("r1", "kv-r1", distflow))

    def pull(self, nbytes: int = 2 * block_bytes(16), event: int = 5) -> Effects:
        """A decode DP has posted its receive, and DistFlow says so."""
        goal, self.goal_owner = self.peer.expect(event, 0, nbytes)
        return self.take(PullKv("kv-r1", "decode_te.d0.dp0", goal), sender=DISTFLOW)

    def fail_transfer(self, sender: str = DISTFLOW) -> Effects:
        return self.take(TransferFailure("kv-r1", "r1", "lost"), sender=sender)


@pytest.fixture
def bench() -> PrefillBench:
    return PrefillBench()


@pytest.fixture
def leased(bench: PrefillBench) -> PrefillBench:
    bench.prefill()
    return bench


@pytest.fixture
def bound(leased: PrefillBench) -> PrefillBench:
    leased.bind()
    return leased


KV = np.arange(2 * block_bytes(16), dtype=np.uint32).astype(np.uint8)
EXPORTED = ExportedKv(KV)
#: Of a pull that nobody waits for.
NOWHERE = KvGoal(die=8, life=1, event=1, offset=0, nbytes=KV.nbytes, generation=1)


def finished(effects: Effects) -> RequestFinished:
    message: RequestFinished = effects.one(Send, subject=SHELL, message=RequestFinished).message
    return message


# ---------------------------------------------------------------- the usual way


def test_a_prompt_is_computed_at_once_when_the_group_is_free(bench: PrefillBench) -> None:
    effects = bench.assign(budget_ns=units.s(9))
    compute = effects.one(Compute, job=PrefillJob)
    assert compute.cost_ns == profiles.prefill_ns(XDS_TINY, 20)
    assert compute.paced
    assert len(compute.job.block_ids) == 2
    assert effects.has(SetTimer, name="r1", delay_ns=units.s(9))


def test_the_first_token_is_streamed_and_the_kv_leased(bench: PrefillBench) -> None:
    effects = bench.prefill(token=40)
    output = [send.message for send in effects.all(Send, subject="xds.act.output.p0.dp0")]
    assert [type(message) for message in output] == [OpenStream, TokensCommitted, CloseStream]
    assert (output[1].rows[0].index, output[1].rows[0].token) == (0, 40)
    done: PrefillDone = effects.one(Send, subject=JE).message
    assert (done.finish_reason, done.manifest.blocks, done.manifest.rows) == (None, 2, 20)
    assert bench.core.group.pool.count(BlockState.LEASED) == 2
    assert effects.has(SetTimer, name="r1", delay_ns=LEASE_NS)


def test_bound_the_group_registers_and_pulled_it_sends_into_the_decode_dies_memory(
    leased: PrefillBench,
) -> None:
    register = leased.bind().one(Send, subject=f"xds.act.{DISTFLOW}").message
    assert register == RegisterTransfer("kv-r1", "r1", "prefill_te.p0.dp0", 0, 20, 2)
    export = leased.pull().one(Compute, job=ExportKv)
    assert export.cost_ns == 0
    effects = leased.done(export, EXPORTED)
    writes = effects.all(Transmit, target=8, message=XcclWrite)
    data = 20 * XDS_TINY.kv_token_bytes
    assert writes[0].charge_bytes == data, "what the prompt's rows weigh"
    assert sum(write.charge_bytes for write in writes[1:]) < 200, "a header, a tail"
    assert leased.core.group.pool.count(BlockState.IN_TRANSFER) == 2
    leased.peer.exchange(leased, effects)
    (ended,) = leased.peer.ended
    assert isinstance(ended.outcome, Complete)
    assert leased.peer.kv.view(leased.goal_owner).tobytes() == KV.tobytes()


def test_the_blocks_are_kept_until_the_transfer_is_complete(bound: PrefillBench) -> None:
    export = bound.pull().one(Compute)
    bound.done(export, EXPORTED)
    assert bound.free == BLOCKS - 2
    effects = bound.take(TransferComplete("kv-r1", "r1"), sender=DISTFLOW)
    assert finished(effects).reason == "transferred"
    assert bound.free == BLOCKS


@pytest.mark.parametrize(
    ("token", "max_tokens", "reason"),
    [(END_TOKEN, 8, "stop"), (40, 1, "length")],
    ids=["end token", "budget of one"],
)
def test_a_request_that_its_first_token_ends_leaves_no_kv_behind(
    bench: PrefillBench, token: int, max_tokens: int, reason: str
) -> None:
    effects = bench.prefill(token=token, max_tokens=max_tokens)
    assert effects.one(Send, subject=JE).message.finish_reason == reason
    assert not effects.has(Send, message=CloseStream), "its own output process ends the stream"
    assert bench.free == BLOCKS


# ---------------------------------------------------------------- queue and blocks


def test_one_prompt_at_a_time_in_order_of_arrival(bench: PrefillBench) -> None:
    first = bench.assign("r1").one(Compute)
    assert not bench.assign("r2").has(Compute)
    second = bench.done(first, Sampled(40)).one(Compute, job=PrefillJob)
    assert second.at_ns == first.cost_ns, "it starts when the die is free"


def test_a_prompt_waits_for_blocks_and_starts_when_they_are_freed(bench: PrefillBench) -> None:
    bench.prefill("r1")
    assert not bench.assign("large", prompt=60).has(Compute)
    assert not bench.assign("small", prompt=4).has(Compute), "first come, first served"
    effects = bench.take(Cancel("r1", "left"))
    assert len(effects.one(Compute, job=PrefillJob).job.block_ids) == 4


def test_a_full_queue_refuses_definitely_and_tells_the_shell(bench: PrefillBench) -> None:
    for index in range(4):
        bench.assign(f"r{index}")
    effects = bench.assign("late")
    failed = effects.one(Send, subject=JE).message
    assert (failed.code, failed.definite) == ("backpressure", True)
    assert finished(effects).reason == "refused"


def test_a_prompt_that_can_never_fit_is_refused_for_good(bench: PrefillBench) -> None:
    effects = bench.assign(prompt=16 * BLOCKS + 1)
    assert effects.one(Send, subject=JE).message.code == "capacity_exceeded"


def test_a_repeated_assignment_is_ignored(bench: PrefillBench) -> None:
    bench.assign()
    assert bench.assign() == []


# ---------------------------------------------------------------- cancellation in every stage


def test_cancelled_in_the_queue_it_never_runs(bench: PrefillBench) -> None:
    running = bench.assign("r0").one(Compute)
    bench.assign("r1")
    assert finished(bench.take(Cancel("r1", "left"))).reason == "cancelled"
    assert not bench.done(running, Sampled(40)).has(Compute)


def test_cancelled_while_running_its_blocks_are_free_at_the_end(bench: PrefillBench) -> None:
    running = bench.assign().one(Compute)
    assert bench.take(Cancel("r1", "left")) == []
    assert bench.free == BLOCKS - 2, "the executor still writes there"
    effects = bench.done(running, Sampled(40))
    assert finished(effects).reason == "cancelled"
    assert not effects.has(Send, subject=JE)
    assert not effects.has(Send, message=TokensCommitted)
    assert bench.free == BLOCKS


def test_cancelled_on_lease_before_it_was_bound_nobody_else_is_told(leased: PrefillBench) -> None:
    assert not leased.take(Cancel("r1", "left")).has(Send, message=AbortTransfer)
    assert leased.free == BLOCKS


def test_cancelled_after_binding_the_transfer_is_aborted(bound: PrefillBench) -> None:
    effects = bound.take(Cancel("r1", "left"))
    assert effects.one(Send, message=AbortTransfer).subject == f"xds.act.{DISTFLOW}"
    assert bound.free == BLOCKS


def test_cancelled_while_sending_nothing_more_is_sent(bound: PrefillBench) -> None:
    export = bound.pull().one(Compute)
    bound.take(Cancel("r1", "left"))
    assert bound.free == BLOCKS
    assert bound.done(export, EXPORTED) == []
    assert bound.core.group.sender.kv.arena.can_take(BLOCKS * block_bytes(16)), "all of it"


def test_a_completion_that_overtakes_the_last_ack_does_not_stop_the_message(
    bound: PrefillBench,
) -> None:
    """Control messages and frames travel apart; a session must not be given up for that."""
    sent = bound.done(bound.pull().one(Compute), EXPORTED)
    effects = bound.take(TransferComplete("kv-r1", "r1"), sender=DISTFLOW)
    assert not effects.has(Transmit)
    assert bound.free == BLOCKS
    port = bound.core.group.sender.kv.port
    assert not port.endpoint.idle(Flow(8, Role.SEND)), "it waits for its ACK"
    bound.peer.exchange(bound, sent)
    assert isinstance(bound.peer.ended[-1].outcome, Complete)
    assert port.endpoint.idle(Flow(8, Role.SEND))
    assert not port.endpoint.refused
    assert bound.core.group.sender.kv.arena.taken_bytes == 0


def test_cancelled_with_writes_under_way_the_decode_side_is_told_and_the_memory_free(
    bound: PrefillBench,
) -> None:
    sent = bound.done(bound.pull().one(Compute), EXPORTED)
    effects = bound.take(Cancel("r1", "left"))
    bound.peer.exchange(bound, [sent.all(Transmit)[-1], *effects])
    assert isinstance(bound.peer.ended[-1].outcome, Failed)
    assert bound.core.group.sender.kv.arena.can_take(BLOCKS * block_bytes(16))


def test_a_decode_side_that_expects_another_amount_gets_nothing(bound: PrefillBench) -> None:
    effects = bound.pull(nbytes=block_bytes(16))
    failed = effects.one(Send, subject=JE, message=LegFailed).message
    assert failed.code == "transfer_failed"
    assert "takes 192 bytes of KV, 384 are here" in failed.reason
    assert effects.has(Send, message=AbortTransfer)
    assert not effects.has(Compute)


def test_a_decode_side_that_never_answers_fails_the_leg_with_its_step(bound: PrefillBench) -> None:
    bound.done(bound.pull().one(Compute), EXPORTED)
    for _ in range(SERVING_LIMITS.retransmits_max):
        assert bound.fire("xccl:8:send").has(Record, name="xccl_repeated")
    effects = bound.fire("xccl:8:send")
    failed = effects.one(Send, subject=JE, message=LegFailed).message
    assert (failed.code, failed.definite) == ("transfer_failed", False)
    assert "no progress" in failed.reason
    assert effects.has(Send, message=AbortTransfer)
    assert bound.free == BLOCKS


def test_a_decode_process_of_another_life_takes_no_write_of_this_transfer(
    bound: PrefillBench,
) -> None:
    sent = bound.done(bound.pull().one(Compute), EXPORTED)
    reborn = KvPeer(8, life=2)
    reborn.expect(5, 0, KV.nbytes)
    assert reborn.exchange(bound, sent) == []
    assert reborn.kv.port.endpoint.refused["stale_epoch"] > 0


def test_without_memory_for_the_copy_the_next_transfer_waits(bound: PrefillBench) -> None:
    arena = bound.core.group.sender.kv.arena
    arena.take("somebody", BLOCKS * block_bytes(16) - 100)
    assert not bound.pull().has(Compute)
    arena.give_back("somebody")
    assert bound.take(StopMatched("r9", 0)).has(Compute, job=ExportKv), "at the next event"


def test_a_cancellation_that_overtakes_its_request_stops_it(bench: PrefillBench) -> None:
    bench.take(Cancel("r1", "left"))
    effects = bench.assign()
    assert finished(effects).reason == "cancelled"
    assert not effects.has(Compute)


# ---------------------------------------------------------------- deadlines and failures


@pytest.mark.parametrize("stage", ["queued", "leased", "sending"])
def test_a_deadline_ends_the_request_names_the_stage_and_frees_the_blocks(
    bench: PrefillBench, stage: str
) -> None:
    if stage == "queued":
        bench.assign("r0", prompt=60)
        bench.assign("r1")
    else:
        bench.prefill()
        bench.bind()
    if stage == "sending":
        bench.pull()
    effects = bench.fire("r1")
    failed = effects.one(Send, subject=JE, message=LegFailed).message
    assert failed.code == "deadline_exceeded"
    assert stage in failed.reason
    assert failed.definite is (stage == "queued")
    assert effects.has(Send, message=AbortTransfer) is (stage != "queued")
    assert bench.core.group.pool.get("r1") is None


def test_a_deadline_while_running_takes_effect_at_the_end(bench: PrefillBench) -> None:
    running = bench.assign().one(Compute)
    assert bench.fire("r1") == []
    effects = bench.done(running, Sampled(40))
    assert effects.one(Send, subject=JE).message.code == "deadline_exceeded"
    assert bench.free == BLOCKS


def test_a_failed_transfer_fails_the_leg(bound: PrefillBench) -> None:
    failed = bound.fail_transfer().one(Send, subject=JE).message
    assert (failed.code, failed.definite) == ("transfer_failed", False)
    assert bound.free == BLOCKS


def test_a_pairing_that_was_given_up_cannot_take_the_kv_away(bound: PrefillBench) -> None:
    effects = bound.bind("distflow.p0.d1")
    assert effects.one(Send, subject=f"xds.act.{DISTFLOW}").message == AbortTransfer(
        "kv-r1", "r1", "prefill", "bound elsewhere"
    )
    assert effects.has(Send, subject="xds.act.distflow.p0.d1", message=RegisterTransfer)
    assert bound.fail_transfer(sender=DISTFLOW) == []
    assert bound.fail_transfer(sender="distflow.p0.d1").has(Send, message=LegFailed)


def test_kv_that_is_gone_is_aborted_where_it_was_promised(bench: PrefillBench) -> None:
    effects = bench.bind()
    assert effects.one(Send, subject=f"xds.act.{DISTFLOW}", message=AbortTransfer)


def test_an_executor_that_fails_fails_the_leg_and_frees_the_group(bench: PrefillBench) -> None:
    running = bench.assign("r1").one(Compute)
    bench.assign("r2")
    effects = bench.done(running, TransferFailed("disk"))
    assert effects.one(Send, subject=JE).message.code == "transfer_failed"
    assert effects.one(Compute, job=PrefillJob).at_ns == bench.now_ns


@pytest.mark.parametrize(
    "message",
    [
        PullKv("kv-unknown", "decode_te.d0.dp0", NOWHERE),
        TransferComplete("kv-r9", "r9"),
        TransferFailure("kv-r9", "r9", "late"),
        StopMatched("r1", 0),
    ],
    ids=lambda message: type(message).__name__,
)
def test_late_and_foreign_messages_change_nothing(bound: PrefillBench, message: Any) -> None:
    assert bound.take(message) == []
    assert bound.core.group.pool.count(BlockState.LEASED) == 2


def test_a_second_pull_sends_nothing_twice(bound: PrefillBench) -> None:
    bound.pull()
    assert bound.pull(event=6) == []


# ---------------------------------------------------------------- company


def test_a_beat_is_answered_with_blocks_that_add_up(leased: PrefillBench) -> None:
    state = leased.take(Heartbeat(3), sender="te_shell.p0").one(Send, message=HeartbeatReply)
    kv = state.message.state.kv
    assert kv.total == kv.free + kv.held + kv.leased + kv.in_transfer + kv.quarantined
    assert (kv.leased, state.message.state.phase) == (2, "idle")


def test_an_unexpected_message_is_recorded(bench: PrefillBench) -> None:
    assert bench.take(Submit(make_spec())).one(Record).fields == {"kind": "Submit"}
    assert not bench.take(Submit(make_spec())).has(CancelTimer)
