"""Fig. 5 again: latency of one send over message size and AIV cores, by running the protocol.

    P2pDieCore(sender) --Transmit--> SimHost --> FabricEmulatorCore --> P2pDieCore(receiver)
            ^                                                                   |
            +------------------------------- ACK --------------------------------+

Two dies run the real send and receive machines on real bytes. A die charges what its engines do
(`libs.xccl.engines`), the emulator what the links carry; the law of Fig. 5 is nowhere computed,
`law_us` stands beside each row for comparison. A chunk is at most one half of the unified buffer,
so the number of chunks is that of the real protocol; nothing is left out.

Agreement with the paper is by construction in two constants (36 GB/s per AIV core and the kernel
start, both fitted to Fig. 5) and independent in the rest: overlap, back-pressure, link sharing.
"""

from __future__ import annotations

from dataclasses import dataclass
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
from libs.runtime.sim_host import SimHost, SimOptions
from libs.wire.fabric import UbFrame
from libs.xccl import p2p, p2p_cost
from libs.xccl.endpoint import Endpoint
from libs.xccl.engines import Carried, Engines
from libs.xccl.frames import pack_write, unpack_write
from libs.xccl.memory import DieMemory
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


class P2pDieCore:
    """One die with its engines; begins `order` when it is started."""

    def __init__(
        self, die: int, endpoint: Endpoint, order: p2p.Send | p2p.Receive, path: Path
    ) -> None:
        self.name = f"die.{die}"
        self.endpoint = endpoint
        self.outcome: p2p.Complete | p2p.Failed | None = None
        self.ended_ns = 0
        self._die = die
        self._order = order
        self._path = path
        self._engines = Engines(endpoint, order.aivs)

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

    def _run(self, effects: list[p2p.Effect], at_ns: int) -> list[Effect]:
        carried: list[Effect] = []
        for item in self._engines.run(effects, at_ns):
            match item.effect:
                case p2p.RemoteWrite() as write:
                    carried.append(self._transmit(item, write))
                case p2p.Wait() as wait:
                    carried.append(SetTimer(str(wait.number), wait.delay_ns))
                case p2p.Complete() | p2p.Failed() as outcome:
                    self.outcome, self.ended_ns = outcome, item.at_ns
                    carried.append(Record("p2p_ended", {"event": outcome.event}))
                case _:
                    raise AssertionError(f"unknown effect {item!r}")
        return carried

    def _transmit(self, item: Carried, write: p2p.RemoteWrite) -> Transmit:
        payload = np.frombuffer(pack_write(write), np.uint8)
        frame = UbFrame(self._die, write.target, item.at_ns, item.nbytes, 1, payload)
        return Transmit(self._die, write.target, frame, item.nbytes, at_ns=item.at_ns)


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
    rows = []
    for size in sizes:
        for count in aivs:
            took_ns = run_case(P2pCase(size, count))
            law_us = round(units.to_us(p2p_cost.law_ns(size, count)), 2)
            row = {"figure": "5", "what": "p2p", "bytes": size, "aivs": count, "ns": took_ns}
            rows.append({**row, "us": round(units.to_us(took_ns), 2), "law_us": law_us})
    return rows


def run_paths(sizes: tuple[int, ...] = SIZES, aivs: int = 2) -> list[dict[str, Any]]:
    """The same message over each path, with one copy and without."""
    return [
        {
            "what": "path",
            "bytes": size,
            "aivs": aivs,
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
        "p2p_us_max": max(row["us"] for row in grid),
        "by_construction": ["p2p_us_1mib_2aiv", "p2p_ratio_9mb"],
        "grid": grid,
        "paths": run_paths((36 * KB, 1152 * KB, 9216 * KB)),
    }
