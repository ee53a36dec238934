from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from libs.errors import (
    Backpressure,
    BadInput,
    DeadlineExceeded,
    LocalProtocolError,
    PeerLost,
    TransferFailed,
)
from libs.xccl import p2p
from libs.xccl.cut import PIECE_BYTES, cut
from libs.xccl.endpoint import Endpoint
from libs.xccl.frames import Landing
from libs.xccl.memory import Area, DieMemory, Kind, MetadataField, PairEpoch, Quota, field_offset
from libs.xccl.p2p import (
    Complete,
    Failed,
    Fence,
    Fenced,
    Flow,
    Limits,
    Load,
    Loaded,
    LocalCopy,
    Receive,
    RemoteWrite,
    Role,
    Send,
    Step,
    Wait,
    WaitOver,
    event_id,
)
from libs.xccl.p2p_cost import FILLING_AIVS
from libs.xccl.paths import Path
from libs.xccl.ring import BLOCK_BYTES, RingShape
from tests.support.p2p_world import LIMITS, SHAPE, Packet, World

EVENT = event_id(1, 1)


def endpoint(die: int = 0, nbytes: int = 4096, **about: Any) -> Endpoint:
    options = {"shape": SHAPE, "limits": LIMITS, **about}
    return Endpoint(die, 1, DieMemory(bytearray(nbytes)), **options)


def only(kind: type[Any], effects: list[p2p.Effect]) -> Any:
    found = [effect for effect in effects if isinstance(effect, kind)]
    assert len(found) == 1, effects
    return found[0]


def every(kind: type[Any], effects: list[p2p.Effect]) -> list[Any]:
    return [effect for effect in effects if isinstance(effect, kind)]


def area_of(packet: Packet) -> Area:
    return Area(packet.frame[0])


def run_all(world: World) -> None:
    """Everything that can happen without a wait ending."""
    while world.bag or any(die.answers for die in world.dies):
        world.answer(0)
        world.deliver(0)


# ---------------------------------------------------------------- the eight steps


def test_a_send_loads_stores_fences_and_only_then_writes_its_tail() -> None:
    sender = endpoint()
    effects = sender.send(Send(EVENT, 1, 0, 64, aivs=1))
    load = only(Load, effects)
    assert not every(RemoteWrite, effects)
    effects = sender.handle(Loaded(load.flow, 0, load.number))
    assert only(RemoteWrite, effects).area is Area.MANAGED
    fence = only(Fence, effects)
    assert isinstance(effects[-1], Fence), "the fence stands behind the data"
    tail = only(RemoteWrite, sender.handle(Fenced(fence.flow, 0, fence.number)))
    assert tail.area is Area.METADATA
    assert tail.offset == field_offset(0, 0, Kind.TAIL)
    field = MetadataField.unpack(tail.data)
    assert (field.event_id, field.chunk_id, field.tail) == (EVENT, 1, 64)


def test_one_half_of_the_buffer_loads_while_the_other_is_stored() -> None:
    sender = endpoint()
    loads = every(Load, sender.send(Send(EVENT, 1, 0, 256, aivs=1)))
    assert [load.half for load in loads] == [0, 1], "both halves at once"
    effects = sender.handle(Loaded(loads[0].flow, 0, loads[0].number))
    fence = only(Fence, effects)
    assert not every(Load, effects), "no half is free before its store has ended"
    effects = sender.handle(Loaded(loads[1].flow, 0, loads[1].number))
    assert only(RemoteWrite, effects), "the second store does not wait for the first fence"
    effects = sender.handle(Fenced(fence.flow, 0, fence.number))
    assert not every(Load, effects), "two slots are in use and none is acknowledged"


def test_a_lane_runs_no_further_ahead_than_its_ring() -> None:
    world = World()
    world.transfer(0, 1, 64 * 6, aivs=1)
    while any(world.dies[0].answers):
        world.answer(0)
    chunks = [packet for packet in world.bag if area_of(packet) is Area.MANAGED]
    assert len(chunks) == SHAPE.slots


