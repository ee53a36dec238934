"""A network of `Collective` ranks that loses, delays, repeats and kills; seeded, no clock.

Each rank runs `events` collectives; its rows for a target say who sent them to whom, when and in
which world, so whatever arrives can be judged without running anything a second time.
"""

from __future__ import annotations

import heapq
from dataclasses import dataclass, field
from random import Random

import numpy as np

from libs.xccl.agreement import Tell, World
from libs.xccl.collective import Collective
from libs.xccl.collective_types import (
    CollectiveEffect,
    CollectiveEvent,
    Completed,
    Halted,
    Heard,
    Limits,
    MetadataField,
    Missing,
    Pull,
    Pulled,
    Rows,
    State,
    Wait,
    WaitOver,
    WorldChanged,
    Write,
    Written,
)

LIMITS = Limits(wait_ns=100, asks_max=2, late_waits_max=20)


def rows_for(source: int, target: int, event: int, world: World) -> Rows:
    """Between 0 and 3 rows, none at all from every third rank."""
    count = 0 if (source + event) % 3 == 2 else (source * 5 + target * 3 + event) % 4
    label = [source, target, event, world.version]
    return (np.array([[*label, i] for i in range(count)], np.int64).reshape(count, 5),)


@dataclass
class Plan:
    """What goes wrong: `deaths` maps a rank to how many effects it still carries out."""

    seed: int = 0
    loss: float = 0.0
    repeat: float = 0.0
    losses_max: int = 1_000
    deaths: dict[int, int] = field(default_factory=dict)
    #: Ranks that enter each event this much late.
    slow: dict[int, int] = field(default_factory=dict)


class Net:
    """Runs to the end; afterwards look at `results`, `worlds`, `halted`, `missing`."""

    def __init__(
        self, ranks: int, events: int, plan: Plan | None = None, limits: Limits = LIMITS
    ) -> None:
        self.plan = plan or Plan()
        self.events = events
        self.limits = limits
        self.now = 0
        world = World(1, tuple(range(ranks)))
        self.nodes = {rank: Collective(rank, world, limits) for rank in world.ranks}
        self.dead: set[int] = set()
        self.results: dict[int, dict[int, tuple[int, dict[int, Rows]]]] = {
            r: {} for r in self.nodes
        }
        self.worlds: dict[int, dict[int, World]] = {r: {1: world} for r in self.nodes}
        self.halted: dict[int, Halted] = {}
        self.missing: list[tuple[int, Missing]] = []
        self.pulls = 0
        self._announced: dict[tuple[int, int], set[int]] = {}
        self._random = Random(self.plan.seed)
        self._heap: list[tuple[int, int, int, CollectiveEvent | None]] = []
        self._sequence = 0
        self._losses = 0
        for rank in world.ranks:
            self._push(rank, None, self._random.randint(0, 30))

    def run(self) -> Net:
        """Until nothing is left to happen."""
        steps = 0
        while self._heap:
            steps += 1
            assert steps < 200_000, "the ranks never come to rest"
            self.now, _, rank, event = heapq.heappop(self._heap)
            if rank in self.dead:
                continue
            node = self.nodes[rank]
            if event is None:
                self._enter(rank)
            else:
                self._carry_out(rank, node.handle(event))
            node.validate()
        return self

    @property
    def survivors(self) -> list[int]:
        """Ranks that neither died nor stopped, and that the newest world has.

        A rank that was voted out when it had nothing left to do does not hear of it.
        """
        left = [rank for rank in self.nodes if rank not in self.dead | self.halted.keys()]
        newest = max((self.nodes[rank].world for rank in left), key=_version, default=None)
        return [rank for rank in left if newest is not None and rank in newest.ranks]

    def _enter(self, rank: int) -> None:
        node = self.nodes[rank]
        if node.state is not State.IDLE or node.event >= self.events:
            return
        everybody = node.world.ranks
        outgoing = {to: rows_for(rank, to, node.event, node.world) for to in everybody}
        self._carry_out(rank, node.enter({to: r for to, r in outgoing.items() if len(r[0])} or {}))

    def _push(self, rank: int, event: CollectiveEvent | None, delay: int) -> None:
        heapq.heappush(self._heap, (self.now + delay, self._sequence, rank, event))
        self._sequence += 1

    def _travel(self, rank: int, event: CollectiveEvent) -> None:
        if self._losses < self.plan.losses_max and self._random.random() < self.plan.loss:
            self._losses += 1
            return
        self._push(rank, event, self._random.randint(1, 20))
        if self._random.random() < self.plan.repeat:
            self._push(rank, event, self._random.randint(1, 60))

    def _carry_out(self, rank: int, effects: list[CollectiveEffect]) -> None:
        for effect in effects:
            if rank in self.plan.deaths:
                self.plan.deaths[rank] -= 1
                if self.plan.deaths[rank] < 0:
                    self.dead.add(rank)
                    return
            self._one(rank, effect)

    def _one(self, rank: int, effect: CollectiveEffect) -> None:
        match effect:
            case Write(target=target, field=fields):
                self._announced.setdefault((fields.world, fields.event_id), set()).add(rank)
                copy = MetadataField.unpack(fields.pack())
                self._travel(target, Written(rank, copy))
            case Pull(source=source, field=fields):
                self._pull(rank, source, fields)
            case Tell(target=target, message=message):
                self._travel(target, Heard(rank, message))
            case Wait(number=number, delay_ns=delay):
                self._push(rank, WaitOver(number), delay)
            case Completed():
                self.results[rank][effect.event_id] = (effect.world, effect.arrived)
                self._push(rank, None, 1 + self.plan.slow.get(rank, 0))
            case Missing():
                self.missing.append((rank, effect))
            case WorldChanged(world=world):
                self.worlds[rank][world.version] = world
                self._push(rank, None, 1)
            case Halted():
                self.halted[rank] = effect
            case _:
                raise AssertionError(f"unexpected {effect!r}")

    def _pull(self, rank: int, source: int, fields: MetadataField) -> None:
        world = self.worlds[rank][fields.world]
        assert self._announced[fields.world, fields.event_id] >= set(world.ranks) - self.dead
        self.pulls += 1
        if source in self.dead:
            return
        rows = self.nodes[source].read(rank, fields)
        self._travel(rank, Pulled(source, fields, rows))


def _version(world: World) -> int:
    return world.version
