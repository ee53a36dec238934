"""Frames past the broker: through shared memory to the shard beside the owner of the die."""

from __future__ import annotations

import asyncio
import tempfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from libs.actor import Effect, Event, Received, Transmit
from libs.bus.api import Lane
from libs.bus.memory import MemoryBus
from libs.carrier.outbound import OUTBOX_FRAMES_MAX
from libs.carrier.ring import RingLayout
from libs.carrier.segment import ShmPlan, make_segments
from libs.carrier.shm import ShmCarrier
from libs.carrier.waybill import read_waybill, with_waybill
from libs.clock.pod_clock import PodClock, wall_ns
from libs.errors import RemoteProtocolError, StaleEpoch
from libs.fabric.params import UB
from libs.fabric.sharding import Sharding
from libs.runtime.asyncio_host import AsyncioHost, HostOptions
from libs.runtime.shortcut import Shortcut
from libs.wire.codec import encode_frame
from libs.wire.envelope import Envelope
from libs.wire.expert import E2A
from libs.wire.fabric import UbFrame
from services.fabric_emulator.core import FabricEmulatorCore
from tests.support.cores import ScriptCore
from tests.support.world import ANSWER, LEFT, World, seen, until

HERE, NEAR, FAR = 5, 3, 7
#: The largest frame that a ring takes is 16 KiB.
LAYOUT = RingLayout(slots=4, slot_bytes=4096)
FRAME = Transmit(HERE, NEAR, ANSWER, charge_bytes=196_000, at_ns=1_000)
LARGE = E2A(1, 0, 1, 0, np.zeros((16, 1024), np.float32))


@pytest.fixture
def shm() -> Iterator[ShmPlan]:
    with (
        tempfile.TemporaryDirectory(dir="/dev/shm") as root,
        make_segments([HERE, NEAR], root=Path(root), layout=LAYOUT) as plan,
    ):
        yield plan


async def start_die(
    world: World, die: int, shm: ShmPlan | None, *effects: Effect
) -> tuple[AsyncioHost, AsyncioHost]:
    """Owner and shard of one die as one process has them; told `LEFT`, the owner has `effects`."""

    def react(event: Event) -> list[Effect]:
        told = isinstance(event, Received) and event.message == LEFT
        return list(effects) if told else []

    bus = await MemoryBus.connect(world.broker)
    clock = PodClock(wall_ns(), 0.0)
    options = HostOptions(dies=(die,), sharding=Sharding(per_die=True))
    owner = AsyncioHost(
        ScriptCore(f"owner.{die}", react), bus, clock, options=options, sink=world.facts
    )
    core = FabricEmulatorCore(f"fabric_emulator.d{die}", 16)
    shard = AsyncioHost(core, bus, clock, options=replace(options, dies=()), sink=world.facts)
    shortcut = Shortcut(die, None if shm is None else ShmCarrier(shm, die))
    for host in (owner, shard):
        host.shortcut = shortcut
        world.hosts.append(host)
        await host.start()
    shortcut.start(owner, shard, asyncio.get_running_loop())
    return owner, shard


def frames(host: AsyncioHost) -> list[Received]:
    """The frames that the core of `host` was given."""
    return [e for e in seen(host) if isinstance(e, Received) and isinstance(e.message, E2A)]


async def carried(world: World, shm: ShmPlan | None, frame: Transmit = FRAME) -> Received:
    """One frame from die to die; the broker's part of it is in `world.heard`."""
    await world.listen("xds.fabric.*", Lane.BULK)
    await world.listen("xds.ub.*", Lane.BULK)
    sender, _ = await start_die(world, HERE, shm, frame)
    receiver, _ = await start_die(world, NEAR, shm)
    sender.outside(LEFT)
    await until(lambda: bool(frames(receiver)))
    (event,) = frames(receiver)
    return event


@pytest.mark.parametrize("short", [True, False])
async def test_both_ways_are_stamped_by_the_shard_beside_the_owner(
    world: World, shm: ShmPlan, short: bool
) -> None:
    event = await carried(world, shm if short else None)
    on_the_link_ns = 1_000  # 196 KB at 196 GB/s
    assert event.at_ns == 1_000 + UB.ub_latency_ns + on_the_link_ns
    assert event.sender == "owner.5"
    by_broker = [subject for subject, _, _ in world.heard]
    assert by_broker == ([] if short else ["xds.fabric.d3"]), "its delivery never needs one"


