"""The collectives' state machines as cores, for benchmarks: effects become frames with a cost.

Frames say how many rows they stand for and are charged for them; the rows have no columns. A stage
begins with its start-up (`libs.xccl.collective_cost`); a pull is a request of 32 bytes and the rows
as the peer's answer. The same cores run under `SimHost` and under `LeanHost`.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

import numpy as np

from libs.actor import Effect, Event, Received, Started, Transmit
from libs.units import transfer_ns
from libs.wire.registry import message
from libs.xccl.agreement import World
from libs.xccl.collective import Collective
from libs.xccl.collective_cost import A2A, CollectiveParams, metadata_ns
from libs.xccl.collective_types import (
    FIELD_BYTES,
    CollectiveEffect,
    Completed,
    MetadataField,
    Pull,
    Pulled,
    Rows,
    Wait,
    Write,
    Written,
)
from libs.xccl.trampoline import AttentionNode, TrampolineNode
from libs.xccl.trampoline_table import TrampolineTable
from libs.xccl.trampoline_types import A2EFrame, Answered, E2AFrame, Part, Put, Run

#: The rate at which the engine of a die puts frames on its link.
LINK = A2A.bytes_per_s


@message("bench_field")
@dataclass(frozen=True, slots=True)
class BenchField:
    """A metadata field (`written`), a request to read what it announced, or the rows (`pulled`)."""

    what: str
    sender: int
    field: MetadataField


@message("bench_rows")
@dataclass(frozen=True, slots=True)
class BenchRows:
    """A frame of A2E (`back` is False) or E2A; `parts` are (die, rows). `via` is -1 for none."""

    source: int
    sequence: int
    back: bool
    via: int
    parts: tuple[tuple[int, int], ...]


def rows_of(count: int) -> Rows:
    """`count` rows without columns."""
    return (np.zeros((count, 0), np.int8),)


# ---------------------------------------------------------------- dispatch and combine


@dataclass(frozen=True, slots=True)
class RankConfig:
    """One rank of a benchmark: rows per target, start-up, bytes per row."""

    world: World
    counts: dict[int, int]
    start_ns: int
    row_bytes: int


class RankCore:
    """Enters one collective at its start and remembers when it completed."""

    def __init__(self, name: str, rank: int, config: RankConfig) -> None:
        self.name = name
        self.rank = rank
        self.config = config
        self.done_ns: int | None = None
        self._collective = Collective(rank, config.world)

    def handle(self, event: Event, now_ns: int) -> list[Effect]:
        """Fields and rows in, fields and reads out."""
        match event:
            case Started():
                counts = self.config.counts
                effects = self._collective.enter({to: rows_of(n) for to, n in counts.items()})
                now_ns += self.config.start_ns
            case Received(message=BenchField(what="read", sender=sender, field=field)):
                return [self._rows(sender, field)]
            case Received(message=BenchField(what="pulled", sender=sender, field=field)):
                effects = self._collective.handle(Pulled(sender, field, rows_of(field.count)))
            case Received(message=BenchField(what="written", sender=sender, field=field)):
                effects = self._collective.handle(Written(sender, field))
            case _:
                raise AssertionError(f"unexpected {event!r}")
        return [made for effect in effects for made in self._made(effect, now_ns)]

    def _made(self, effect: CollectiveEffect, at_ns: int) -> list[Effect]:
        match effect:
            case Write(target=target, field=field):
                return [self._field("written", target, field, at_ns)]
            case Pull(source=source, field=field):
                return [self._field("read", source, field, at_ns)]
            case Completed():
                self.done_ns = at_ns
                return []
            case Wait():
                return []  # nobody dies in a benchmark
            case _:
                raise AssertionError(f"unexpected {effect!r}")

    def _field(self, what: str, target: int, field: MetadataField, at_ns: int) -> Transmit:
        return Transmit(
            self.rank, target, BenchField(what, self.rank, field), FIELD_BYTES, 1, at_ns
        )

    def _rows(self, reader: int, field: MetadataField) -> Transmit:
        """What the peer reads: its memory is ours, so the rows leave by our link."""
        rows = self._collective.read(reader, field)
        assert rows is not None, f"{reader} reads what rank {self.rank} no longer has"
        charge = len(rows[0]) * self.config.row_bytes
        return Transmit(self.rank, reader, BenchField("pulled", self.rank, field), charge)

    def validate(self) -> None:
        """See `Collective.validate`."""
        self._collective.validate()


# ---------------------------------------------------------------- A2E and E2A


@dataclass(frozen=True, slots=True)
class StageConfig:
    """Costs of one direction. With `barrier` a trampoline begins its second stage when all of the
    first is in, as a kernel that counts first does; without, it passes on what it has.
    """

    table: TrampolineTable
    params: CollectiveParams
    row_bytes: int
    first_ns: int
    second_ns: int
    barrier: bool = True


class _StagedDie:
    """What both kinds of die share: puts of one stage depart one metadata write after another."""

    def __init__(self, die: int, config: StageConfig) -> None:
        self.name = f"bench_die.{die}"
        self.die = die
        self.config = config

    def _depart(self, puts: list[Put], at_ns: int) -> list[Effect]:
        effects: list[Effect] = []
        announced: dict[int, int] = {}
        sent_ns = at_ns
        for put in puts:
            peers = announced.setdefault(put.target, len(announced) + 1)
            charge = put.frame.rows * self.config.row_bytes
            # Announcing goes on while rows leave; a frame waits for the slower of the two.
            depart_ns = max(sent_ns, at_ns + metadata_ns(peers, self.config.params))
            sent_ns = depart_ns + transfer_ns(charge, LINK)
            frame = _bench_rows(put.frame)
            effects.append(Transmit(self.die, put.target, frame, charge, at_ns=depart_ns))
        return effects

    def validate(self) -> None:
        """Nothing of its own."""


class SourceCore(_StagedDie):
    """An attention die: sends the rows of one microbatch, `rows` to each expert die."""

    def __init__(self, die: int, config: StageConfig, rows: int) -> None:
        super().__init__(die, config)
        self.done_ns: int | None = None
        self._rows = rows
        self._node = AttentionNode(die, config.table)

    def handle(self, event: Event, now_ns: int) -> list[Effect]:
        """Start, and answers."""
        match event:
            case Started():
                parts = [Part(die, self._rows, None) for die in self.config.table.experts]
                _, effects = self._node.send(parts)
                puts = [effect for effect in effects if isinstance(effect, Put)]
                return self._depart(puts, now_ns + self.config.first_ns)
            case Received(message=BenchRows() as bench):
                frame = _frame(bench)
                assert isinstance(frame, E2AFrame)
                effects = self._node.handle(frame)
                if any(isinstance(effect, Answered) for effect in effects):
                    self.done_ns = now_ns
                return []
            case _:
                raise AssertionError(f"unexpected {event!r}")


@dataclass(frozen=True, slots=True)
class FirstHop:
    """Frames that die `die` gets in the first stage of A2E, and of E2A."""

    a2e: dict[int, int]
    e2a: dict[int, int]


def first_hop_frames(table: TrampolineTable) -> FirstHop:
    """What a barrier waits for when every source has rows for every expert die."""
    hops = [(s, die, table.first_hop(s, die)) for s in table.attention for die in table.experts]
    a2e = Counter(hop for _, hop in {(source, hop) for source, _, hop in hops})
    e2a = Counter(hop for _, die, hop in hops if hop != die)
    return FirstHop(dict(a2e), dict(e2a))


class ExpertCore(_StagedDie):
    """An expert die: forwards, notes when its last rows came, answers when told to."""

    def __init__(self, die: int, config: StageConfig, first_hop: FirstHop) -> None:
        super().__init__(die, config)
        self.last_ns = 0
        self._runs: list[Run] = []
        self._node = TrampolineNode(die, config.table)
        self._held: list[Put] = []
        self._first_hop = first_hop
        self._due = first_hop.a2e.get(die, 0)

    def handle(self, event: Event, now_ns: int) -> list[Effect]:
        """Rows to compute or forward; answers of other dies to bundle."""
        match event:
            case Started():
                return []
            case Received(message=BenchRows() as bench):
                effects = self._node.handle(_frame(bench))
            case _:
                raise AssertionError(f"unexpected {event!r}")
        self._due -= bench.back or bench.via < 0
        runs = [effect for effect in effects if isinstance(effect, Run)]
        if runs:
            self._runs += runs
            self.last_ns = now_ns
        self._held += [effect for effect in effects if isinstance(effect, Put)]
        if not self._held or (self.config.barrier and self._due > 0):
            return []
        puts, self._held = self._held, []
        return self._depart(self._in_turn(puts), now_ns + self.config.second_ns)

    def answer(self, config: StageConfig, now_ns: int) -> list[Effect]:
        """All experts everywhere are done at `now_ns`: E2A begins, charged by `config`."""
        self.config = config
        self._due = self._first_hop.e2a.get(self.die, 0)
        made = [
            effect
            for run in self._runs
            for effect in self._node.computed(run.source, run.sequence, run.part)
        ]
        puts = [effect for effect in made if isinstance(effect, Put)]
        if self._due:
            # What a trampoline has for the sources themselves belongs to its second stage.
            self._held = [put for put in puts if put.target in config.table.attention_index]
            puts = [put for put in puts if put.target in config.table.expert_index]
        return self._depart(self._in_turn(puts), now_ns + config.first_ns)

    def _in_turn(self, puts: list[Put]) -> list[Put]:
        """By target, each die beginning at its own place, so that not all start at the same."""
        table = self.config.table
        ordered = sorted(puts, key=lambda put: put.target)
        start = table.expert_index[self.die] * len(puts) // len(table.experts)
        return [*ordered[start:], *ordered[:start]]


def _bench_rows(frame: A2EFrame | E2AFrame) -> BenchRows:
    parts = tuple((part.die, part.rows) for part in frame.parts)
    match frame:
        case A2EFrame(source=source, sequence=sequence, via=via):
            return BenchRows(source, sequence, False, -1 if via is None else via, parts)
        case E2AFrame(source=source, sequence=sequence):
            return BenchRows(source, sequence, True, -1, parts)
        case _:
            raise AssertionError(f"unknown frame {frame!r}")


def _frame(bench: BenchRows) -> A2EFrame | E2AFrame:
    parts = tuple(Part(die, rows, None) for die, rows in bench.parts)
    if bench.back:
        return E2AFrame(bench.source, bench.sequence, parts)
    via = None if bench.via < 0 else bench.via
    return A2EFrame(bench.source, bench.sequence, False, via, parts)
