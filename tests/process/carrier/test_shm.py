"""The carrier between processes that live: echo, successor, epoch, overload."""

from __future__ import annotations

import contextlib
import os
import signal
from functools import partial

import pytest

from libs.carrier.segment import ShmPlan
from libs.errors import Backpressure, CapacityExceeded, StaleEpoch
from tests.process.carrier.dies import HERE, LAYOUT, THERE, Children, Host, echo, frame


@pytest.mark.parametrize("plan", [False, True], indirect=True, ids=["plain", "checksum"])
def test_frames_of_all_sizes_return_whole_and_in_order(
    plan: ShmPlan, host: Host, children: Children
) -> None:
    children.spawn(partial(echo, plan))
    home = host.open(HERE)
    for number in range(600):
        whole = frame(0, number)
        home.carrier.send(THERE, (whole[:5], whole[5:]))
        if number % 32 == 0:
            host.run(0)
    host.until(lambda: len(home.got) == 600)
    assert home.numbers(0) == list(range(600))
    counters = home.carrier.statistics()
    assert counters.refused == counters.waiting_frames == counters.waiting_bytes == 0


def test_a_successor_gets_nothing_that_was_meant_for_the_dead(
    plan: ShmPlan, host: Host, children: Children
) -> None:
    home = host.open(HERE)
    first = children.spawn(partial(echo, plan))
    home.carrier.send(THERE, frame(0, 0))
    host.until(lambda: len(home.got) == 1)
    os.kill(first, signal.SIGSTOP)  # alive, and it will never read again
    for number in range(1, 50):
        home.carrier.send(THERE, frame(0, number))
    assert home.carrier.statistics().waiting_frames > 0
    children.kill(first)
    second = children.spawn(partial(echo, plan, life=1))
    # Its birth is what replaces the ring.
    host.until(lambda: home.carrier.statistics().stale > 0)
    home.carrier.send(THERE, frame(1, 99))
    host.until(lambda: len(home.got) == 2)
    host.quiet()
    assert home.got == [(0, 0), (1, 99)]
    children.kill(second)


def test_a_replaced_life_that_goes_on_may_not_send(host: Host) -> None:
    old, sender = host.open(HERE), host.open(THERE)
    new = host.open(HERE)
    with pytest.raises(StaleEpoch):
        old.carrier.send(THERE, frame(1, 0))
    sender.carrier.send(HERE, frame(2, 0))
    host.until(lambda: len(new.got) == 1)
    assert (old.got, new.got) == ([], [(2, 0)])


def test_a_new_epoch_drops_what_was_sent_before_it(plan: ShmPlan, host: Host) -> None:
    sender, home = host.open(THERE), host.open(HERE)
    sender.carrier.send(HERE, frame(1, 0))
    host.until(lambda: len(home.got) == 1)
    for number in range(50):  # more than the ring holds: some wait in the outbox
        sender.carrier.send(HERE, frame(2, number))
    assert sender.carrier.statistics().waiting_frames > 0
    plan.bump_epoch()
    sender.carrier.send(HERE, frame(3, 0))
    host.until(lambda: len(home.got) == 2)
    host.quiet()
    assert home.got == [(1, 0), (3, 0)]
    assert sender.carrier.statistics().stale + home.carrier.statistics().stale == 50


def test_overload_is_refused_whole_and_nothing_that_was_taken_is_lost(host: Host) -> None:
    sender, home = host.open(THERE), host.open(HERE)
    taken = 0
    with contextlib.suppress(Backpressure):
        while taken < 100_000:
            sender.carrier.send(HERE, frame(0, taken))
            taken += 1
    assert sender.carrier.statistics().refused == 1
    host.until(lambda: len(home.got) == taken)
    assert home.numbers(0) == list(range(taken))
    with pytest.raises(CapacityExceeded):
        sender.carrier.send(HERE, bytes(LAYOUT.slots * LAYOUT.slot_bytes + 1))