def test_an_ack_is_written_after_the_copy_and_a_fence() -> None:
    world = World()
    transfer = world.transfer(0, 1, 64, aivs=1)
    receiver = world.dies[1]
    while world.dies[0].answers:
        world.answer(0)
    world.deliver(0)
    assert not receiver.answers, "data without a tail is not looked at"
    world.deliver(0)
    assert [type(asked) for asked in receiver.answers] == [LocalCopy]
    assert not world.bag
    world.answer(0)
    assert [type(asked) for asked in receiver.answers] == [Fence]
    assert not world.bag, "consumed, and not acknowledged before the fence"
    world.answer(0)
    assert [area_of(packet) for packet in world.bag] == [Area.METADATA]
    assert isinstance(transfer.received, Complete)
    assert transfer.sent is None
    world.deliver(0)
    assert isinstance(transfer.sent, Complete)


@pytest.mark.parametrize("asynchronous", [True, False])
def test_an_asynchronous_message_waits_without_polling(asynchronous: bool) -> None:
    effects = endpoint().send(Send(EVENT, 1, 0, 64, asynchronous=asynchronous))
    assert only(Wait, effects).polling is not asynchronous
    effects = endpoint().receive(Receive(EVENT, 1, 0, 64, asynchronous=asynchronous))
    assert only(Wait, effects).polling is not asynchronous


@pytest.mark.parametrize("path", [Path.DMA, Path.URMA])
def test_dma_bypasses_the_unified_buffer(path: Path) -> None:
    effects = endpoint().send(Send(EVENT, 1, 0, 256, aivs=1, path=path))
    assert not every(Load, effects)
    writes = every(RemoteWrite, effects)
    assert {write.path for write in writes} == {path}
    assert {write.tag.lane for write in writes} == {0}, "one engine, one lane"


def test_messages_of_one_flow_go_one_after_the_other() -> None:
    world = World()
    first, second = world.transfer(0, 1, 300), world.transfer(0, 1, 100)
    while first.received is None:
        assert second.received is None
        assert second.sent is None
        world.answer(0)
        world.deliver(0)
    world.settle()
    assert isinstance(second.received, Complete)


def test_the_receive_may_come_after_everything_has_landed() -> None:
    world = World()
    sender, receiver = world.endpoint(0), world.endpoint(1)
    effects = sender.send(Send(EVENT, 1, 0, 128, aivs=1, path=Path.DMA))
    for _ in range(4):
        for effect in list(effects):
            effects.remove(effect)
            if isinstance(effect, RemoteWrite):
                receiver.land(0, Landing.of(effect))
            elif isinstance(effect, Fence):
                effects += sender.handle(Fenced(effect.flow, effect.lane, effect.number))
    copies = every(LocalCopy, receiver.receive(Receive(EVENT, 0, 0, 128)))
    assert sum(copy.nbytes for copy in copies) == 128


# ---------------------------------------------------------------- loss and lateness


@pytest.mark.parametrize("lost", range(4), ids=["data", "tail", "tail of two", "ack"])
def test_any_single_loss_is_made_good(lost: int) -> None:
    world = World()
    transfer = world.transfer(0, 1, 64 * 3, aivs=1)
    seen = 0
    while transfer.sent is None or transfer.received is None:
        if any(die.answers for die in world.dies):
            world.answer(0)
        elif not world.bag:
            world.wait(0)
        elif seen == lost:
            world.lose(0)
            seen += 1
        else:
            world.deliver(0)
            seen += 1
    assert seen > lost
    assert isinstance(transfer.received, Complete)
    assert isinstance(transfer.sent, Complete)


def test_a_lost_last_ack_is_written_again_although_the_receive_is_over() -> None:
    world = World()
    transfer = world.transfer(0, 1, 64, aivs=1)
    while transfer.received is None:
        world.answer(0)
        if transfer.received is None:
            world.deliver(0)
    world.lose(0)
    assert not world.bag
    assert transfer.sent is None
    world.settle()
    assert isinstance(transfer.sent, Complete)


