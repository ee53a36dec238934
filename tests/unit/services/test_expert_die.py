from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from libs.actor import Compute, Record, Send, Transmit
from libs.config.plan import ExpertPlacement
from libs.errors import BadInput
from libs.fabric.params import UB
from libs.fabric.profiles import XDS_TINY, expert_ns
from libs.wire.control import Heartbeat, HeartbeatReply
from libs.wire.expert import A2E, E2A, A2ERefused
from libs.wire.request import Cancel
from services.expert_die import core as module
from services.expert_die.core import ExpertDieConfig, ExpertDieCore
from tests.support.bench import Bench

DIE = 9
PARTIAL = np.zeros((2, 4), np.float32)


@pytest.fixture
def bench() -> Bench:
    placement = ExpertPlacement(3, (9, 10), (9, 10, 9, 10, 10))
    return Bench(ExpertDieCore("expert_die.d0.e0", ExpertDieConfig(DIE, "d0", placement, XDS_TINY)))


def item(work_id: int = 1, **other: Any) -> A2E:
    """Two rows with two choices each; three of the four fall on this die's experts 0 and 2."""
    made = A2E(
        work_id, layer=1, epoch=1, map_version=3, source_dp="decode_te.d0.dp0", source_die=8,
        repeat=5, rows=np.zeros((2, 4), np.int8), scale=np.ones((2, 1), np.float32),
        topk_idx=np.array([[0, 2], [2, 3]], np.int32),
        topk_weights=np.ones((2, 2), np.float32),
    )  # fmt: skip
    return replace(made, **other)


def refusal(bench: Bench, message: A2E) -> A2ERefused:
    sent = bench.take(message).one(Send)
    assert sent.subject == "xds.act.decode_te.d0.dp0"
    answer: A2ERefused = sent.message
    assert (answer.work_id, answer.layer, answer.die) == (message.work_id, message.layer, DIE)
    return answer


def test_rows_are_computed_for_the_experts_that_live_here_and_charged_by_choice(
    bench: Bench,
) -> None:
    compute = bench.take(item(), at_ns=700).one(Compute)
    assert compute.job.experts == (0, 2)
    assert compute.cost_ns == expert_ns(XDS_TINY, 5, rows=3, slots=1)
    assert compute.at_ns == 700, "by the item's own stamp"


def test_partial_sums_go_back_to_where_the_rows_came_from(bench: Bench) -> None:
    compute = bench.take(item()).one(Compute)
    frame = bench.done(compute, PARTIAL).one(Transmit)
    assert (frame.source, frame.target, frame.repeat) == (DIE, 8, 5)
    answer: E2A = frame.message
    assert (answer.work_id, answer.layer, answer.die, answer.epoch) == (1, 1, DIE, 1)
    assert frame.charge_bytes == 5 * 2 * XDS_TINY.e2a_row_bytes
    assert frame.at_ns == compute.cost_ns + 2 * 5 * UB.e2a_stage_ns


def test_items_of_different_groups_are_answered_in_the_order_they_are_done(bench: Bench) -> None:
    first = bench.take(item(1)).one(Compute)
    second = bench.take(item(2, source_die=7)).one(Compute)
    assert bench.done(second, PARTIAL).one(Transmit).message.work_id == 2
    assert bench.done(first, PARTIAL).one(Transmit).target == 8


def test_a_repeated_item_is_answered_again(bench: Bench) -> None:
    for _ in range(2):
        compute = bench.take(item()).one(Compute)
        assert bench.done(compute, PARTIAL).one(Transmit).message.work_id == 1


@pytest.mark.parametrize(
    ("message", "code", "reason"),
    [
        (item(epoch=2), "stale_epoch", "epoch 2, here 1"),
        (item(map_version=2), "stale_map", "map version 2, here 3"),
        (item(topk_idx=np.zeros((3, 2), np.int32)), "malformed", "rows (2, 4), routes (3, 2)"),
        (item(topk_weights=np.ones((2, 1), np.float32)), "malformed", ""),
        (item(rows=np.zeros(2, np.int8)), "malformed", "rows (2,)"),
        (item(rows=np.array(1, np.int8)), "malformed", "rows ()"),
        (item(repeat=0), "malformed", "repeat 0"),
        (item(repeat=-4), "malformed", "repeat -4"),
    ],
    ids=[
        "epoch",
        "map",
        "heights",
        "weights",
        "flat rows",
        "scalar",
        "no layers",
        "less than none",
    ],
)
def test_what_cannot_be_computed_is_refused_with_its_reason(
    bench: Bench, message: A2E, code: str, reason: str
) -> None:
    answer = refusal(bench, message)
    assert answer.code == code
    assert reason in answer.reason


def test_a_full_backlog_pushes_back_until_something_is_done(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "BACKLOG_MAX", 1)
    compute = bench.take(item(1)).one(Compute)
    assert refusal(bench, item(2)).code == "backpressure"
    bench.done(compute, PARTIAL)
    assert bench.take(item(2)).has(Compute)


def test_an_executor_that_refuses_is_passed_on(bench: Bench) -> None:
    compute = bench.take(item()).one(Compute)
    sent = bench.done(compute, BadInput("no experts for layer 0")).one(Send)
    assert (sent.message.code, sent.message.reason) == ("bad_input", "no experts for layer 0")


def test_it_says_whether_it_computes(bench: Bench) -> None:
    bench.take(item())
    reply = bench.take(Heartbeat(1), sender="te_shell.d0").one(Send, message=HeartbeatReply)
    assert reply.message.state.phase == "computing"


def test_an_unexpected_message_is_recorded(bench: Bench) -> None:
    assert bench.take(Cancel("r1", "lost")).one(Record).fields == {"kind": "Cancel"}
