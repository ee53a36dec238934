"""Carriers between processes that are killed, stopped and replaced at any moment."""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import signal
from collections.abc import Iterator
from functools import partial
from itertools import count, islice
from pathlib import Path

import pytest

from libs.carrier.segment import DiePage, ShmPlan
from libs.errors import Backpressure, StaleEpoch
from tests.process.carrier.dies import (
    HERE,
    THERE,
    Children,
    Host,
    echo,
    flood,
    frame,
    serve,
)

KILLS = 60
GAVE_WAY = 42
LEND = pytest.mark.parametrize("lend", [False, True], ids=["given", "lent"])


def mapped_files(plan: ShmPlan) -> set[str]:
    """Inodes of the plan's files that this process has mapped; a line may come twice."""
    lines = Path("/proc/self/maps").read_text().splitlines()
    return {line.split()[4] for line in lines if str(plan.directory) in line}


async def send_while_allowed(plan: ShmPlan) -> None:
    """`THERE` sends until it is told that it was replaced."""
    carrier = serve(plan, THERE, lambda _source, _view: None)
    with contextlib.suppress(StaleEpoch):
        for number in count():
            carrier.send(HERE, frame(1, number))
            await asyncio.sleep(0.001)
    os._exit(GAVE_WAY)


@LEND
def test_a_sender_killed_at_any_moment_never_tears_a_frame(
    plan: ShmPlan, host: Host, children: Children, lend: bool
) -> None:
    home = host.open(HERE, lend=lend)
    moments = random.Random(7)
    for life in range(KILLS):
        pid = children.spawn(partial(flood, plan, life))
        host.until(partial(home.hears, life))
        host.run(moments.uniform(0, 0.003))
        children.kill(pid)
        assert len(list(plan.directory.glob("ring-*"))) <= 2
        assert len(mapped_files(plan)) <= 3, "pod, die, and the ring that is read"
    host.run(0.02)
    assert home.got == sorted(home.got), "the dead before their successors"
    for life in range(KILLS):
        numbers = home.numbers(life)
        assert numbers == list(range(len(numbers))), "from the first one on, without a gap"


@LEND
def test_a_receiver_killed_at_any_moment_never_stops_the_sender(
    plan: ShmPlan, host: Host, children: Children, lend: bool
) -> None:
    home = host.open(HERE)
    moments = random.Random(11)
    for life in range(KILLS):
        pid = children.spawn(partial(echo, plan, lend=lend, life=life))
        numbers = count()

        def insist(life: int = life, numbers: Iterator[int] = numbers) -> bool:
            for number in islice(numbers, 8):
                home.carrier.send(THERE, frame(life, number))
            return home.hears(life)

        host.until(insist)
        host.run(moments.uniform(0, 0.002))
        children.kill(pid)
        assert len(list(plan.directory.glob("ring-*"))) <= 4
    host.run(0.01)
    assert home.got == sorted(set(home.got)), "in order, none twice"


def test_a_stopped_receiver_never_blocks_the_sender_and_loses_nothing(
    plan: ShmPlan, host: Host, children: Children
) -> None:
    home = host.open(HERE)
    pid = children.spawn(partial(echo, plan))
    home.carrier.send(THERE, frame(0, 0))
    host.until(lambda: len(home.got) == 1)
    os.kill(pid, signal.SIGSTOP)
    sent = 1
    with contextlib.suppress(Backpressure):
        while sent < 100_000:
            home.carrier.send(THERE, frame(0, sent))
            sent += 1
    assert 1000 < sent < 100_000, "nobody reads, and every `send` returned"
    os.kill(pid, signal.SIGCONT)
    host.until(lambda: len(home.got) == sent)
    assert home.numbers(0) == list(range(sent))
    children.kill(pid)


def test_a_process_that_was_replaced_while_it_was_stopped_gives_way(
    plan: ShmPlan, host: Host, children: Children
) -> None:
    home = host.open(HERE)
    first = children.spawn(partial(send_while_allowed, plan))
    host.until(partial(home.hears, 1))
    os.kill(first, signal.SIGSTOP)
    second = children.spawn(partial(echo, plan, life=2))
    page = DiePage(plan, THERE)
    host.until(lambda: page.life == 2)
    page.close()
    home.carrier.send(THERE, frame(2, 0))
    host.until(partial(home.hears, 2))
    os.kill(first, signal.SIGCONT)
    assert os.waitstatus_to_exitcode(children.wait(first)) == GAVE_WAY
    for number in range(1, 50):
        home.carrier.send(THERE, frame(2, number))
    host.until(lambda: home.got[-1] == (2, 49))
    assert home.numbers(2) == list(range(50))
    children.kill(second)
