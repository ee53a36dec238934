from __future__ import annotations

import asyncio
import threading
from typing import Any

import numpy as np
import pytest

from libs import units
from libs.actor import (
    CancelTimer,
    Compute,
    ComputeDone,
    Deliver,
    Effect,
    Event,
    Present,
    Received,
    Reply,
    Send,
    SetTimer,
    TimerFired,
    Transmit,
    Unreachable,
)
from libs.bus.api import Lane
from libs.errors import InvariantError, LocalProtocolError, TransferFailed
from libs.fabric.params import UB
from libs.fabric.sharding import Sharding
from libs.runtime.asyncio_host import HostOptions
from libs.wire.codec import decode_frame, encode_frame
from libs.wire.control import Refused
from libs.wire.envelope import Envelope
from libs.wire.expert import E2A
from libs.wire.fabric import UbDelivery, UbFrame
from libs.wire.request import Cancel
from tests.support.world import ANSWER, LEFT, NAME, Doubler, World, nothing, on_start, seen, until

# ---------------------------------------------------------------- messages


async def test_a_message_arrives_with_its_stamp_and_its_senders_identity(world: World) -> None:
    host = await world.host(nothing)
    world.tell(LEFT, at_ns=700)
    await until(lambda: len(seen(host)) == 2)
    event = seen(host)[1]
    assert event == Received(700, LEFT, "echo.b", 2, 1)


async def test_effects_leave_in_order_with_stamps_and_identity(world: World) -> None:
    await world.listen("xds.act.echo.b")
    sends = [Send("xds.act.echo.b", Cancel(f"r{i}", "left"), at_ns=100 * i) for i in range(5)]
    await world.host(on_start(*sends), options=HostOptions(incarnation=3, epoch=2))
    await until(lambda: len(world.heard) == 5)
    assert [body.request_id for _, _, body in world.heard] == [f"r{i}" for i in range(5)]
    envelope = world.heard[4][1]
    assert (envelope.sender, envelope.incarnation, envelope.epoch) == (NAME, 3, 2)
    assert envelope.at_ns == 400 + UB.control_latency_ns


async def test_a_question_is_answered(world: World) -> None:
    def react(event: Event) -> list[Effect]:
        return [Reply(event.reply_to, LEFT)] if isinstance(event, Received) else []

    await world.host(react)
    frame = encode_frame(Envelope("echo.b", 1, 1, 0), Cancel("r9", "why"))
    answer = await world.client.request(f"xds.act.{NAME}", frame, timeout_s=1.0)
    assert decode_frame(answer)[1] == LEFT


async def test_frames_go_to_the_emulators_shard_in_their_own_lane(world: World) -> None:
    await world.listen("xds.fabric.*", Lane.BULK)
    transmit = Transmit(4, 7, ANSWER, charge_bytes=999, repeat=3, at_ns=50)
    await world.host(on_start(transmit), options=HostOptions(sharding=Sharding(2)))
    await until(lambda: bool(world.heard))
    subject, _, frame = world.heard[0]
    assert subject == "xds.fabric.1"
    assert isinstance(frame, UbFrame)
    assert (frame.source, frame.target, frame.depart_ns, frame.charge_bytes, frame.repeat) == (
        4, 7, 50, 999, 3,
    )  # fmt: skip
    assert isinstance(decode_frame(frame.payload.data)[1], E2A)
    assert world.client.statistics()[Lane.BULK].delivered == 1


async def test_a_delivered_frame_is_unwrapped_and_stamped_by_the_fabric(world: World) -> None:
    host = await world.host(nothing, options=HostOptions(dies=(5,)))
    inner = encode_frame(Envelope("expert_die.d0.e0", 1, 1, 10), ANSWER)
    world.tell(UbDelivery(0, 5, 900, np.frombuffer(inner, np.uint8)), 0, "xds.ub.5")
    await until(lambda: len(seen(host)) == 2)
    event = seen(host)[1]
    assert isinstance(event, Received)
    assert (event.at_ns, event.sender) == (900, "expert_die.d0.e0")
    assert isinstance(event.message, E2A)


async def test_the_fabric_delivers_with_its_own_stamp(world: World) -> None:
    await world.listen("xds.ub.5", Lane.BULK)
    delivery = UbDelivery(0, 5, 900, np.zeros(4, np.uint8))
    await world.host(on_start(Deliver("xds.ub.5", delivery, 900)))
    await until(lambda: bool(world.heard))
    assert world.heard[0][1].at_ns == 900


async def test_a_probe_that_finds_nobody_comes_back(world: World) -> None:
    host = await world.host(on_start(Send("xds.act.nobody", LEFT, probe=True)))
    await until(lambda: len(seen(host)) == 2)
    event = seen(host)[1]
    assert isinstance(event, Unreachable)
    assert (event.subject, event.message) == ("xds.act.nobody", LEFT)


