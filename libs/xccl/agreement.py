"""Survivors agree on one dead set before they go on: consensus about the next world.

A **world** is the ranks that take part in collectives, under a version. A rank that has waited in
vain accuses those it misses. From then on it is frozen: no collective of this world makes progress
at a rank that has promised anything. One coordinator (the lowest rank that is not accused) is
alarmed, gathers promises, and gets its verdict accepted:

    Prepare ->  Promise(suspects, completed)      from all who live; the silent are dead
    Propose(verdict)  ->  Accepted                by a quorum of the old world
    Decided(verdict)                              to everybody; the dead who hear it stop

This is single-decree Paxos, one instance per world: ballots are (round, rank), and a coordinator
that finds a verdict already accepted proposes that one. Hence two ranks can never enter different
worlds of one version, whatever is lost, late or repeated, and however wrong a suspicion was. What
timing can do is delay: without a quorum nobody goes on, and the outcome is `gave_up`, for an
orchestrator to resolve.

A verdict also says where to resume: at the first collective that some survivor had not completed.
A barrier opens each collective, so no survivor has completed more than one beyond that.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable
from dataclasses import dataclass

from libs.errors import LocalProtocolError

Ballot = tuple[int, int]

#: Below every ballot that anybody starts.
NO_BALLOT: Ballot = (0, -1)
#: How often a silent rank is asked for its promise again before silence means death; assumed.
NUDGES_MAX = 2
#: Ballots that one rank starts before it gives up; assumed.
ROUNDS_MAX = 8


@dataclass(frozen=True, slots=True)
class World:
    """The ranks of a collective, ascending; `version` grows with every change."""

    version: int
    ranks: tuple[int, ...]

    def __post_init__(self) -> None:
        if not self.ranks or list(self.ranks) != sorted(set(self.ranks)):
            raise LocalProtocolError(f"a world needs distinct ascending ranks: {self.ranks}")

    def without(self, dead: Collection[int]) -> World:
        """The next world."""
        return World(self.version + 1, tuple(rank for rank in self.ranks if rank not in dead))

    def is_quorum(self, votes: Collection[int]) -> bool:
        """More than half, or exactly half if the lowest rank is among them.

        Any two quorums share a rank.
        """
        have = sum(1 for rank in self.ranks if rank in votes)
        return 2 * have > len(self.ranks) or (
            2 * have == len(self.ranks) and self.ranks[0] in votes
        )


@dataclass(frozen=True, slots=True)
class Verdict:
    """Who is dead, and the first collective to run again among the others."""

    dead: tuple[int, ...]
    resume: int


@dataclass(frozen=True, slots=True)
class Prepare:
    """Asks for a promise to ignore lower ballots."""

    world: int
    ballot: Ballot


@dataclass(frozen=True, slots=True)
class Promise:
    """The promise, with all that the coordinator must know to judge."""

    world: int
    ballot: Ballot
    suspects: tuple[int, ...]
    completed: int
    accepted: tuple[Ballot, Verdict] | None


@dataclass(frozen=True, slots=True)
class Propose:
    """Asks to accept a verdict."""

    world: int
    ballot: Ballot
    verdict: Verdict


@dataclass(frozen=True, slots=True)
class Accepted:
    """The verdict of `ballot` is accepted."""

    world: int
    ballot: Ballot


@dataclass(frozen=True, slots=True)
class Decided:
    """The verdict on `world` is final."""

    world: int
    verdict: Verdict


@dataclass(frozen=True, slots=True)
class Alarm:
    """Somebody is missing here; the receiver should coordinate unless somebody does."""

    world: int


AgreementMessage = Alarm | Prepare | Promise | Propose | Accepted | Decided


@dataclass(frozen=True, slots=True)
class Ask:
    """Your field of this event is missing here."""

    world: int
    event_id: int


@dataclass(frozen=True, slots=True)
class Late:
    """I am alive and have not entered this event yet."""

    world: int
    event_id: int


RankMessage = Ask | Late | AgreementMessage


@dataclass(frozen=True, slots=True)
class Tell:
    """An effect: a small message to another rank, over memory or any slower path."""

    target: int
    message: RankMessage


class Agreement:
    """One rank's part in the agreement about the successor of one world."""

    def __init__(self, rank: int, world: World) -> None:
        self.rank = rank
        self.world = world
        #: Frozen: this rank has promised, or accuses somebody.
        self.active = False
        self.verdict: Verdict | None = None
        self.gave_up = False
        self._suspects: tuple[int, ...] = ()
        self._completed = -1
        self._promised = NO_BALLOT
        self._accepted: tuple[Ballot, Verdict] | None = None
        self._mine: Ballot | None = None
        self._proposed: Verdict | None = None
        self._promises: dict[int, Promise] = {}
        self._votes: set[int] = set()
        self._nudges = 0
        self._rounds = 0

    @property
    def _coordinates(self) -> bool:
        """Whether this rank's ballot is the highest it knows."""
        return self._mine is not None and self._mine == self._promised

    @property
    def patience(self) -> int:
        """How many wait periods to leave before the next `overdue`; staggered, so that a
        coordinator is seldom interrupted.
        """
        if self._coordinates:
            return 1
        return 1 + (NUDGES_MAX + 1) * (1 + self.world.ranks.index(self.rank))

    def silent(self) -> tuple[int, ...]:
        """Ranks that have promised this rank nothing."""
        return tuple(rank for rank in self.world.ranks if rank not in self._promises)

    def accuse(self, suspects: Iterable[int], completed: int) -> list[Tell]:
        """Freeze, with the ranks that were waited for in vain; the lowest rank left coordinates."""
        self._freeze(completed)
        self._suspects = tuple(sorted({*self._suspects, *suspects}))
        lowest = next((r for r in self.world.ranks if r not in self._suspects), self.rank)
        if lowest != self.rank:
            return [Tell(lowest, Alarm(self.world.version))]
        return self._start() if self._mine is None else []

    def overdue(self) -> list[Tell]:
        """The patience is over: nudge the silent, judge them, or begin another ballot."""
        if self.verdict is not None or self.gave_up:
            return []
        if self._coordinates and self._proposed is None:
            if self._enough():
                return self._propose()
            if self._nudges < NUDGES_MAX:
                self._nudges += 1
                return [Tell(rank, self._prepare()) for rank in self.silent()]
            if self.world.is_quorum(self._promises):
                return self._propose()
        if self._rounds >= ROUNDS_MAX:
            self.gave_up = True
            return []
        return self._start()

    def hear(self, message: AgreementMessage, sender: int, completed: int) -> list[Tell]:
        """A message about this world. `completed` is this rank's last completed collective."""
        assert message.world == self.world.version, (message, self.world)
        if isinstance(message, Decided):
            self._decide(message.verdict)
            return []
        if self.verdict is not None:
            return [Tell(sender, Decided(self.world.version, self.verdict))]
        match message:
            case Alarm():
                self._freeze(completed)
                return self._start() if self._promised == NO_BALLOT else []
            case Prepare(ballot=ballot):
                return self._promise(ballot, sender, completed)
            case Promise():
                return self._promised_by(sender, message)
            case Propose(ballot=ballot, verdict=verdict):
                return self._accept(ballot, verdict, sender, completed)
            case Accepted(ballot=ballot):
                return self._accepted_by(sender, ballot)
            case _:
                raise AssertionError(f"unknown message {message!r}")

    # ------------------------------------------------------------ acceptor

    def _freeze(self, completed: int) -> None:
        if not self.active:
            self.active, self._completed = True, completed

    def _promise(self, ballot: Ballot, sender: int, completed: int) -> list[Tell]:
        self._freeze(completed)
        if ballot < self._promised:
            return []
        self._promised = ballot
        return [Tell(sender, self._own_promise(ballot))]

    def _own_promise(self, ballot: Ballot) -> Promise:
        return Promise(self.world.version, ballot, self._suspects, self._completed, self._accepted)

    def _accept(self, ballot: Ballot, verdict: Verdict, sender: int, completed: int) -> list[Tell]:
        self._freeze(completed)
        if ballot < self._promised:
            return []
        self._promised, self._accepted = ballot, (ballot, verdict)
        return [Tell(sender, Accepted(self.world.version, ballot))]

    # ------------------------------------------------------------ coordinator

    def _start(self) -> list[Tell]:
        self._rounds += 1
        self._nudges = 0
        self._mine = self._promised = (self._promised[0] + 1, self.rank)
        self._proposed = None
        self._votes = set()
        self._promises = {self.rank: self._own_promise(self._mine)}
        tells = [Tell(rank, self._prepare()) for rank in self.silent()]
        return tells or self._propose()

    def _prepare(self) -> Prepare:
        assert self._mine is not None
        return Prepare(self.world.version, self._mine)

    def _promised_by(self, sender: int, promise: Promise) -> list[Tell]:
        if promise.ballot != self._mine or not self._coordinates or self._proposed is not None:
            return []
        self._promises[sender] = promise
        return self._propose() if self._enough() else []

    def _enough(self) -> bool:
        """Whether everybody has promised, or after one nudge everybody who is not accused."""
        accused = {rank for known in self._promises.values() for rank in known.suspects}
        silent = set(self.silent())
        heard = not silent or (self._nudges > 0 and silent <= accused)
        return heard and self.world.is_quorum(self._promises)

    def _propose(self) -> list[Tell]:
        assert self._mine is not None
        verdict = self._judge()
        self._proposed = verdict
        self._votes = set()
        message = Propose(self.world.version, self._mine, verdict)
        self._accepted = (self._mine, verdict)
        tells = [Tell(rank, message) for rank in self.world.ranks if rank != self.rank]
        return tells + self._accepted_by(self.rank, self._mine)

    def _judge(self) -> Verdict:
        adopted = [known.accepted for known in self._promises.values() if known.accepted]
        if adopted:
            return max(adopted, key=_ballot_of)[1]
        dead = {*self.silent(), *_broken_pairs_cover(self._promises)}
        alive = [known for rank, known in self._promises.items() if rank not in dead]
        return Verdict(tuple(sorted(dead)), min(known.completed for known in alive) + 1)

    def _accepted_by(self, sender: int, ballot: Ballot) -> list[Tell]:
        if ballot != self._mine or self._proposed is None:
            return []
        self._votes.add(sender)
        if not self.world.is_quorum(self._votes):
            return []
        self._decide(self._proposed)
        decided = Decided(self.world.version, self._proposed)
        return [Tell(rank, decided) for rank in self.world.ranks if rank != self.rank]

    def _decide(self, verdict: Verdict) -> None:
        assert self.verdict in (None, verdict), f"two verdicts: {self.verdict} and {verdict}"
        self.verdict, self.active = verdict, True


def _ballot_of(accepted: tuple[Ballot, Verdict]) -> Ballot:
    return accepted[0]


def _broken_pairs_cover(promises: dict[int, Promise]) -> set[int]:
    """Ranks to leave out so that no accuser and its accused remain together.

    Both answered, so the path between them is broken and one of them must go: the one with most
    accusations for and against it, the higher rank among equals. A broken path costs one rank.
    """
    pairs = {
        (min(rank, other), max(rank, other))
        for rank, promise in promises.items()
        for other in promise.suspects
        if other in promises and other != rank
    }
    dropped: set[int] = set()
    while pairs:
        counts = Counter(rank for pair in sorted(pairs) for rank in pair)
        worst = max(counts, key=lambda rank: (counts[rank], rank))
        dropped.add(worst)
        pairs = {pair for pair in pairs if worst not in pair}
    return dropped
