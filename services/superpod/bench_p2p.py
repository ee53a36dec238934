"""Fig. 5 again: latency of one send over message size and AIV cores, by running the protocol.

    P2pDieCore(sender) --Transmit--> SimHost --> FabricEmulatorCore --> P2pDieCore(receiver)
            ^                                                                   |
            +------------------------------- ACK --------------------------------+

Two dies run the real send and receive machines on real bytes. A die charges what its engines do
(`libs.xccl.p2p_cost`), the emulator what the links carry; the law of Fig. 5 is nowhere computed,
`law_us` stands beside each row for comparison. A chunk is at most one half of the unified buffer,
so the number of chunks is that of the real protocol; nothing is left out.

Agreement with the paper is by construction in two constants (36 GB/s per AIV core and the kernel
start, both fitted to Fig. 5) and independent in the rest: overlap, back-pressure, link sharing.
"""

from __future__ import annotations

import heapq
from collections import defaultdict, deque
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from libs import units
from libs.actor import (
    Effect,
    Event,
    Received,
    Record,
    SetTimer,
    Started,
    TimerFired,
    Transmit,
)
from libs.fabric.timeline import Timeline
from libs.runtime.sim_host import SimHost, SimOptions
from libs.wire.fabric import UbFrame
from libs.xccl import p2p, p2p_cost
from libs.xccl.endpoint import Endpoint
from libs.xccl.frames import pack_write, unpack_write
from libs.xccl.memory import Area, DieMemory
from libs.xccl.paths import Path
from services.fabric_emulator.core import FabricEmulatorCore

KB = 1024
#: The axes of Fig. 5 (P037).
SIZES = tuple(KB * kb for kb in (36, 72, 144, 288, 576, 1152, 2304, 4608, 9216))
AIVS = tuple(range(2, 49, 2))
#: Two dies of different servers, as in the paper.
SENDER, RECEIVER = 0, 17
_DIES = 32
_EVENT = p2p.event_id(1, 1)


@dataclass(frozen=True, slots=True)
class P2pCase:
    """One point of the figure."""

    nbytes: int
    aivs: int
    path: Path = Path.MTE
    zero_copy: bool = False
    asynchronous: bool = False


@dataclass(frozen=True, slots=True, order=True)
class _Asked:
    """A request to an engine. Of those for the same moment the lane served least goes first."""

    at_ns: int
    turn: int
    sequence: int
    effect: p2p.Effect = field(compare=False)