async def test_many_frames_of_a_pair_keep_their_order(world: World, shm: ShmPlan) -> None:
    numbered = [replace(FRAME, message=replace(ANSWER, work_id=i)) for i in range(200)]
    sender, _ = await start_die(world, HERE, shm, *numbered)
    receiver, _ = await start_die(world, NEAR, shm)
    sender.outside(LEFT)
    await until(lambda: len(frames(receiver)) == 200)
    assert [event.message.work_id for event in frames(receiver)] == list(range(200))
    stamps = [event.at_ns for event in frames(receiver)]
    assert stamps == sorted(set(stamps)), "one link carries them one after another"


async def test_a_frame_that_fits_no_ring_is_left_to_the_broker(world: World, shm: ShmPlan) -> None:
    event = await carried(world, shm, replace(FRAME, message=LARGE))
    assert event.message.partial.shape == LARGE.partial.shape
    assert [subject for subject, _, _ in world.heard] == ["xds.fabric.d3"]
    shortcut = world.hosts[0].shortcut
    assert shortcut is not None
    assert shortcut.frames_left == 1


async def test_a_die_of_another_host_is_reached_over_the_broker(world: World, shm: ShmPlan) -> None:
    sender, _ = await start_die(world, HERE, shm, replace(FRAME, target=FAR))
    receiver, _ = await start_die(world, FAR, None)
    sender.outside(LEFT)
    await until(lambda: bool(frames(receiver)))
    assert frames(receiver)[0].sender == "owner.5"
    assert sender.messages_lost == 0


async def test_what_is_no_waybill_is_counted_and_the_next_frame_arrives(
    world: World, shm: ShmPlan
) -> None:
    receiver, shard = await start_die(world, NEAR, shm)
    stranger = ShmCarrier(shm, HERE)
    stranger.on_frame(lambda _source, _view: None)
    stranger.start(asyncio.get_running_loop())
    stranger.send(NEAR, b"short")
    inner = encode_frame(Envelope("owner.5", 1, 1, 0), ANSWER)
    frame = UbFrame(HERE, NEAR, 0, 10, 1, np.frombuffer(inner, np.uint8), 0)
    damaged = replace(frame, payload=np.frombuffer(inner[:-1], np.uint8))
    stranger.send(NEAR, with_waybill(damaged))
    stranger.send(NEAR, with_waybill(frame))
    await until(lambda: bool(frames(receiver)))
    stranger.close()
    assert (shard.decode_errors, receiver.decode_errors) == (1, 1)
    where = [r.fields["subject"] for r in world.facts.records if r.name == "frame_refused"]
    assert where == ["shared memory of die 5", "xds.ub.3"]


async def test_who_was_replaced_ends_with_the_reason(world: World, shm: ShmPlan) -> None:
    sender, _ = await start_die(world, HERE, shm, FRAME)
    await start_die(world, NEAR, shm)
    successor = ShmCarrier(shm, HERE)
    successor.on_frame(lambda _source, _view: None)
    successor.start(asyncio.get_running_loop())
    sender.outside(LEFT)
    with pytest.raises(StaleEpoch, match="die 5"):
        await sender.wait()
    successor.close()


async def test_a_full_ring_loses_the_frame_and_says_so(world: World, shm: ShmPlan) -> None:
    burst = [FRAME] * (OUTBOX_FRAMES_MAX + 100)
    sender, _ = await start_die(world, HERE, shm, *burst)
    sender.outside(LEFT)  # nobody reads: the ring is full, then the outbox
    lost = [record for record in world.facts.records if record.name == "message_lost"]
    assert sender.messages_lost == len(lost) > 0
    assert {record.fields["code"] for record in lost} == {"backpressure"}


def test_a_waybill_is_read_as_it_was_written() -> None:
    payload = np.arange(70, dtype=np.uint8)
    frame = UbFrame(4_000_000_000, 7, 1 << 60, 1 << 40, 58, payload, -1, "roce")
    whole = b"".join(with_waybill(frame))
    read = read_waybill(memoryview(whole))
    assert read.payload.tobytes() == payload.tobytes()
    for name in ("source", "target", "depart_ns", "charge_bytes", "repeat", "begin_ns", "plane"):
        assert getattr(read, name) == getattr(frame, name), name
    with pytest.raises(RemoteProtocolError, match="63 bytes"):
        read_waybill(memoryview(whole)[:63])