async def test_a_probe_that_arrives_is_an_ordinary_message(world: World) -> None:
    await world.listen("xds.act.echo.b")
    host = await world.host(on_start(Send("xds.act.echo.b", LEFT, probe=True)))
    await until(lambda: bool(world.heard))
    await world.client.flush()
    assert len(seen(host)) == 1


# ---------------------------------------------------------------- bad input and lost messages


async def test_a_malformed_frame_is_counted_answered_and_survived(world: World) -> None:
    host = await world.host(nothing)
    answer = await world.client.request(f"xds.act.{NAME}", b"not a frame at all", timeout_s=1.0)
    refused = decode_frame(answer)[1]
    assert isinstance(refused, Refused)
    assert (refused.code, refused.definite) == ("bad_magic", True)
    world.client.publish(f"xds.act.{NAME}", b"")
    world.tell(LEFT)
    await until(lambda: len(seen(host)) == 2)
    assert host.decode_errors == 2
    assert [record.name for record in world.facts.records] == ["frame_refused", "frame_refused"]


async def test_a_malformed_frame_inside_a_delivery_is_refused_too(world: World) -> None:
    host = await world.host(nothing, options=HostOptions(dies=(5,)))
    world.tell(UbDelivery(0, 5, 900, np.zeros(40, np.uint8)), 0, "xds.ub.5")
    await until(lambda: host.decode_errors == 1)
    assert len(seen(host)) == 1


async def test_a_message_that_cannot_leave_is_lost_and_the_rest_is_still_carried_out(
    world: World,
) -> None:
    def react(event: Event) -> list[Effect]:
        match event:
            case TimerFired(name="beat"):
                sends: list[Effect] = [
                    Send("xds.act.echo.b", LEFT), Send("xds.act.echo.b", ANSWER)
                ]  # fmt: skip
                return [*sends, SetTimer("again", units.ms(1))]
            case _:
                return []

    host = await world.host(react)
    world.broker.crash()
    host.feed(TimerFired(0, "beat"))
    await until(lambda: TimerFired(0, "again") in seen(host))
    assert host.messages_lost >= 1
    lost = [record for record in world.facts.records if record.name == "message_lost"]
    assert lost[0].fields == {"subject": "xds.act.echo.b", "code": "disconnected"}


# ---------------------------------------------------------------- timers, on real time


async def test_a_timer_fires_on_real_time_whatever_the_pace(world: World) -> None:
    host = await world.host(on_start(SetTimer("t", units.ms(20))), pace=1_000.0)
    assert len(seen(host)) == 1
    await until(lambda: len(seen(host)) == 2)
    assert isinstance(seen(host)[1], TimerFired)


async def test_a_rearmed_timer_fires_once_and_a_cancelled_one_never(world: World) -> None:
    effects = (
        SetTimer("t", units.ms(1)), SetTimer("t", units.ms(10)),
        SetTimer("gone", units.ms(1)), CancelTimer("gone"), CancelTimer("unarmed"),
        SetTimer("last", units.ms(30)),
    )  # fmt: skip
    host = await world.host(on_start(*effects))
    await until(lambda: any(getattr(event, "name", "") == "last" for event in seen(host)))
    names = [event.name for event in seen(host) if isinstance(event, TimerFired)]
    assert names == ["t", "last"]


# ---------------------------------------------------------------- computing


@pytest.mark.parametrize("inline", [False, True])
async def test_a_job_runs_and_its_end_is_stamped_by_its_cost(world: World, inline: bool) -> None:
    executor = Doubler()
    effects = (Compute(1, 21, 100, at_ns=40), Compute(2, 5, 10, at_ns=50))
    host = await world.host(
        on_start(*effects), executor=executor, options=HostOptions(inline=inline)
    )
    await until(lambda: len(seen(host)) == 3)
    assert seen(host)[1:] == [ComputeDone(140, 1, 42), ComputeDone(150, 2, 10)]
    in_loop = threading.current_thread().name
    assert [name == in_loop for name in executor.threads] == [inline, inline]


@pytest.mark.parametrize("inline", [False, True])
async def test_an_operating_error_of_the_executor_is_a_result(world: World, inline: bool) -> None:
    host = await world.host(on_start(Compute(1, None, 0)), options=HostOptions(inline=inline))
    await until(lambda: len(seen(host)) == 2)
    event = seen(host)[1]
    assert isinstance(event, ComputeDone)
    assert isinstance(event.result, TransferFailed)