class P2pDieCore:
    """One die with its engines; begins `order` when it is started."""

    def __init__(
        self, die: int, endpoint: Endpoint, order: p2p.Send | p2p.Receive, path: Path
    ) -> None:
        self.name = f"die.{die}"
        self.endpoint = endpoint
        self.outcome: p2p.Complete | p2p.Failed | None = None
        self.ended_ns = 0
        self._order = order
        self._path = path
        self._aivs = order.aivs
        self._engines: defaultdict[tuple[str, int], Timeline] = defaultdict(Timeline)
        #: When the engine of each lane has stored all it was given, and when the link is free of
        #: it. Links are the emulator's; nobody else uses this one, so it will say the same.
        self._stored_ns: defaultdict[int, int] = defaultdict(int)
        self._link_free_ns = 0
        self._granted: defaultdict[int, int] = defaultdict(int)
        self._asked: list[_Asked] = []
        self._sequence = 0
        self._stores: defaultdict[int, deque[_Asked]] = defaultdict(deque)

    def handle(self, event: Event, now_ns: int) -> list[Effect]:
        """Start the kernel, take what lands, bound the waits."""
        match event:
            case Started():
                start = p2p_cost.KERNEL_START_NS + p2p_cost.EXTRA_START_NS[self._path]
                order = self._order
                if isinstance(order, p2p.Send):
                    return self._run(self.endpoint.send(order), now_ns + start)
                return self._run(self.endpoint.receive(order), now_ns + p2p_cost.KERNEL_START_NS)
            case Received(message=UbFrame() as frame):
                woken = p2p_cost.WAKE_NS if self._order.asynchronous else 0
                landing = unpack_write(frame.payload.tobytes())
                return self._run(self.endpoint.land(frame.source, landing), event.at_ns + woken)
            case TimerFired(name=name):
                flow, number = self._order.flow, int(name)
                return self._run(self.endpoint.handle(p2p.WaitOver(flow, number)), event.at_ns)
            case _:
                raise AssertionError(f"unexpected {event!r}")

    def validate(self) -> None:
        """The rings add up."""
        self.endpoint.validate()

    # ------------------------------------------------------------ engines

    def _run(self, effects: list[p2p.Effect], at_ns: int) -> list[Effect]:
        """Carry requests out in the order of their stamps, answers included."""
        carried: list[Effect] = []
        self._ask(effects, at_ns)
        while self._asked:
            asked = heapq.heappop(self._asked)
            at_ns, effect = asked.at_ns, asked.effect
            if _is_store(effect) and self._link_free_ns > at_ns:
                heapq.heappush(self._asked, replace(asked, at_ns=self._link_free_ns))
                continue
            match effect:
                case p2p.RemoteWrite():
                    carried.append(self._write(effect, at_ns))
                case p2p.Wait():
                    carried.append(SetTimer(str(effect.number), effect.delay_ns))
                case p2p.Complete() | p2p.Failed():
                    self.outcome, self.ended_ns = effect, at_ns
                    carried.append(Record("p2p_ended", {"event": effect.event}))
                case p2p.Load() | p2p.Fence() | p2p.LocalCopy():
                    answer, done_ns = self._engine(effect, at_ns)
                    self._ask(self.endpoint.handle(answer), done_ns)
                case _:
                    raise AssertionError(f"unknown effect {effect!r}")
        return carried

    def _ask(self, effects: list[p2p.Effect], at_ns: int) -> None:
        for effect in effects:
            self._sequence += 1
            asked = _Asked(at_ns, 0, self._sequence, effect)
            if not _is_store(effect) and not isinstance(effect, p2p.Fence):
                heapq.heappush(self._asked, asked)
                continue
            lane = _lane_of(effect)
            self._stores[lane].append(asked)
            if len(self._stores[lane]) == 1:
                self._queue_store(lane)

    def _queue_store(self, lane: int) -> None:
        """Stores and fences of a lane go one after the other: let the first have its turn.

        A store asks for the link at the moment when, sent in one piece, its last byte would leave
        with the engine's last. Lanes take turns. None books the link in advance, or a tail of 32
        bytes would have to wait behind all that is booked.
        """
        asked = self._stores[lane][0]
        at_ns = max(asked.at_ns, self._stored_ns[lane])
        if isinstance(asked.effect, p2p.RemoteWrite):
            at_ns += _lead_ns(asked.effect)
        heapq.heappush(self._asked, replace(asked, at_ns=at_ns, turn=self._granted[lane]))

    def _stored(self, lane: int) -> None:
        """The first in the lane's queue is over."""
        self._granted[lane] += 1
        self._stores[lane].popleft()
        if self._stores[lane]:
            self._queue_store(lane)

    def _engine(
        self, effect: p2p.Load | p2p.Fence | p2p.LocalCopy, at_ns: int
    ) -> tuple[p2p.Event, int]:
        """The answer to a request, and when the lane's engine gives it."""
        match effect:
            case p2p.Load():
                cost, shared = p2p_cost.load_ns(effect.nbytes), p2p_cost.hbm_ns(effect.nbytes)
                done = self._local(("mte2", effect.lane), at_ns, cost, shared)
                return p2p.Loaded(effect.flow, effect.lane, effect.number), done
            case p2p.Fence():
                # A pair of dies keeps to one sub-plane of the switches, which preserves order: the
                # fence holds as soon as the last byte in front of it is on the link.
                self._stored(effect.lane)
                return p2p.Fenced(effect.flow, effect.lane, effect.number), at_ns
            case p2p.LocalCopy():
                cost, shared = p2p_cost.copy_ns(effect.nbytes), p2p_cost.hbm_ns(2 * effect.nbytes)
                core = effect.lane % self._aivs
                done = self._local(("copy", core), at_ns, cost, shared)
                return self.endpoint.copy(effect), done
            case _:
                raise AssertionError(f"unknown effect {effect!r}")

    def _local(self, engine: tuple[str, int], at_ns: int, cost: int, shared: int) -> int:
        """When a core is done that needs `cost` itself and `shared` of the die's memory."""
        start = self._engines[engine].reserve(at_ns, cost)
        return max(start + cost, self._engines["hbm", 0].reserve(start, shared) + shared)

    def _write(self, write: p2p.RemoteWrite, at_ns: int) -> Effect:
        """A store streams onto the link, and holds its engine until the last byte is on it."""
        nbytes, lane = len(write.data), write.tag.lane
        if _is_store(write):
            self._stored_ns[lane] = self._link_free_ns = at_ns + _on_link_ns(nbytes)
            self._stored(lane)
        payload = np.frombuffer(pack_write(write), np.uint8)
        source = int(self.name.split(".")[1])
        frame = UbFrame(source, write.target, at_ns, nbytes, 1, payload)
        return Transmit(source, write.target, frame, nbytes, at_ns=at_ns)


