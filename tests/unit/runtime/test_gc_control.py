from __future__ import annotations

import asyncio
import gc
from collections.abc import Iterator

import pytest

from libs.actor import Compute, Effect, Event, Started
from libs.config.plan import plan_pod
from libs.config.topology import load_topology
from libs.runtime import gc_control
from libs.runtime.cores import core_of
from libs.runtime.gc_control import WARM_UP, GcControl
from tests.support.world import World, until


@pytest.fixture(autouse=True)
def collector() -> Iterator[None]:
    yield
    gc.enable()
    gc.unfreeze()


async def test_the_collector_runs_only_when_an_iteration_is_over_and_it_is_due() -> None:
    control = GcControl(every=50)
    control.begin(asyncio.get_running_loop())
    seen = []
    for number in range(1, 201):
        garbage = [[] for _ in range(200)]  # type: ignore[var-annotated]
        garbage[0].append(garbage)
        before = control.pauses.collections
        control.between()
        if control.pauses.collections > before:
            seen.append(number)
    assert seen == [WARM_UP, 50, 100, 150, 200]
    assert not gc.isenabled()
    assert gc.get_freeze_count() > 1000, "what lived at warm-up is set aside"
    control.end()
    assert gc.isenabled()
    control.end()


async def test_left_alone_it_is_only_watched() -> None:
    control = GcControl(every=0)
    control.begin(asyncio.get_running_loop())
    for _ in range(100):
        control.between()
    assert gc.isenabled()
    assert control.pauses.collections == 0
    gc.collect()
    assert control.pauses.collections == 1
    assert 0 < control.pauses.longest_s == control.pauses.total_s
    control.end()


async def test_a_process_that_does_not_iterate_collects_now_and_then(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(gc_control, "IDLE_S", 0.01)
    control = GcControl(every=1000)
    control.begin(asyncio.get_running_loop())
    await until(lambda: control.pauses.collections >= 2)
    control.end()


@pytest.mark.parametrize(("paced", "calls"), [((True, False), 1), ((False, False), 2)])
async def test_the_host_names_the_moment(
    world: World, paced: tuple[bool, bool], calls: int
) -> None:
    """After paced jobs where there are any, between layers never; after every job otherwise."""

    class Counting(GcControl):
        called = 0

        def between(self) -> None:
            self.called += 1

    control = Counting(every=10)

    def react(event: Event) -> list[Effect]:
        if not isinstance(event, Started):
            return []
        return [Compute(number, 1, 10, paced=flag) for number, flag in enumerate(paced)]

    host = await world.host(lambda _event: [])
    host.gc = control
    for effect in react(Started(0)):
        host._carry_out(effect)
        await asyncio.sleep(0.02)
    assert control.called == calls


def test_owners_of_dies_take_the_cores_in_turn_and_nobody_else_is_pinned() -> None:
    plan = plan_pod(load_topology("mini"))
    cores = {actor.name: core_of(plan, actor, (3, 5)) for actor in plan.actors}
    owners = [actor.name for actor in plan.processes if actor.dies]
    assert [cores[name] for name in owners] == [3, 5, 3, 5, 3, 5]
    assert {cores[name] for name in cores if name not in owners} == {None}
    assert core_of(plan, plan.actor(owners[0]), ()) is None