def test_a_late_write_does_not_land_in_a_reused_slot() -> None:
    world = World()
    world.transfer(0, 1, 64, aivs=1)
    while world.dies[0].answers:
        world.answer(0)
    late = world.bag[0]
    assert area_of(late) is Area.MANAGED
    run_all(world)
    for _ in range(SHAPE.slots):  # the slot of `late` now holds another chunk
        world.transfer(0, 1, 64, aivs=1)
        run_all(world)
    ring = world.endpoint(1).memory.lane(0, 0)
    assert ring is not None
    before = bytes(ring)
    world.bag.append(late)
    world.deliver(0)
    assert world.endpoint(1).refused == {"stale_generation": 1}
    assert bytes(ring) == before


def test_a_tail_that_overtakes_its_data_is_not_believed() -> None:
    world = World(fenced=False)
    transfer = world.transfer(0, 1, 64, aivs=1)
    while world.dies[0].answers:
        world.answer(0)
    data, tail = world.bag
    assert area_of(tail) is Area.METADATA
    world.bag.reverse()
    world.deliver(0)
    assert not world.dies[1].answers, "the slot does not hold what the tail promises"
    assert world.bag == [data]
    run_all(world)
    assert isinstance(transfer.received, Complete)


def test_a_chunk_that_changed_in_its_slot_is_copied_again_after_a_repetition() -> None:
    world = World()
    transfer = world.transfer(0, 1, 64, aivs=1)
    while world.dies[0].answers:
        world.answer(0)
    world.deliver(0)
    ring = world.endpoint(1).memory.lane(0, 0)
    assert ring is not None
    ring[70] ^= 1
    run_all(world)
    assert transfer.received is None, "never acknowledged"
    world.settle()
    assert isinstance(transfer.received, Complete)
    assert transfer.left == transfer.content


def test_a_source_that_changes_under_way_fails_the_checksum_of_the_whole() -> None:
    world = World()
    transfer = world.transfer(0, 1, 64 * 4, aivs=1)
    world.answer(0)
    world.dies[0].buffer[64 * 4 - 1] ^= 1
    world.settle()
    assert isinstance(transfer.received, Failed)
    assert transfer.received.step is Step.CHECKSUM
    assert isinstance(transfer.received.error(), TransferFailed)
    assert isinstance(transfer.sent, Failed)


def test_an_ack_of_another_session_or_of_chunks_never_sent_frees_nothing() -> None:
    sender = endpoint()
    order = Send(EVENT, 1, 0, 64, aivs=1, path=Path.DMA)
    sender.send(order)
    for epoch, chunk_id in ((PairEpoch(1, 1, 1), 1), (PairEpoch(1, 2), 1), (PairEpoch(1, 1), 9)):
        news = MetadataField(EVENT, chunk_id, 0, epoch)
        tag = p2p.Tag(epoch, 0, chunk_id)
        landing = Landing(Area.METADATA, field_offset(1, 0, Kind.ACK), news.pack(), tag)
        assert sender.land(1, landing) == []
    assert sender.refused == {"stale_epoch": 2}
    sender.validate()


def test_the_receive_ends_with_its_last_ack_whatever_other_fences_are_open() -> None:
    world = World()
    transfer = world.transfer(0, 1, 64 * 4, aivs=1)
    receiver = world.dies[1]
    while transfer.received is None:
        held = [x for x in receiver.answers if not isinstance(x, Fence)]
        fences = [x for x in receiver.answers if isinstance(x, Fence)]
        if world.dies[0].answers:
            world.answer(0)
        elif held:
            world._answer(1, receiver.answers.pop(receiver.answers.index(held[0])))
        elif world.bag:
            world.deliver(0)
        else:
            # The newest fence first; `World` asserts that no send completes before its receive.
            world._answer(1, receiver.answers.pop(receiver.answers.index(fences[-1])))
    world.settle()
    assert isinstance(transfer.sent, Complete)


