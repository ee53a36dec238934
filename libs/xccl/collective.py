"""One rank's side of all-to-all collectives: counts first, a barrier on metadata alone, then pull.

    IDLE --enter--> COUNTING --all counts--> PULLING --all rows--> IDLE
                       |  deadline               |  deadline
                       +--> AGREEING <-----------+   survivors agree; the dead stop (HALTED)

A rank lays its rows, sorted by target, into its managed area and writes one 32-byte field (event,
offset, count) to every rank of the world, a count of zero included: whoever has no rows enters
nevertheless. When it holds everybody's field it pulls exactly `count` rows at `offset` from
each peer that has any (P039-P040). No rank pulls before all counts are in.

Two managed areas take turns. Event n + 2 overwrites n, and a rank enters n + 2 only after everybody
announced n + 1, which they do after pulling all of n: so no pull can find its rows gone.

Every wait is bounded. The first deadline names the missing ranks (not the waiting one) and asks
them again; a rank that is merely late says so. Then the missing are accused (`agreement`), and once
a verdict is known the survivors are told to run the collectives from `resume` again in the smaller
world. Fields and rows carry the world's version, so what belongs to an earlier one is never
matched.

`handle(event) -> effects` like a core, but transport-neutral: a core that owns a `Collective` turns
the effects into frames of its own and into timers. `read` is the one-sided access by peers.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from libs.errors import CapacityExceeded, LocalProtocolError
from libs.xccl.agreement import (
    Agreement,
    Ask,
    Decided,
    Late,
    RankMessage,
    Tell,
    Verdict,
    World,
)
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
    Refused,
    Rows,
    State,
    Wait,
    WaitOver,
    WorldChanged,
    Write,
    Written,
)

#: Verdicts remembered for ranks that ask about a world long gone; assumed.
VERDICTS_KEPT = 16


@dataclass(frozen=True, slots=True, eq=False)
class _Area:
    """One managed area: whose rows, and where each target's begin."""

    world: int
    event_id: int
    fields: dict[int, MetadataField]
    columns: Rows


