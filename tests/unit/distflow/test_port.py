"""Messages between two cores over the emulated fabric, with everything that can happen to them."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import pytest

from libs import units
from libs.actor import Effect, Event, Received, Started
from libs.distflow.kv_memory import KvMemory, kv_path
from libs.distflow.port import SERVING_LIMITS, Ended
from libs.fabric.faults.active import fault_named
from libs.runtime.sim_host import SimHost, SimOptions
from libs.wire.request import Cancel
from libs.xccl.memory import Destination
from libs.xccl.p2p import Complete, Failed, Flow, Receive, Role, Send, event_id
from libs.xccl.paths import Path
from services.fabric_emulator.core import FabricEmulatorCore

MIB = 1 << 20


@dataclass
class DieCore:
    """A core with a port and nothing else; told `Cancel(event)`, it gives that message up."""

    name: str
    kv: KvMemory
    orders: list[Send | Receive] = field(default_factory=list)
    ended: dict[int, Ended] = field(default_factory=dict)

    @property
    def receives(self) -> list[int]:
        return [order.event for order in self.orders if isinstance(order, Receive)]

    def handle(self, event: Event, now_ns: int) -> list[Effect]:
        effects = self.kv.port.take(event)
        if effects is None:
            effects = self._step(event)
        for ended in self.kv.port.drain():
            assert ended.outcome.event not in self.ended, "a message ends once"
            self.ended[ended.outcome.event] = ended
        return effects

    def _step(self, event: Event) -> list[Effect]:
        port = self.kv.port
        match event:
            case Started():
                effects: list[Effect] = []
                for order in self.orders:
                    if isinstance(order, Send):
                        effects += port.send(order, "kv", event.at_ns)
                    else:
                        effects += port.receive(order, "kv", event.at_ns)
                return effects
            case Received(message=Cancel(request_id=number)):
                [order] = [order for order in self.orders if order.event == int(number)]
                return port.cancel(order.flow, order.event, "cancelled", event.at_ns)
            case _:
                raise AssertionError(event)

    def validate(self) -> None:
        self.kv.validate()


class Pair:
    """Die 0 sends to die 1, and back where asked; `host` runs them."""

    def __init__(self, faults: str = "", seed: int = 1) -> None:
        self.dies = [DieCore(f"die.{die}", KvMemory(die, 1, 8 * MIB)) for die in (0, 1)]
        emulator = FabricEmulatorCore("fabric_emulator.0", 16)
        if faults:
            emulator.faults.arm(fault_named(faults, 0.2, seed))
        self.host = SimHost(SimOptions(seed=seed))
        self.host.add(emulator)
        self.content: dict[int, bytes] = {}

    def message(
        self, number: int, nbytes: int, *, source: int = 0, charge_bytes: int = 0,
        direct: bool = True, path: Path = Path.URMA,
    ) -> int:  # fmt: skip
        target, event = 1 - source, event_id(1, number)
        sender, receiver = self.dies[source].kv, self.dies[target].kv
        data = np.random.default_rng(number).integers(0, 256, nbytes, np.uint8)
        name = f"message {number}"
        begin, goal = sender.arena.take(name, nbytes), receiver.arena.take(name, nbytes)
        sender.store(name, data)
        into: Destination | None = receiver.memory.register(goal, nbytes) if direct else None
        send = Send(event, target, begin, nbytes, 2, path, into, True, charge_bytes)
        receive = Receive(event, source, goal, nbytes, 2, into, True, charge_bytes)
        self.dies[source].orders.append(send)
        self.dies[target].orders.append(receive)
        self.content[event] = data.tobytes()
        return event

    def run(self, told: Cancel | None = None, at_ns: int = 0) -> None:
        """To the end of every message; the sender is `told` something on the way."""
        for die, core in enumerate(self.dies):
            self.host.add(core, dies=(die,))
        if told is not None:
            self.host.inject("die.0", told, at_ns)
        self.host.run(lambda: all(len(core.ended) == len(core.orders) for core in self.dies))

    def arrived(self, event: int) -> bool:
        """Whether both ends completed; what has arrived is what was sent then."""
        outcomes = [core.ended[event].outcome for core in self.dies]
        if not all(isinstance(outcome, Complete) for outcome in outcomes):
            assert all(isinstance(outcome, Failed) for outcome in outcomes)
            return False
        [target] = [core for core in self.dies if event in core.receives]
        number = event & 0xFFFFFFFF
        assert target.kv.view(f"message {number}").tobytes() == self.content[event]
        return True


@pytest.mark.parametrize("direct", [True, False])
@pytest.mark.parametrize("path", list(Path))
def test_messages_arrive_by_every_path_in_both_directions(direct: bool, path: Path) -> None:
    pair = Pair()
    sizes = (0, 1, 384, 70_000, 300_000)
    events = [pair.message(n, size, source=n % 2, direct=direct, path=path)
              for n, size in enumerate(sizes, 1)]  # fmt: skip
    pair.run()
    assert all(pair.arrived(event) for event in events)


@pytest.mark.parametrize(
    "kind", ["one_way_loss", "corruption", "duplicate", "reorder", "jitter", "latency"]
)
@pytest.mark.parametrize("seed", [1, 2])
def test_a_fault_on_a_fifth_of_all_frames_costs_time_and_nothing_else(kind: str, seed: int) -> None:
    pair = Pair(kind, seed)
    events = [pair.message(n, 50_000, source=n % 2) for n in range(1, 13)]
    pair.run()
    assert all(pair.arrived(event) for event in events)


def test_a_message_is_charged_what_it_stands_for() -> None:
    """Ten megabytes in a message of a kilobyte take their time on the emulated links."""
    took = {}
    for charge_bytes in (0, 10 * MIB):
        pair = Pair()
        event = pair.message(1, 1024, charge_bytes=charge_bytes)
        pair.run()
        took[charge_bytes] = pair.dies[1].ended[event].at_ns
    on_the_links_ns = units.transfer_ns(10 * MIB, 196_000_000_000)
    assert took[10 * MIB] - took[0] == pytest.approx(on_the_links_ns, rel=0.01)


def test_a_cancelled_message_ends_at_both_ends_and_its_neighbours_arrive() -> None:
    pair = Pair("one_way_loss", seed=3)
    events = [pair.message(n, 100_000) for n in range(1, 5)]
    pair.run(Cancel(str(events[1]), "left"), at_ns=units.us(30))
    assert [pair.arrived(event) for event in events] == [True, False, True, True]


def test_a_receiver_without_a_sender_gives_up_within_the_minute() -> None:
    pair = Pair()
    event = pair.message(1, 100)
    pair.dies[0].orders.clear()
    pair.run()
    ended = pair.dies[1].ended[event]
    assert isinstance(ended.outcome, Failed)
    assert ended.outcome.definite
    waits = SERVING_LIMITS.receive_waits_max * SERVING_LIMITS.wait_ns
    assert ended.at_ns == pytest.approx(waits, rel=0.01)
    assert waits <= units.s(60)


def test_a_sender_without_a_receiver_gives_up_and_does_not_know() -> None:
    pair = Pair()
    event = pair.message(1, 100)
    pair.dies[1].orders.clear()
    pair.run()
    outcome = pair.dies[0].ended[event].outcome
    assert isinstance(outcome, Failed)
    assert not outcome.definite
    assert pair.dies[0].ended[event].at_ns < units.s(15)


def test_kv_takes_the_engine_that_leaves_the_cores_to_compute() -> None:
    assert kv_path(39_040) is Path.MTE, "one token: the lowest start-up wins"
    assert kv_path(100 * 39_040) is Path.URMA


def test_a_timer_of_a_flow_that_is_idle_does_nothing() -> None:
    kv = KvMemory(0, 1, 1024)
    assert kv.port.endpoint.idle(Flow(1, Role.SEND))
    assert kv.port.drain() == []