def test_nothing_is_copied_twice_at_once_after_a_rejection() -> None:
    world = World()
    transfer = world.transfer(0, 1, 128, aivs=1)
    while world.dies[0].answers:
        world.answer(0)
    while world.bag:
        world.deliver(0)
    receiver = world.dies[1]
    assert [type(asked) for asked in receiver.answers] == [LocalCopy, LocalCopy]
    ring = world.endpoint(1).memory.lane(0, 0)
    assert ring is not None
    ring[70] ^= 1
    world._answer(1, receiver.answers.pop(0))  # the first is rejected, the second is under way
    world.dies[1].waits.clear()
    world.wait(0)
    while world.dies[0].answers:
        world.answer(0)
    while world.bag:
        world.deliver(0)
    assert len(receiver.answers) == 1, "what was written again waits for the copy under way"
    world._answer(1, receiver.answers.pop(0))
    assert [type(asked) for asked in receiver.answers] == [LocalCopy, LocalCopy]
    world.settle()
    assert isinstance(transfer.received, Complete)


# ---------------------------------------------------------------- bounded waits


def test_a_sender_without_a_receiver_fails_and_names_it_and_the_step() -> None:
    sender = endpoint()
    order = Send(EVENT, 5, 0, 64, aivs=1, path=Path.DMA)
    effects = sender.send(order)
    repetitions = 0
    while not every(Failed, effects):
        waits = every(Wait, effects)
        for fence in every(Fence, effects):
            sender.handle(Fenced(fence.flow, fence.lane, fence.number))
        effects = sender.handle(WaitOver(order.flow, waits[0].number))
        repetitions += len(every(Wait, effects))
    failed = only(Failed, effects)
    assert repetitions == LIMITS.retransmits_max
    assert (failed.peer, failed.step, failed.definite) == (5, Step.ACK, False)
    assert isinstance(failed.error(), DeadlineExceeded)
    assert "die 5 failed at ack" in str(failed.error())


def test_a_sender_that_stored_nothing_knows_that_nothing_arrived() -> None:
    sender = endpoint()
    order = Send(EVENT, 5, 0, 300, aivs=1)
    effects = sender.send(order)
    while not every(Failed, effects):
        effects = sender.handle(WaitOver(order.flow, only(Wait, effects).number))
    failed = only(Failed, effects)
    assert (failed.step, failed.definite) == (Step.DATA, True)
    assert isinstance(failed.error(), TransferFailed)


def test_a_receiver_without_a_sender_fails_and_names_it_and_the_step() -> None:
    receiver = endpoint()
    order = Receive(EVENT, 5, 0, 64)
    effects = receiver.receive(order)
    waits = 0
    while not every(Failed, effects):
        effects = receiver.handle(WaitOver(order.flow, only(Wait, effects).number))
        waits += 1
    failed = only(Failed, effects)
    assert waits == LIMITS.receive_waits_max
    assert (failed.peer, failed.step) == (5, Step.TAIL)


def test_an_old_wait_means_nothing() -> None:
    sender = endpoint()
    order = Send(EVENT, 1, 0, 64)
    first = only(Wait, sender.send(order)).number
    assert sender.handle(WaitOver(order.flow, first))
    assert not sender.handle(WaitOver(order.flow, first))


def test_a_receive_fails_only_when_its_copies_have_ended() -> None:
    world = World()
    transfer = world.transfer(0, 1, 64, aivs=1)
    while world.dies[0].answers:
        world.answer(0)
    world.deliver(0)
    world.deliver(0)
    assert world.dies[1].answers
    for _ in range(2 * LIMITS.receive_waits_max):
        world.dies[0].waits.clear()
        world.wait(0)
    assert transfer.received is None, "a copy is under way and could still write"
    world.answer(0)
    assert isinstance(transfer.received, Failed)


# ---------------------------------------------------------------- disagreement


def test_sizes_that_differ_fail_on_both_sides() -> None:
    world = World()
    transfer = world.transfer(0, 1, 100, aivs=1)
    other = Receive(transfer.event, 0, 0, 200)
    world.dies[1] = type(world.dies[1])(1, endpoint(1, 1 << 14), bytearray(1 << 14))
    world._carry_out(1, world.endpoint(1).receive(other))
    world.settle()
    assert isinstance(transfer.received, Failed)
    assert "200 bytes wanted, the sender has 100" in transfer.received.reason
    assert isinstance(transfer.sent, Failed)
    assert transfer.sent.reason == "the receiver gave the message up"


