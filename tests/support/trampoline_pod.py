"""Attention and expert dies around a fabric that delays and loses; seeded, no clock."""

from __future__ import annotations

import heapq
from collections import Counter
from random import Random

from libs.xccl.trampoline import RESENDS_MAX, AttentionNode, TrampolineNode
from libs.xccl.trampoline_table import TrampolineTable
from libs.xccl.trampoline_types import (
    A2EFrame,
    Answered,
    E2AFrame,
    NodeEffect,
    Part,
    Put,
    Run,
    SourceEffect,
    Unplaced,
)


class Pod:
    """Every work's rows are its own name, so that what comes back can be judged."""

    def __init__(self, table: TrampolineTable, seed: int, loss: float = 0.0) -> None:
        self.table = table
        self.sources = {die: AttentionNode(die, table) for die in table.attention}
        self.experts = {die: TrampolineNode(die, table) for die in table.experts}
        self.dead: set[int] = set()
        self.runs: Counter[tuple[int, int, int]] = Counter()
        self.answers: dict[tuple[int, int], tuple[Part, ...]] = {}
        self.unplaced: list[tuple[int, int, Part]] = []
        self.frames = 0
        self._random = Random(seed)
        self._loss = loss
        self._losses = 0
        self._heap: list[tuple[int, int, int, A2EFrame | E2AFrame | Run]] = []
        self._now = 0

    def send(self, source: int, dies: list[int]) -> int:
        node = self.sources[source]
        name = f"{source}/{node.sequence}"
        sequence, effects = node.send([Part(die, 1, f"{name}>{die}") for die in dies])
        self._of_source(source, effects)
        return sequence

    def step(self) -> bool:
        if not self._heap:
            return False
        self._now, _, die, item = heapq.heappop(self._heap)
        if die in self.dead:
            return True
        if die in self.sources:
            assert isinstance(item, E2AFrame)
            self._of_source(die, self.sources[die].handle(item))
            return True
        node = self.experts[die]
        if isinstance(item, Run):
            done = Part(die, item.part.rows, f"{item.part.payload} done")
            self._of_expert(die, node.computed(item.source, item.sequence, done))
        else:
            self._of_expert(die, node.handle(item))
        node.validate()
        return True

    def settle(self) -> None:
        """Run to rest; deadlines make sources send again what is missing."""
        for _ in range(RESENDS_MAX):
            while self.step():
                pass
            for source, node in self.sources.items():
                for sequence in range(node.sequence):
                    self._of_source(source, node.overdue(sequence))
        assert not self._heap

    def kill(self, die: int) -> None:
        """The die is gone; the authority publishes the next table, which reaches some first."""
        self.dead.add(die)
        self.table = self.table.replace(die)
        nodes: list[int] = [*self.sources, *self.experts]
        self._random.shuffle(nodes)
        for other in nodes:
            if other in self.sources:
                self._of_source(other, self.sources[other].adopt(self.table))
            else:
                self.experts[other].adopt(self.table)
            for _ in range(self._random.randint(0, 3)):
                self.step()

    def _push(self, die: int, item: A2EFrame | E2AFrame | Run) -> None:
        if (
            self._losses < RESENDS_MAX - 1
            and not isinstance(item, Run)
            and self._random.random() < self._loss
        ):
            self._losses += 1
            return
        self.frames += 1
        when = self._now + self._random.randint(1, 30)
        heapq.heappush(self._heap, (when, self.frames, die, item))

    def _of_source(self, source: int, effects: list[SourceEffect]) -> None:
        for effect in effects:
            match effect:
                case Put(target=target, frame=frame):
                    self._push(target, frame)
                case Answered(sequence=sequence, parts=parts):
                    assert (source, sequence) not in self.answers, "answered twice"
                    self.answers[source, sequence] = parts
                case Unplaced(sequence=sequence, parts=parts):
                    self.unplaced += [(source, sequence, part) for part in parts]
                case _:
                    raise AssertionError(f"unexpected {effect!r}")

    def _of_expert(self, die: int, effects: list[NodeEffect]) -> None:
        for effect in effects:
            match effect:
                case Put(target=target, frame=frame):
                    self._push(target, frame)
                case Run(source=source, sequence=sequence):
                    self.runs[source, sequence, die] += 1
                    self._push(die, effect)
                case _:
                    raise AssertionError(f"unexpected {effect!r}")
