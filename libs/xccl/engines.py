"""What carries out a die's requests: AIV cores, DMA, memory, each a resource of emulated time.

    Load        MTE2 of the lane's core, and its part of the memory that all cores share
    LocalCopy   a core through both halves of its buffer, and the memory twice
    RemoteWrite the lane's store engine, then the link: a store streams onto it, and holds its
                engine until the last byte is on it; fields of 32 bytes slip through
    Fence       holds as soon as the last byte in front of it is on the link: a pair of dies keeps
                to one sub-plane of the switches, which preserves order

Whoever hosts the endpoint passes its effects to `run`, which answers what it can itself and gives
back the rest with the stamp at which it happens. It reads no clock and waits for nothing: work is
charged by its stamp.

**What a byte stands for.** An order says with `charge_bytes` what its message weighs on the
emulated timeline, which need not be what its bytes weigh here: KV of the small model stands for
KV of the profiled one.
"""

from __future__ import annotations

import heapq
from collections import defaultdict, deque
from dataclasses import dataclass, field, replace

from libs import units
from libs.fabric.timeline import Timeline
from libs.xccl import p2p_cost
from libs.xccl.endpoint import Endpoint
from libs.xccl.memory import Area
from libs.xccl.p2p import (
    Complete,
    Copied,
    Effect,
    Event,
    Failed,
    Fence,
    Fenced,
    Load,
    Loaded,
    LocalCopy,
    RemoteWrite,
    Wait,
)
from libs.xccl.ring import HEADER_BYTES


@dataclass(frozen=True, slots=True)
class Carried:
    """Something that leaves the die, or ends, at `at_ns`; `nbytes` is what a write weighs."""

    at_ns: int
    effect: RemoteWrite | Wait | Complete | Failed
    nbytes: int = 0


@dataclass(frozen=True, slots=True, order=True)
class _Asked:
    """A request to an engine. Of those for the same moment the lane served least goes first."""

    at_ns: int
    turn: int
    sequence: int
    effect: Effect = field(compare=False)


#: The store engine of one lane towards one peer.
_Store = tuple[int, int]


