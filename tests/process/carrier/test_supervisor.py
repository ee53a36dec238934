"""Supervisors that are killed: the next one removes what they left, and nothing that is in use."""

from __future__ import annotations

import asyncio
import os
import random
import signal
import struct
import time
from functools import partial
from pathlib import Path

import pytest

from libs.carrier.segment import ShmPlan, make_segments, remove_abandoned
from tests.process.carrier.dies import (
    DIES,
    HERE,
    LAYOUT,
    PATIENCE_S,
    THERE,
    Children,
    frame,
    serve,
)

KILLS = 60


def next_supervisor_sees(root: Path) -> list[Path]:
    """What is in `root` beside its own directory while the next supervisor is at work."""
    with make_segments(DIES, root=root, layout=LAYOUT) as plan:
        return [path for path in root.iterdir() if path != plan.directory]


def test_the_next_supervisor_removes_what_a_killed_one_left_once_its_last_child_is_gone(
    root: Path, children: Children
) -> None:
    ready, tell = os.pipe()

    async def child(plan: ShmPlan) -> None:
        carrier = serve(plan, HERE, lambda _source, _view: None)
        carrier.send(THERE, frame(0, 0))  # opens a ring
        os.write(tell, struct.pack("<I", os.getpid()))
        await asyncio.get_running_loop().create_future()

    def supervise() -> None:
        plan = make_segments(DIES, root=root, layout=LAYOUT)
        children.spawn(partial(child, plan))
        signal.pause()

    supervisor = children.fork(supervise)
    (grandchild,) = struct.unpack("<I", os.read(ready, 4))
    try:
        children.kill(supervisor)
        left = list(root.iterdir())
        assert len(left) == 1
        assert list(left[0].glob("ring-*"))
        assert next_supervisor_sees(root) == left, "the child still uses it"
    finally:
        os.kill(grandchild, signal.SIGKILL)
    deadline = time.perf_counter() + PATIENCE_S
    while next_supervisor_sees(root):
        assert time.perf_counter() < deadline, "nobody holds the lock any more"
        time.sleep(0.001)
    os.close(ready)
    os.close(tell)


def test_a_supervisor_killed_at_any_moment_leaves_nothing_for_long(
    root: Path, children: Children
) -> None:
    """Also in the middle of making its directory, and of removing it."""

    def supervise() -> None:
        while True:
            with make_segments(DIES, root=root, layout=LAYOUT):
                pass

    moments = random.Random(13)
    found = 0
    for _ in range(KILLS):
        pid = children.fork(supervise)
        time.sleep(moments.uniform(0.001, 0.006))
        children.kill(pid)
        found += bool(os.listdir(root))
        assert next_supervisor_sees(root) == []
    assert found, "some of them were killed in the middle"


@pytest.mark.parametrize("left", [(), ("die-3", "pod")], ids=["making", "removing"])
def test_a_directory_whose_lock_is_missing_is_nobodys(root: Path, left: tuple[str, ...]) -> None:
    """As after a kill between two system calls, which the random moments seldom hit."""
    directory = root / "xds-shm-dead"
    directory.mkdir()
    for name in left:
        (directory / name).touch()
    assert remove_abandoned(root) == [directory]