def _is_store(effect: p2p.Effect) -> bool:
    """Whether it occupies a lane's store engine; fields of 32 bytes slip through."""
    return isinstance(effect, p2p.RemoteWrite) and effect.area is not Area.METADATA


def _lane_of(effect: p2p.Effect) -> int:
    """The lane of a store or a fence."""
    assert isinstance(effect, p2p.RemoteWrite | p2p.Fence), effect
    return effect.tag.lane if isinstance(effect, p2p.RemoteWrite) else effect.lane


def _on_link_ns(nbytes: int) -> int:
    return units.transfer_ns(nbytes, p2p_cost.UB_BYTES_PER_S)


def _lead_ns(write: p2p.RemoteWrite) -> int:
    """How long the engine works before the frame, sent in one piece, has to leave so that its last
    byte leaves with the engine's last.
    """
    nbytes = len(write.data)
    return p2p_cost.store_ns(nbytes, write.path) - _on_link_ns(nbytes)


# ---------------------------------------------------------------- runs


def run_case(case: P2pCase) -> int:
    """Nanoseconds from the call of send to its completion, every protocol step included."""
    content = np.arange(case.nbytes, dtype=np.uint32).astype(np.uint8).tobytes()
    source, goal = bytearray(content), bytearray(case.nbytes)
    memory = DieMemory(goal)
    into = memory.register(0, case.nbytes) if case.zero_copy else None
    send = p2p.Send(_EVENT, RECEIVER, 0, case.nbytes, case.aivs, case.path, into, case.asynchronous)
    receive = p2p.Receive(_EVENT, SENDER, 0, case.nbytes, case.aivs, into, case.asynchronous)
    sender = P2pDieCore(SENDER, Endpoint(SENDER, 1, DieMemory(source)), send, case.path)
    receiver = P2pDieCore(RECEIVER, Endpoint(RECEIVER, 1, memory), receive, case.path)
    host = SimHost(SimOptions(validate=False))
    host.add(FabricEmulatorCore("fabric_emulator.0", _DIES))
    host.add(sender, dies=(SENDER,))
    host.add(receiver, dies=(RECEIVER,))
    host.run(lambda: sender.outcome is not None)
    if not isinstance(sender.outcome, p2p.Complete) or goal != content:
        raise AssertionError(f"the send did not complete: {sender.outcome}")
    return sender.ended_ns


def run_grid(sizes: tuple[int, ...] = SIZES, aivs: tuple[int, ...] = AIVS) -> list[dict[str, Any]]:
    """One row per size and number of AIV cores."""
    return [
        {
            "bytes": size,
            "aivs": count,
            "us": round(units.to_us(run_case(P2pCase(size, count))), 2),
            "law_us": round(units.to_us(p2p_cost.law_ns(size, count)), 2),
        }
        for size in sizes
        for count in aivs
    ]


def run_paths(sizes: tuple[int, ...] = SIZES, aivs: int = 2) -> list[dict[str, Any]]:
    """The same message over each path, with one copy and without."""
    return [
        {
            "bytes": size,
            "path": str(path),
            "zero_copy": zero_copy,
            "us": round(units.to_us(run_case(P2pCase(size, aivs, path, zero_copy))), 2),
        }
        for size in sizes
        for path in Path
        for zero_copy in (False, True)
    ]


def run() -> dict[str, Any]:
    """The whole figure, and the two statements that P037 makes about it."""
    grid = run_grid()
    small = run_case(P2pCase(KB * KB, 2))
    slow, fast = (run_case(P2pCase(9216 * KB, count)) for count in (2, 48))
    return {
        "p2p_us_1mib_2aiv": round(units.to_us(small), 2),
        "p2p_ratio_9mb": round(slow / fast, 3),
        "by_construction": ["p2p_us_1mib_2aiv", "p2p_ratio_9mb"],
        "grid": grid,
        "paths": run_paths((36 * KB, 1152 * KB, 9216 * KB)),
    }