class Engines:
    """The engines of one die; `copiers` cores share its local copies."""

    def __init__(self, endpoint: Endpoint, copiers: int) -> None:
        assert copiers >= 1, copiers
        self.endpoint = endpoint
        self._copiers = copiers
        self._engines: defaultdict[tuple[str, int], Timeline] = defaultdict(Timeline)
        #: When each store engine has stored all it was given, and when the link is free of it.
        #: Links are the emulator's; this is what the die can know of its own.
        self._stored_ns: defaultdict[_Store, int] = defaultdict(int)
        self._link_free_ns = 0
        self._granted: defaultdict[_Store, int] = defaultdict(int)
        self._stores: defaultdict[_Store, deque[_Asked]] = defaultdict(deque)
        self._asked: list[_Asked] = []
        self._sequence = 0

    def run(self, effects: list[Effect], at_ns: int) -> list[Carried]:
        """Carry requests out in the order of their stamps, answers included."""
        carried: list[Carried] = []
        self._ask(effects, at_ns)
        while self._asked:
            asked = heapq.heappop(self._asked)
            at_ns, effect = asked.at_ns, asked.effect
            if _is_store(effect) and self._link_free_ns > at_ns:
                heapq.heappush(self._asked, replace(asked, at_ns=self._link_free_ns))
                continue
            match effect:
                case RemoteWrite():
                    carried.append(self._write(effect, at_ns))
                case Wait() | Complete() | Failed():
                    carried.append(Carried(at_ns, effect))
                case Load() | Fence() | LocalCopy():
                    answer, done_ns = self._engine(effect, at_ns)
                    self._ask(self.endpoint.handle(answer), done_ns)
                case _:
                    raise AssertionError(f"unknown effect {effect!r}")
        return carried

    # ------------------------------------------------------------ queues

    def _ask(self, effects: list[Effect], at_ns: int) -> None:
        for effect in effects:
            self._sequence += 1
            asked = _Asked(at_ns, 0, self._sequence, effect)
            if not _is_store(effect) and not isinstance(effect, Fence):
                heapq.heappush(self._asked, asked)
                continue
            store = _store_of(effect)
            self._stores[store].append(asked)
            if len(self._stores[store]) == 1:
                self._queue_store(store)

    def _queue_store(self, store: _Store) -> None:
        """Stores and fences of a lane go one after the other: let the first have its turn.

        A store asks for the link at the moment when, sent in one piece, its last byte would leave
        with the engine's last. Lanes take turns. None books the link in advance, or a tail of 32
        bytes would have to wait behind all that is booked.
        """
        asked = self._stores[store][0]
        at_ns = max(asked.at_ns, self._stored_ns[store])
        if isinstance(asked.effect, RemoteWrite):
            nbytes = self._weight(asked.effect)
            at_ns += p2p_cost.store_ns(nbytes, asked.effect.path) - _on_link_ns(nbytes)
        heapq.heappush(self._asked, replace(asked, at_ns=at_ns, turn=self._granted[store]))

    def _stored(self, store: _Store) -> None:
        """The first in the lane's queue is over."""
        self._granted[store] += 1
        self._stores[store].popleft()
        if self._stores[store]:
            self._queue_store(store)
        else:
            del self._stores[store]

    # ------------------------------------------------------------ engines

    def _engine(self, effect: Load | Fence | LocalCopy, at_ns: int) -> tuple[Event, int]:
        """The answer to a request, and when the lane's engine gives it."""
        match effect:
            case Load():
                nbytes = self.endpoint.weight(effect.flow, effect.nbytes)
                cost, shared = p2p_cost.load_ns(nbytes), p2p_cost.hbm_ns(nbytes)
                done = self._local(("mte2", effect.lane), at_ns, cost, shared)
                return Loaded(effect.flow, effect.lane, effect.number), done
            case Fence():
                self._stored(_store_of(effect))
                return Fenced(effect.flow, effect.lane, effect.number), at_ns
            case LocalCopy():
                nbytes = self.endpoint.weight(effect.flow, effect.nbytes)
                cost, shared = p2p_cost.copy_ns(nbytes), p2p_cost.hbm_ns(2 * nbytes)
                core = effect.lane % self._copiers
                copied: Copied = self.endpoint.copy(effect)
                return copied, self._local(("copy", core), at_ns, cost, shared)
            case _:
                raise AssertionError(f"unknown effect {effect!r}")

    def _local(self, engine: tuple[str, int], at_ns: int, cost: int, shared: int) -> int:
        """When a core is done that needs `cost` itself and `shared` of the die's memory."""
        start = self._engines[engine].reserve(at_ns, cost)
        return max(start + cost, self._engines["hbm", 0].reserve(start, shared) + shared)

    def _write(self, write: RemoteWrite, at_ns: int) -> Carried:
        nbytes = self._weight(write)
        if _is_store(write):
            store = _store_of(write)
            self._stored_ns[store] = self._link_free_ns = at_ns + _on_link_ns(nbytes)
            self._stored(store)
        return Carried(at_ns, write, nbytes)

    def _weight(self, write: RemoteWrite) -> int:
        """What a write weighs: of a slot its payload only stands for more than it is."""
        match write.area:
            case Area.METADATA:
                return len(write.data)
            case Area.MANAGED:
                payload = len(write.data) - HEADER_BYTES
                return HEADER_BYTES + self.endpoint.weight(write.flow, payload)
            case Area.APPLICATION:
                return self.endpoint.weight(write.flow, len(write.data))
            case _:
                raise AssertionError(f"unknown area {write.area!r}")


def _is_store(effect: Effect) -> bool:
    """Whether it occupies a lane's store engine; fields of 32 bytes slip through."""
    return isinstance(effect, RemoteWrite) and effect.area is not Area.METADATA


def _store_of(effect: Effect) -> _Store:
    """The store engine of a write or a fence."""
    assert isinstance(effect, RemoteWrite | Fence), effect
    lane = effect.tag.lane if isinstance(effect, RemoteWrite) else effect.lane
    return effect.flow.peer, lane


def _on_link_ns(nbytes: int) -> int:
    return units.transfer_ns(nbytes, p2p_cost.UB_BYTES_PER_S)
