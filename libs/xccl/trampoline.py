"""A2E and E2A in two hops: attention dies and expert dies of unequal number (P042-P045, P109).

    attention die --one frame per first-hop peer--> expert die --forwards--> other expert dies
    attention die <--one frame per work---------- expert die <--answers--- other expert dies

A die that talks to all 288 expert dies spends most of its time announcing (metadata per peer, on
few AIVs). So as many expert dies as there are attention dies of a domain serve as **trampolines**
and pass rows on. Three schemes, chosen by the table alone; the machines are the same:

    STRAIGHT   no trampoline: every expert die is a peer; the ablation
    PAIRED     each attention die has a trampoline of its own; one first-hop peer
    GROUPED    trampolines are peers of everybody and each serves its share of the remaining expert
               dies: the exchange in the first hop is symmetric, no second hop has more than a few
               peers, and no die carries more rows than another

Rows of a die travel as one `Part`. A work (source, sequence) names its rows for ever: an expert die
computes it once, and answers a repetition from memory. So everything may be sent again at any time,
along any path, and a new table (`replace`) needs no cooperation to be safe: versions only grow, the
source sends what is missing along the new paths, and duplicates end at the first die that knows
them. Only the source has deadlines; trampolines hold answers back just to bundle them, and stop
doing so for a work that is sent again.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from libs.errors import Backpressure, LocalProtocolError
from libs.xccl.trampoline_table import TrampolineTable
from libs.xccl.trampoline_types import (
    A2EFrame,
    Answered,
    E2AFrame,
    Ignored,
    NodeEffect,
    Part,
    Put,
    Run,
    SourceEffect,
    Unanswered,
    Unplaced,
    Work,
)

#: Works of one source that may be under way, and that an expert die remembers; assumed. A domain
#: runs two microbatches (P110); the rest is room for works sent again under a new sequence.
WINDOW = 8
#: Times a work is sent again before its silent dies are named; assumed.
RESENDS_MAX = 9

# ---------------------------------------------------------------- expert dies


@dataclass(slots=True)
class _Bundle:
    """Answers that wait for others of the same work; `awaited` are those still under way."""

    awaited: set[int]
    parts: list[Part] = field(default_factory=list)


class TrampolineNode:
    """One expert die: forwards what is for others, computes what is for itself."""

    def __init__(self, die: int, table: TrampolineTable) -> None:
        self.die = die
        self.table = table
        #: Per work: the trampoline to answer through, None for the source itself.
        self._routes: dict[Work, int | None] = {}
        self._answers: dict[Work, Part] = {}
        self._bundles: dict[Work, _Bundle] = {}
        self._newest: dict[int, int] = {}

    def adopt(self, table: TrampolineTable) -> None:
        """Use a newer table; an older one is ignored."""
        if table.version > self.table.version:
            self.table = table

    def handle(self, frame: A2EFrame | E2AFrame) -> list[NodeEffect]:
        """A frame was written into this die's memory."""
        if frame.source not in self.table.attention_index:
            return [Ignored(frame.source, frame.sequence, "unknown source")]
        if frame.sequence <= self._newest.get(frame.source, -1) - WINDOW:
            return [Ignored(frame.source, frame.sequence, "stale")]
        match frame:
            case A2EFrame():
                return self._a2e(frame)
            case E2AFrame():
                work = (frame.source, frame.sequence)
                return [put for part in frame.parts for put in self._collect(work, part)]
            case _:
                raise AssertionError(f"unknown frame {frame!r}")

    def computed(self, source: int, sequence: int, result: Part) -> list[NodeEffect]:
        """The experts here are done with a work that `Run` announced."""
        work = (source, sequence)
        if work not in self._routes:
            return []  # its source is far ahead and has given it up
        self._answers[work] = result
        return self._answer(work)

    def _a2e(self, frame: A2EFrame) -> list[NodeEffect]:
        others = [part for part in frame.parts if part.die != self.die]
        if frame.via is not None and others:
            return [Ignored(frame.source, frame.sequence, "a third hop")]
        work = (frame.source, frame.sequence)
        self._remember(work)
        effects: list[NodeEffect] = []
        if frame.via is None:
            effects += self._bundle(work, frame)
        for part in others:
            forwarded = A2EFrame(*work, frame.again, self.die, (part,))
            effects.append(Put(part.die, forwarded))
        for part in frame.parts:
            if part.die == self.die:
                effects += self._take(work, part, frame.via)
        return effects

    def _bundle(self, work: Work, frame: A2EFrame) -> list[NodeEffect]:
        """The first sending is answered in one frame; after a repetition nothing is held back."""
        if frame.again:
            held = self._bundles.pop(work, None)
            return [self._to_source(work, held.parts)] if held and held.parts else []
        if work not in self._bundles and work not in self._answers:
            self._bundles[work] = _Bundle({part.die for part in frame.parts})
        return []

    def _take(self, work: Work, part: Part, via: int | None) -> list[NodeEffect]:
        known = work in self._routes
        self._routes[work] = via
        if work in self._answers:
            return self._answer(work)
        return [] if known else [Run(*work, part)]

    def _answer(self, work: Work) -> list[NodeEffect]:
        via, part = self._routes[work], self._answers[work]
        if via is None:
            return self._collect(work, part)
        if via not in self.table.expert_index:
            return [self._to_source(work, [part])]
        return [Put(via, E2AFrame(*work, (part,)))]

    def _collect(self, work: Work, part: Part) -> list[NodeEffect]:
        bundle = self._bundles.get(work)
        if bundle is None:
            return [self._to_source(work, [part])]
        if part.die in bundle.awaited:
            bundle.awaited.discard(part.die)
            bundle.parts.append(part)
        if bundle.awaited:
            return []
        del self._bundles[work]
        return [self._to_source(work, bundle.parts)]

    def _to_source(self, work: Work, parts: Sequence[Part]) -> Put:
        ordered = tuple(sorted(parts, key=lambda part: part.die))
        return Put(work[0], E2AFrame(*work, ordered))

    def _remember(self, work: Work) -> None:
        """Forget what lies beyond the window of this source."""
        source, sequence = work
        if sequence <= self._newest.get(source, -1):
            return
        newest = self._newest.get(source, -1)
        for gone in range(newest - WINDOW + 1, min(newest, sequence - WINDOW) + 1):
            for memory in (self._routes, self._answers, self._bundles):
                memory.pop((source, gone), None)
        self._newest[source] = sequence

    def validate(self) -> None:
        """Memory is bounded by sources times window; no bundle is complete and kept."""
        bound = WINDOW * len(self.table.attention)
        assert max(len(self._routes), len(self._answers), len(self._bundles)) <= bound
        assert self._answers.keys() <= self._routes.keys()
        assert all(bundle.awaited for bundle in self._bundles.values())