@pytest.mark.parametrize("inline", [False, True])
async def test_any_other_exception_of_the_executor_ends_the_host(
    world: World, inline: bool
) -> None:
    host = await world.host(on_start(Compute(1, "word", 0)), options=HostOptions(inline=inline))
    with pytest.raises(InvariantError, match=r"echo.a: executor failed on str") as caught:
        await asyncio.wait_for(host.wait(), 1.0)
    assert isinstance(caught.value.__cause__, ValueError)


async def test_a_paced_end_waits_for_the_wall_clock_and_an_unpaced_one_does_not(
    world: World,
) -> None:
    started = asyncio.get_running_loop().time()
    effects = (Compute(1, 1, units.ms(60), paced=True), Compute(2, 2, units.ms(600), paced=False))
    host = await world.host(on_start(*effects), pace=1.0)
    await until(lambda: len(seen(host)) == 3)
    jobs = [event.job_id for event in seen(host) if isinstance(event, ComputeDone)]
    assert jobs == [2, 1]
    assert asyncio.get_running_loop().time() - started >= 0.055


async def test_how_far_the_machine_is_behind_is_measured(world: World) -> None:
    host = await world.host(nothing, pace=1.0)
    assert host.lag_ns == 0
    host._carry_out(Compute(1, 1, 0, at_ns=0, paced=True))
    await asyncio.sleep(0.01)
    await until(lambda: len(seen(host)) == 2)
    assert host.lag_ns > 0


# ---------------------------------------------------------------- what people see


async def test_what_is_shown_is_held_until_its_time_and_comes_in_order(world: World) -> None:
    host = await world.host(nothing, pace=1.0)
    shown: list[tuple[Any, int]] = []
    host.on_present(lambda _key, item, _at_ns: shown.append((item, host.clock.now_ns())))
    now = host.clock.now_ns()
    times = [units.ms(40), units.ms(20), units.ms(20), 0, units.ms(40)]
    for number, later_ns in enumerate(times):
        host._carry_out(Present("r1", number, now + later_ns))
    assert [item for item, _ in shown] == [3], "only what is due"
    await until(lambda: len(shown) == len(times))
    assert [item for item, _ in shown] == [3, 1, 2, 0, 4]
    assert all(at_ns >= now + times[item] - units.ms(1) for item, at_ns in shown)


async def test_without_pace_everything_is_shown_at_once(world: World) -> None:
    host = await world.host(nothing)
    shown: list[Any] = []
    host.on_present(lambda _key, item, _at_ns: shown.append(item))
    host._carry_out(Present("r1", "far ahead", units.s(1_000)))
    assert shown == ["far ahead"]


# ---------------------------------------------------------------- the end


def contradict(event: Event) -> list[Effect]:
    if isinstance(event, Received):
        raise AssertionError("impossible")
    return []


async def test_a_core_that_contradicts_itself_ends_the_host_with_its_story(world: World) -> None:
    host = await world.host(contradict)
    world.tell(LEFT)
    with pytest.raises(InvariantError, match=r"echo.a failed on cancel from echo.b"):
        await asyncio.wait_for(host.wait(), 1.0)
    host.feed(TimerFired(0, "t"))
    assert len(seen(host)) == 2, "a core that contradicted itself must not go on"


async def test_a_message_that_cannot_be_encoded_is_our_bug_and_ends_the_host(
    world: World,
) -> None:
    bad: Any = Cancel("r1", reason=5)  # type: ignore[arg-type]
    host = await world.host(lambda e: [Send("xds.act.b", bad)] if isinstance(e, Received) else [])
    world.tell(LEFT)
    with pytest.raises(LocalProtocolError, match=r"cancel\.reason"):
        await asyncio.wait_for(host.wait(), 1.0)


async def test_after_the_stop_nothing_happens_any_more(world: World) -> None:
    effects = (SetTimer("t", units.ms(5)), Compute(1, 1, units.ms(10), at_ns=0, paced=True))
    host = await world.host(on_start(*effects), pace=1.0)
    shown: list[Any] = []
    host.on_present(lambda _key, item, _at_ns: shown.append(item))
    host._carry_out(Present("r1", "late", host.clock.now_ns() + units.ms(10)))
    world.hosts.remove(host)
    await host.stop()
    await asyncio.sleep(0.03)
    assert len(seen(host)) == 1
    assert shown == []


async def test_an_event_from_the_edge_is_stamped_by_the_paced_wall_clock(world: World) -> None:
    host = await world.host(nothing, pace=0.001)
    await asyncio.sleep(0.002)
    host.outside(LEFT)
    event = seen(host)[1]
    assert isinstance(event, Received)
    assert event.sender == "outside"
    assert event.at_ns >= units.s(2)