def test_a_flow_goes_on_after_a_message_was_given_up() -> None:
    world = World()
    first = world.transfer(0, 1, 300)
    for _ in range(LIMITS.retransmits_max + 2):
        world.bag.clear()
        while any(die.answers for die in world.dies):
            world.answer(0)
        world.bag.clear()
        world.dies[1].waits.clear()
        world.wait(0)
    assert isinstance(first.sent, Failed)
    second = world.transfer(0, 1, 200)
    world.settle()
    assert isinstance(first.received, Failed)
    assert isinstance(second.received, Complete)
    assert isinstance(second.sent, Complete)


def test_a_write_into_a_field_of_somebody_else_is_refused() -> None:
    receiver = endpoint(1)
    field = MetadataField(EVENT, 1, 64, PairEpoch(1, 1))
    tag = p2p.Tag(field.epoch, 0, 1)
    landing = Landing(Area.METADATA, field_offset(7, 0, Kind.TAIL), field.pack(), tag)
    assert receiver.land(3, landing) == []
    assert receiver.refused == {"foreign_field": 1}


@pytest.mark.parametrize(
    "landing",
    [
        Landing(Area.METADATA, 1, bytes(32), p2p.Tag(PairEpoch(1, 1), 0, 0)),
        Landing(Area.METADATA, 0, bytes(3), p2p.Tag(PairEpoch(1, 1), 0, 0)),
        Landing(Area.MANAGED, 5, bytes(64), p2p.Tag(PairEpoch(1, 1), 0, 0)),
        Landing(Area.MANAGED, 0, bytes(3), p2p.Tag(PairEpoch(1, 1), 0, 0)),
        Landing(Area.MANAGED, 0, bytes(64), p2p.Tag(PairEpoch(1, 1), 99, 0)),
        Landing(Area.MANAGED, 0, bytes(64), p2p.Tag(PairEpoch(1, 9), 0, 0)),
        Landing(Area.MANAGED, 0, bytes(64), p2p.Tag(PairEpoch(1, 1), 0, 2)),
        Landing(Area.APPLICATION, 0, bytes(64), p2p.Tag(PairEpoch(1, 1), 0, 1)),
    ],
)
def test_a_write_that_fits_nowhere_is_counted_and_forgotten(landing: Landing) -> None:
    receiver = endpoint(1)
    before = bytes(receiver.memory.application)
    assert receiver.land(0, landing) == []
    assert receiver.refused.total() == 1
    assert bytes(receiver.memory.application) == before
    receiver.validate()


# ---------------------------------------------------------------- zero-copy


def test_zero_copy_needs_no_copy_at_the_receiver() -> None:
    world = World()
    transfer = world.transfer(0, 1, 1000, direct=True)
    copied = 0
    while transfer.sent is None:
        asked = [x for x in world.dies[1].answers if isinstance(x, LocalCopy)]
        copied += sum(copy.nbytes for copy in asked)
        world.answer(0)
        world.deliver(0)
    assert copied == 0
    assert isinstance(transfer.received, Complete)


def test_zero_copy_says_what_it_wrote_when_all_lanes_have_written() -> None:
    sender = endpoint(nbytes=1 << 16)
    destination = DieMemory(bytearray(1 << 16)).register(0, 1 << 16)
    loads = every(Load, sender.send(Send(EVENT, 1, 0, 1 << 16, aivs=3, into=destination)))
    assert {load.lane for load in loads} == {0, 1, 2}
    fences: list[Fence] = []
    for load in loads:
        fences += every(Fence, sender.handle(Loaded(load.flow, load.lane, load.number)))
    *others, last = fences
    for fence in others:
        assert not every(RemoteWrite, sender.handle(Fenced(fence.flow, fence.lane, fence.number)))
    described = only(RemoteWrite, sender.handle(Fenced(last.flow, last.lane, last.number)))
    assert described.area is Area.MANAGED