# ---------------------------------------------------------------- attention dies


@dataclass(slots=True)
class _Flight:
    """A work under way."""

    parts: dict[int, Part]
    results: dict[int, Part] = field(default_factory=dict)
    resends: int = 0

    @property
    def missing(self) -> tuple[int, ...]:
        return tuple(die for die in self.parts if die not in self.results)


class AttentionNode:
    """One attention die: sends rows of a microbatch, collects what the experts made of them."""

    def __init__(self, die: int, table: TrampolineTable) -> None:
        self.die = die
        self.table = table
        self.sequence = 0
        self._flights: dict[int, _Flight] = {}

    def send(self, parts: Sequence[Part]) -> tuple[int, list[SourceEffect]]:
        """Begin a work; returns its sequence. `parts` name each die at most once.

        Raises `Backpressure` when the oldest work still under way would leave the window, and
        `LocalProtocolError` for a die that the table does not have.
        """
        by_die = {part.die: part for part in sorted(parts, key=lambda part: part.die)}
        strangers = [die for die in by_die if die not in self.table.expert_index]
        if strangers or len(by_die) != len(parts):
            raise LocalProtocolError(f"dies {strangers} are no experts, or a die is named twice")
        oldest = min(self._flights, default=self.sequence)
        if self.sequence - oldest >= WINDOW:
            raise Backpressure(f"work {oldest} is under way, {WINDOW} may be")
        sequence, self.sequence = self.sequence, self.sequence + 1
        flight = self._flights[sequence] = _Flight(by_die)
        return sequence, [*self._puts(sequence, flight, again=False), *self._finished(sequence)]

    def handle(self, frame: E2AFrame) -> list[SourceEffect]:
        """Answers came; each is taken once, and repetitions end here."""
        flight = self._flights.get(frame.sequence)
        if flight is None or frame.source != self.die:
            return []
        for part in frame.parts:
            if part.die in flight.parts:
                flight.results.setdefault(part.die, part)
        return self._finished(frame.sequence)

    def overdue(self, sequence: int) -> list[SourceEffect]:
        """The deadline of a work passed: send what is missing again, at last name the silent."""
        flight = self._flights.get(sequence)
        if flight is None:
            return []
        flight.resends += 1
        if flight.resends > RESENDS_MAX:
            del self._flights[sequence]
            return [Unanswered(sequence, flight.missing)]
        return self._puts(sequence, flight, again=True)

    def adopt(self, table: TrampolineTable) -> list[SourceEffect]:
        """Use a newer table and send what is missing along its paths; an older one is ignored."""
        if table.version <= self.table.version:
            return []
        self.table = table
        effects: list[SourceEffect] = []
        for sequence, flight in list(self._flights.items()):
            lost = [die for die in flight.missing if die not in table.expert_index]
            if lost:
                effects.append(Unplaced(sequence, tuple(flight.parts.pop(die) for die in lost)))
            puts = self._puts(sequence, flight, again=True)
            effects += [*puts, *self._finished(sequence)]
        return effects

    def missing(self, sequence: int) -> tuple[int, ...]:
        """The dies that have not answered a work yet."""
        flight = self._flights.get(sequence)
        return () if flight is None else flight.missing

    def _puts(self, sequence: int, flight: _Flight, *, again: bool) -> list[SourceEffect]:
        by_peer: dict[int, list[Part]] = {}
        for die in flight.missing:
            peer = self.table.first_hop(self.die, die)
            by_peer.setdefault(peer, []).append(flight.parts[die])
        frames = {
            peer: A2EFrame(self.die, sequence, again, None, tuple(parts))
            for peer, parts in by_peer.items()
        }
        return [Put(peer, frames[peer]) for peer in self.table.in_turn(self.die, list(frames))]

    def _finished(self, sequence: int) -> list[SourceEffect]:
        flight = self._flights[sequence]
        if len(flight.results) < len(flight.parts):
            return []
        del self._flights[sequence]
        return [Answered(sequence, tuple(flight.results[die] for die in flight.parts))]
