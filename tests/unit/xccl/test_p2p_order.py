"""Receives are matched by event: the two ends need not ask in the same order."""

from __future__ import annotations

import pytest

from libs.xccl.p2p import Complete, Failed, Flow, Role
from tests.support.p2p_world import World


@pytest.mark.parametrize("direct", [False, True])
def test_receives_posted_in_another_order_than_the_sends(direct: bool) -> None:
    world = World()
    sent = [world.transfer(0, 1, 200, direct=direct, later=True) for _ in range(4)]
    for index in (2, 2, 0, 0):  # the third, the fourth, the first, the second
        world.post(index)
    world.settle()
    assert all(isinstance(transfer.received, Complete) for transfer in sent)
    assert all(isinstance(transfer.sent, Complete) for transfer in sent)


def test_a_receive_posted_after_its_tail_is_taken_before_one_that_waits() -> None:
    world = World()
    first = world.transfer(0, 1, 64, later=True)
    second = world.transfer(0, 1, 64, later=True)
    world.post(1)  # nothing of the second is under way: the sender is at the first
    while any(state.answers for state in world.dies) or world.bag:
        world.answer(0)
        world.deliver(0)
    assert first.received is None
    world.post(0)
    world.settle()
    assert isinstance(first.received, Complete)
    assert isinstance(second.received, Complete)


def test_a_message_under_way_is_not_put_back_for_another() -> None:
    """Once something has come, another event means that the sender gave the first one up."""
    world = World()
    first = world.transfer(0, 1, 700, aivs=1)
    while not world.dies[1].answers:
        world.answer(0)
        world.deliver(0)
    world.answer(10)  # a copy at the receiver: the first one has begun
    second = world.transfer(0, 1, 64)
    effects = world.endpoint(0).cancel(Flow(1, Role.SEND), first.event, "no more")
    world._carry_out(0, effects)
    world.settle()
    assert isinstance(first.sent, Failed)
    assert isinstance(first.received, Failed)
    assert isinstance(second.received, Complete)


@pytest.mark.parametrize("role", list(Role))
@pytest.mark.parametrize("queued", [False, True])
def test_one_message_is_cancelled_and_its_neighbours_arrive(role: Role, queued: bool) -> None:
    world = World()
    sent = [world.transfer(0, 1, 200) for _ in range(3)]
    victim = sent[1 if queued else 0]
    world.cancel(sent.index(victim), role)
    world.settle()
    assert isinstance(victim.sent, Failed)
    assert isinstance(victim.received, Failed)
    others = [transfer for transfer in sent if transfer is not victim]
    assert all(isinstance(transfer.received, Complete) for transfer in others)
    world.cancel(sent.index(victim), role)  # it is over: nothing happens