def test_a_late_direct_write_does_not_touch_a_range_that_is_somebody_elses_now() -> None:
    world = World()
    transfer = world.transfer(0, 1, 100, direct=True)
    while world.dies[0].answers and not world.bag:
        world.answer(0)
    late = world.bag[0]
    assert area_of(late) is Area.APPLICATION
    run_all(world)
    assert isinstance(transfer.received, Complete)
    buffer = world.dies[1].buffer
    buffer[transfer.offset : transfer.offset + 100] = bytes(100)
    world.bag.append(late)
    world.deliver(0)
    assert world.endpoint(1).refused == {"closed_destination": 1}
    assert buffer[transfer.offset : transfer.offset + 100] == bytes(100)


def test_zero_copy_without_a_registered_destination_fails_on_both_sides() -> None:
    world = World()
    transfer = world.transfer(0, 1, 100, direct=True)
    world.dies[1] = type(world.dies[1])(1, endpoint(1, 1 << 14), bytearray(1 << 14))
    world._carry_out(1, world.endpoint(1).receive(Receive(transfer.event, 0, 0, 100)))
    world.settle()
    assert isinstance(transfer.received, Failed)
    assert "no destination is registered" in transfer.received.reason
    assert isinstance(transfer.sent, Failed)


# ---------------------------------------------------------------- lives


def test_a_restart_of_the_peer_fails_what_is_under_way_and_what_waits() -> None:
    world = World()
    transfers = [world.transfer(0, 1, 100) for _ in range(3)]
    world.restart(1)
    for transfer in transfers:
        assert isinstance(transfer.sent, Failed)
        assert transfer.sent.reason == "die 1 restarted"
        assert isinstance(transfer.sent.error(), PeerLost)
    again = world.transfer(0, 1, 100)
    world.settle()
    assert isinstance(again.received, Complete)
    assert isinstance(again.sent, Complete)


def test_writes_of_an_earlier_life_are_refused() -> None:
    world = World()
    world.transfer(0, 1, 100)
    while world.dies[0].answers:
        world.answer(0)
    late = list(world.bag)
    world.restart(0)
    world.bag[:] = late
    while world.bag:
        world.deliver(0)
    assert world.endpoint(1).refused == {"stale_epoch": len(late)}


def test_a_write_of_a_later_life_is_proof_enough_of_a_restart() -> None:
    world = World()
    first = world.transfer(0, 1, 100)
    world.restart(0, told=False)
    second = world.transfer(0, 1, 100)
    assert first.received is None
    run_all(world)
    assert isinstance(first.received, Failed)
    assert isinstance(second.sent, Failed | None)
    world.settle()


def test_rings_of_a_dead_peer_are_given_back() -> None:
    world = World()
    world.transfer(0, 1, 300)
    run_all(world)
    memory = world.endpoint(1).memory
    assert memory.managed_bytes == 2 * SHAPE.lane_bytes
    world.restart(0)
    assert memory.managed_bytes == 0


# ---------------------------------------------------------------- sharing


def test_closing_a_namespace_fails_its_messages_and_nobody_elses() -> None:
    sender = endpoint()
    sender.send(Send(event_id(1, 1), 3, 0, 64))
    sender.send(Send(event_id(2, 1), 3, 0, 64))
    sender.send(Send(event_id(1, 2), 4, 0, 64))
    effects = sender.close_namespace(1)
    failed = every(Failed, effects)
    assert [effect.event for effect in failed] == [event_id(1, 1), event_id(1, 2)]
    assert every(Load, effects), "what stood behind the first one has begun"


def test_instances_cannot_have_the_same_event() -> None:
    assert event_id(1, 5) != event_id(2, 5)
    assert p2p.namespace_of(event_id(3, 9)) == 3
    with pytest.raises(BadInput):
        event_id(1 << 32, 0)