class Collective:
    """One rank. `event` is the collective it is in, or the one to enter next."""

    def __init__(self, rank: int, world: World, limits: Limits | None = None) -> None:
        if rank not in world.ranks:
            raise LocalProtocolError(f"rank {rank} is not in {world.ranks}")
        self.rank = rank
        self.world = world
        self.limits = limits or Limits()
        self.state = State.IDLE
        self.event = 0
        self._areas: list[_Area | None] = [None, None]
        self._fields: dict[tuple[int, int], dict[int, MetadataField]] = {}
        self._awaited: set[int] = set()
        self._arrived: dict[int, Rows] = {}
        self._agreement = Agreement(rank, world)
        self._verdicts: dict[int, Verdict] = {}
        self._wait_number = 0
        self._asks = 0
        self._late_waits = 0
        self._late: set[int] = set()

    # ------------------------------------------------------------ the owner's side

    def enter(self, outgoing: Mapping[int, Rows]) -> list[CollectiveEffect]:
        """Begin the collective `event` with rows by target rank; none at all is legal.

        Raises `LocalProtocolError` when another is under way or a target is outside the world, and
        `CapacityExceeded` when the rows do not fit the managed area.
        """
        if self.state is not State.IDLE:
            raise LocalProtocolError(f"rank {self.rank} is {self.state.value} in {self.event}")
        area = self._lay(outgoing)
        self._areas[self.event % 2] = area
        self.state = State.COUNTING
        self._asks = self._late_waits = 0
        self._arrived = {}
        key = (self.world.version, self.event)
        self._fields.setdefault(key, {})[self.rank] = area.fields[self.rank]
        writes = [Write(rank, area.fields[rank]) for rank in self._peers()]
        return [*writes, self._wait(), *self._counted()]

    def read(self, reader: int, field: MetadataField) -> Rows | None:
        """The one-sided access of a peer: `field` as announced to `reader`; None when overwritten.

        A rank that halted is still readable: memory outlives the process that gave up.
        """
        area = self._areas[field.event_id % 2]
        if area is None or area.fields.get(reader) != field:
            return None
        return tuple(column[field.offset : field.offset + field.count] for column in area.columns)

    def handle(self, event: CollectiveEvent) -> list[CollectiveEffect]:
        """Take one event, return what must happen."""
        if self.state is State.HALTED:
            return []
        match event:
            case Written(sender=sender, field=field):
                return self._written(sender, field)
            case Pulled():
                return self._pulled(event)
            case Heard(sender=sender, message=message):
                return self._heard(sender, message)
            case WaitOver(number=number):
                return self._overdue() if number == self._wait_number else []
            case _:
                raise AssertionError(f"unexpected {event!r}")

    # ------------------------------------------------------------ laying out, counting, pulling

    def _peers(self) -> list[int]:
        """The others, beginning behind this rank, so that not all start at the same peer."""
        index = self.world.ranks.index(self.rank)
        return [*self.world.ranks[index + 1 :], *self.world.ranks[:index]]

    def _lay(self, outgoing: Mapping[int, Rows]) -> _Area:
        strangers = sorted(set(outgoing) - set(self.world.ranks))
        if strangers:
            raise LocalProtocolError(f"rows for {strangers}, outside world {self.world.version}")
        targets = sorted(outgoing)
        fields, offset = {}, 0
        for rank in self.world.ranks:
            count = len(outgoing[rank][0]) if rank in outgoing else 0
            fields[rank] = MetadataField(self.event, self.world.version, offset, count)
            offset += count
        if offset > self.limits.rows_max:
            raise CapacityExceeded(f"{offset} rows, the area holds {self.limits.rows_max}")
        columns = tuple(
            np.concatenate(parts) for parts in zip(*(outgoing[t] for t in targets), strict=True)
        )
        if any(len(column) != offset for column in columns):
            raise LocalProtocolError("columns of one batch differ in length")
        return _Area(self.world.version, self.event, fields, columns)

    def _written(self, sender: int, field: MetadataField) -> list[CollectiveEffect]:
        reason = self._objection(sender, field)
        if reason is not None:
            return [Refused(sender, reason)] if reason else []
        key = (field.world, field.event_id)
        row = self._fields.setdefault(key, {})
        known = row.setdefault(sender, field)
        if known != field:
            return [Refused(sender, f"a second field for event {field.event_id}")]
        if self.state is State.COUNTING and key == (self.world.version, self.event):
            return self._counted()
        return [self._what_was_decided(sender)] if field.world > self.world.version else []

    def _what_was_decided(self, sender: int) -> Tell:
        """A question about our world; `sender`, who lives in a later one, answers it so."""
        return Tell(sender, Ask(self.world.version, self.event))

    def _objection(self, sender: int, field: MetadataField) -> str | None:
        """Why a field is not taken; empty for a stale one."""
        ahead = field.world - self.world.version
        if ahead < 0 or (ahead == 0 and field.event_id < self.event):
            return ""
        if sender not in self.world.ranks:
            return f"rank {sender} is not in world {self.world.version}"
        # A peer is at most one collective ahead, or one verdict, which takes back a unit at most.
        if ahead > 1 or abs(field.event_id - self.event) > 1 + self.limits.unit:
            return f"world {field.world} event {field.event_id} is out of reach"
        if field.count > self.limits.rows_max:
            return f"{field.count} rows, an area holds {self.limits.rows_max}"
        return None

    def _counted(self) -> list[CollectiveEffect]:
        fields = self._fields[self.world.version, self.event]
        if len(fields) < len(self.world.ranks):
            return []
        self.state = State.PULLING
        self._asks = 0
        own = self.read(self.rank, fields[self.rank])
        if own is not None and fields[self.rank].count:
            self._arrived[self.rank] = own
        self._awaited = {r for r in self.world.ranks if fields[r].count and r != self.rank}
        if not self._awaited:
            return self._complete()
        return [*self._pulls(), self._wait()]

    def _pulls(self) -> list[Pull]:
        fields = self._fields[self.world.version, self.event]
        assert len(fields) == len(self.world.ranks), "a pull before all counts"
        return [Pull(rank, fields[rank]) for rank in self._peers() if rank in self._awaited]

    def _pulled(self, event: Pulled) -> list[CollectiveEffect]:
        if self.state is not State.PULLING or event.source not in self._awaited:
            return []
        expected = self._fields[self.world.version, self.event][event.source]
        if event.field != expected:
            return []
        if event.rows is None:
            return []  # the peer lives in the next world already; our own wait will tell
        if any(len(column) != expected.count for column in event.rows):
            return [Refused(event.source, f"rows of event {self.event} are not as announced")]
        self._arrived[event.source] = event.rows
        self._awaited.discard(event.source)
        return [] if self._awaited else self._complete()

    def _complete(self) -> list[CollectiveEffect]:
        done = Completed(self.event, self.world.version, dict(sorted(self._arrived.items())))
        self.state = State.IDLE
        self.event += 1
        oldest = self.event - self.limits.unit
        self._fields = {key: row for key, row in self._fields.items() if key[1] >= oldest}
        self._fields.pop((self.world.version, self.event - 1))
        self._wait_number += 1
        self._arrived = {}
        return [done]

    # ------------------------------------------------------------ deadlines

    def _wait(self, periods: int = 1) -> Wait:
        self._wait_number += 1
        return Wait(self._wait_number, periods * self.limits.wait_ns)

    def missing(self) -> tuple[int, ...]:
        """The ranks this one waits for."""
        match self.state:
            case State.COUNTING:
                fields = self._fields[self.world.version, self.event]
                return tuple(rank for rank in self.world.ranks if rank not in fields)
            case State.PULLING:
                return tuple(sorted(self._awaited))
            case State.AGREEING:
                return self._agreement.silent()
            case _:
                return ()

    def _overdue(self) -> list[CollectiveEffect]:
        if self.state is State.AGREEING:
            return self._agreed(self._agreement.overdue())
        missing = self.missing()
        assert missing, f"rank {self.rank} is {self.state.value} and waits for nobody"
        silent, self._late = tuple(rank for rank in missing if rank not in self._late), set()
        self._asks += bool(silent)
        self._late_waits += not silent
        accused: tuple[int, ...] = ()
        if self._asks > self.limits.asks_max:
            accused = silent
        elif self._late_waits > self.limits.late_waits_max:
            accused = missing
        told = Missing(self.event, missing)
        if accused:
            return [told, *self._agreed(self._agreement.accuse(accused, self.event - 1))]
        if self.state is State.PULLING:
            return [told, *self._pulls(), self._wait()]
        ask = Ask(self.world.version, self.event)
        return [told, *(Tell(rank, ask) for rank in missing), self._wait()]

    # ------------------------------------------------------------ messages and agreement

    def _heard(self, sender: int, message: RankMessage) -> list[CollectiveEffect]:
        if message.world < self.world.version:
            verdict = self._verdicts.get(message.world)
            if verdict is None or isinstance(message, Decided):
                return []
            return [Tell(sender, Decided(message.world, verdict))]
        if message.world > self.world.version:
            return [self._what_was_decided(sender)]
        match message:
            case Ask(event_id=event_id):
                return self._asked(sender, event_id)
            case Late(event_id=event_id):
                if event_id == self.event and sender in self.missing():
                    self._late.add(sender)
                return []
            case _:  # the agreement raises for what it does not know
                return self._agreed(self._agreement.hear(message, sender, self.event - 1))

    def _asked(self, sender: int, event_id: int) -> list[CollectiveEffect]:
        area = self._areas[event_id % 2]
        if area is not None and (area.world, area.event_id) == (self.world.version, event_id):
            return [Write(sender, area.fields[sender])] if sender in area.fields else []
        # A frozen rank says so too: who waits for it must not take it for the dead one.
        late = 0 <= event_id - self.event <= 1
        return [Tell(sender, Late(self.world.version, event_id))] if late else []

    def _agreed(self, tells: list[Tell]) -> list[CollectiveEffect]:
        """Carry out what the agreement wants, and its outcome if there is one."""
        agreement = self._agreement
        effects: list[CollectiveEffect] = [*tells]
        frozen = agreement.active and self.state is not State.AGREEING
        if frozen:
            self.state = State.AGREEING
        if agreement.verdict is not None:
            return [*effects, *self._apply(agreement.verdict)]
        if agreement.gave_up:
            self.state = State.HALTED
            return [*effects, Halted("no quorum", agreement.silent())]
        return [*effects, self._wait(agreement.patience)] if tells or frozen else effects

    def _apply(self, verdict: Verdict) -> list[CollectiveEffect]:
        self._wait_number += 1
        self._verdicts[self.world.version] = verdict
        self._verdicts.pop(self.world.version - VERDICTS_KEPT, None)
        if self.rank in verdict.dead:
            self.state = State.HALTED
            return [Halted("voted dead", ())]
        self.world = self.world.without(verdict.dead)
        self._fields = {k: row for k, row in self._fields.items() if k[0] == self.world.version}
        self._agreement = Agreement(self.rank, self.world)
        resume = verdict.resume - verdict.resume % self.limits.unit
        self.state, self.event = State.IDLE, resume
        self._awaited, self._arrived = set(), {}
        return [WorldChanged(self.world, verdict.dead, resume)]

    def validate(self) -> None:
        """What holds after every event."""
        if self.state is State.PULLING:
            fields = self._fields[self.world.version, self.event]
            assert tuple(sorted(fields)) == self.world.ranks, "a pull before all counts"
        assert len(self._fields) <= 4 * (2 + self.limits.unit), "two worlds, a few events"
        assert self.state is State.HALTED or self.rank in self.world.ranks