def test_a_full_managed_area_fails_the_send_and_says_so_at_the_receiver() -> None:
    world = World(quota=Quota(total_bytes=SHAPE.lane_bytes - 1))
    transfer = world.transfer(0, 1, 64, aivs=1)
    world.settle()
    assert isinstance(transfer.sent, Failed)
    assert isinstance(transfer.received, Failed)
    assert set(world.endpoint(1).refused) == {"no_room"}


def test_a_flow_has_room_for_a_bounded_number_of_messages() -> None:
    sender = endpoint(limits=Limits(outstanding_max=2))
    for number in range(3):
        sender.send(Send(event_id(1, number), 3, 0, 64))
    with pytest.raises(Backpressure, match="2 messages are waiting"):
        sender.send(Send(event_id(1, 9), 3, 0, 64))
    sender.send(Send(event_id(1, 9), 4, 0, 64))


@pytest.mark.parametrize(
    ("order", "error"),
    [
        (Send(EVENT, 0, 0, 64), BadInput),
        (Send(EVENT, 1365, 0, 64), BadInput),
        (Send(EVENT, 1, 4090, 64), BadInput),
        (Send(EVENT, 1, -1, 64), BadInput),
        (Send(EVENT, 1, 0, 64, aivs=0), BadInput),
    ],
    ids=["to itself", "to nobody", "beyond the end", "before the start", "without a core"],
)
def test_an_order_that_cannot_be_is_refused(order: Send, error: type[Exception]) -> None:
    with pytest.raises(error):
        endpoint().send(order)


def test_an_event_is_on_a_flow_only_once() -> None:
    sender = endpoint()
    sender.send(Send(EVENT, 1, 0, 64))
    with pytest.raises(LocalProtocolError, match="already"):
        sender.send(Send(EVENT, 1, 0, 64))
    sender.receive(Receive(EVENT, 1, 0, 64))


def test_an_answer_for_a_flow_that_nobody_uses_is_ignored() -> None:
    assert endpoint().handle(Loaded(Flow(3, Role.SEND), 0, 1)) == []


# ---------------------------------------------------------------- cutting


@given(
    st.integers(0, 3_000_000), st.integers(1, 48), st.sampled_from([32, 64, 1024, 98_304])
)  # fmt: skip
def test_chunks_cover_a_message_once_and_fit_their_slots(
    nbytes: int, lanes: int, chunk_max: int
) -> None:
    nbytes = min(nbytes, chunk_max * 500)
    plan = cut(nbytes, lanes, chunk_max)
    assert 1 <= len(plan) <= lanes
    end = 0
    for share in plan:
        assert share
        for chunk in share:
            assert chunk.offset == end
            assert chunk.nbytes <= chunk_max
            assert chunk.nbytes or not nbytes
            end += chunk.nbytes
    assert end == nbytes


@given(st.integers(1, 10_000_000), st.integers(1, 48))
def test_pieces_are_equal_and_evenly_dealt(nbytes: int, lanes: int) -> None:
    plan = cut(nbytes, lanes, PIECE_BYTES)
    sizes = [chunk.nbytes for share in plan for chunk in share]
    assert max(sizes) - min(sizes) < 2 * BLOCK_BYTES
    counts = [len(share) for share in plan]
    assert counts == sorted(counts, reverse=True)
    assert counts[0] - counts[-1] <= (len(plan) >= FILLING_AIVS), "nobody waits for a slow core"


@given(st.integers(1, 10_000_000), st.integers(1, 47))
def test_a_further_core_never_makes_a_piece_longer(nbytes: int, lanes: int) -> None:
    few, more = (cut(nbytes, count, PIECE_BYTES) for count in (lanes, lanes + 1))
    assert sum(map(len, more)) >= sum(map(len, few))
    if len(few) >= FILLING_AIVS:
        assert sum(few, ()) == sum(more, ()), "past a full link the cut stays the same"


def test_a_small_message_does_not_occupy_cores_that_cannot_help_it() -> None:
    assert [len(cut(kb * 1024, 48, PIECE_BYTES)) for kb in (1, 36, 288, 9216)] == [1, 4, 24, 48]
    assert RingShape().payload_bytes == 98_304
