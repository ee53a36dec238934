"""Runs any number of cores in one process, on one heap of integer nanoseconds.

The heap is keyed `(when_ns, sequence)`: equal times are first in, first out. Nothing here reads a
clock or an unseeded generator, so one seed gives one history, whatever PYTHONHASHSEED is;
`trace_hash` is a rolling digest of every event in order (time, actor, bytes) and proves it.

Messages are encoded and decoded exactly as on the bus: cores never share an object, and a message
that could not travel fails here as well. When nothing is left to do, or nothing visible has
happened for `stall_ns`, although the run is not over, `Deadlock` names what waits.
"""

from __future__ import annotations

import hashlib
import heapq
import struct
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from libs import units
from libs.actor import (
    CancelTimer,
    Compute,
    ComputeDone,
    Core,
    Deliver,
    Effect,
    Event,
    Executor,
    Present,
    Received,
    Record,
    Reply,
    Send,
    SetTimer,
    Started,
    TimerFired,
    Transmit,
    Unreachable,
)
from libs.bus.subjects_match import SubjectRouter
from libs.errors import InvariantError, OperatingError, RemoteProtocolError
from libs.fabric.link import SenderPort
from libs.fabric.params import UB, FabricParams
from libs.fabric.sharding import ONE_SHARD, Sharding
from libs.fabric.superpod import WHOLE_SUPERPOD, SuperPod
from libs.fabric.timeline import Timeline
from libs.runtime.fabric_frames import arrived, departing
from libs.runtime.stepper import Stepper
from libs.runtime.story import summary_of
from libs.wire import subjects
from libs.wire.codec import encode_frame
from libs.wire.envelope import Envelope

STALL_NS = units.s(600)


class Deadlock(InvariantError):
    """The run is not over, and nothing more can happen."""


@dataclass(slots=True)
class _Actor:
    stepper: Stepper
    executor: Executor | None
    port: SenderPort
    timeline: Timeline = field(default_factory=Timeline)
    timers: dict[str, int] = field(default_factory=dict)
    incarnation: int = 1
    epoch: int = 1


@dataclass(frozen=True, slots=True)
class SimOptions:
    """What the run depends on, beside its cores: the seed, the machine and its constants."""

    seed: int = 0
    validate: bool = True
    params: FabricParams = UB
    sharding: Sharding = ONE_SHARD
    pod: SuperPod = WHOLE_SUPERPOD
    stall_ns: int = STALL_NS


class SimHost:
    """A pod in one process. Add cores, inject events, run."""

    def __init__(self, options: SimOptions | None = None) -> None:
        self.options = options or SimOptions()
        self.now_ns = 0
        self.events = 0
        self.records: list[tuple[int, str, Record]] = []
        self._heap: list[tuple[int, int, str, Any]] = []
        self._sequence = 0
        self._actors: dict[str, _Actor] = {}
        self._router: SubjectRouter[str] = SubjectRouter(self.options.seed)
        self._digest = hashlib.blake2b(digest_size=16)
        self._presenters: list[Callable[[str, Any, int], None]] = []
        self._progress_ns = 0
        # The seed is part of the history, even if no choice happens to depend on it.
        self._digest.update(struct.pack("<q", self.options.seed))

    # ------------------------------------------------------------ building

    def add(
        self, core: Core, *, dies: tuple[int, ...] = (), executor: Executor | None = None
    ) -> None:
        """Install a core; its `Started` is the next event at the current time."""
        assert core.name not in self._actors, f"{core.name} is already here"
        stepper = Stepper(core, validate=self.options.validate)
        options = self.options
        port = SenderPort(options.pod, options.params, options.sharding)
        self._actors[core.name] = _Actor(stepper, executor, port)
        for pattern, queue in subjects.subscriptions(core.name, dies):
            self._router.add(pattern, core.name, queue)
        self._push(self.now_ns, core.name, Started(self.now_ns))

    def on_present(self, presenter: Callable[[str, Any, int], None]) -> None:
        """Call `presenter(key, item, at_ns)` for everything a client would see."""
        self._presenters.append(presenter)

    def inject(self, actor: str, message: Any, at_ns: int) -> None:
        """An event from outside (a client, a person) for one actor, not encoded."""
        self._push(at_ns, actor, Received(at_ns, message, "outside", 0, 0))

    def core(self, name: str) -> Core:
        """The core called `name`."""
        return self._actors[name].stepper.core

    def names(self) -> list[str]:
        """All actors, in the order of their arrival."""
        return list(self._actors)

    def wrap_executor(self, name: str, wrap: Callable[[Executor], Executor]) -> None:
        """Put something around the executor of `name`, to watch it."""
        actor = self._actors[name]
        assert actor.executor is not None, f"{name} has no executor"
        actor.executor = wrap(actor.executor)

    def cores(self) -> list[Core]:
        """All cores, in the order of their arrival."""
        return [actor.stepper.core for actor in self._actors.values()]

    def story(self, about: str | None = None) -> list[str]:
        """What every core did about one request, in time order within each core."""
        return [line for actor in self._actors.values() for line in actor.stepper.story.tell(about)]

    @property
    def trace_hash(self) -> str:
        """Digest of everything that has happened."""
        return self._digest.hexdigest()

    # ------------------------------------------------------------ running

    def run(self, until: Callable[[], bool], *, events_max: int = 50_000_000) -> None:
        """Process events until `until()`; raises `Deadlock` when that can no longer come."""
        while not until():
            if not self._heap:
                raise Deadlock("nothing is scheduled\n" + "\n".join(self.story()[-40:]))
            if self.events >= events_max:
                raise Deadlock(f"{events_max} events and not over")
            self.step()
            if self.now_ns - self._progress_ns > self.options.stall_ns:
                tail = "\n".join(self.story()[-60:])
                raise Deadlock(f"nothing visible for {self.options.stall_ns} ns\n{tail}")

    def step(self) -> None:
        """Process the next event."""
        when_ns, _, name, event = heapq.heappop(self._heap)
        assert when_ns >= self.now_ns, "emulated time went back"
        self.now_ns = when_ns
        self.events += 1
        if name == "":
            self._present(event)
            return
        actor = self._actors[name]
        if isinstance(event, TimerFired):
            # A re-armed or cancelled timer leaves its old heap entry behind; only the last one
            # counts.
            if actor.timers.get(event.name) != when_ns:
                return
            del actor.timers[event.name]
        if isinstance(event, bytes):
            received = self._decode(name, event, when_ns)
            if received is None:
                return
            event = received
        self._hash(when_ns, name, event)
        for effect in actor.stepper.step(event):
            self._carry_out(name, actor, effect)

    def _present(self, effect: Present) -> None:
        self._progress_ns = self.now_ns
        for presenter in self._presenters:
            presenter(effect.key, effect.item, effect.at_ns)

    def _push(self, when_ns: int, name: str, event: Event | Present | bytes) -> None:
        heapq.heappush(self._heap, (max(when_ns, self.now_ns), self._sequence, name, event))
        self._sequence += 1

    def _hash(self, when_ns: int, name: str, event: Event) -> None:
        text = f"{when_ns} {name} {summary_of(event)}"
        self._digest.update(text.encode())

    def _decode(self, name: str, data: bytes, when_ns: int) -> Received | None:
        """The message, or None for a frame that was damaged on its way: counted and dropped."""
        self._digest.update(data)
        try:
            _, envelope, message = arrived(data)
        except RemoteProtocolError as error:
            self.records.append((when_ns, name, Record("frame_refused", {"reason": error.reason})))
            return None
        return Received(
            when_ns, message, envelope.sender, envelope.incarnation, envelope.epoch,
            envelope.reply_to,
        )  # fmt: skip

    # ------------------------------------------------------------ effects

    def _carry_out(self, name: str, actor: _Actor, effect: Effect) -> None:
        now = actor.stepper.now_ns
        match effect:
            case Send():
                depart = now if effect.at_ns is None else effect.at_ns
                arrive = depart + self.options.params.control_latency_ns
                self._route(name, actor, effect, depart, arrive)
            case Reply():
                pass  # nobody waits outside the cores here; questions are asked by `inject`
            case Transmit():
                self._transmit(name, actor, effect, now)
            case Deliver():
                self._deliver(name, actor, effect)
            case SetTimer():
                actor.timers[effect.name] = now + effect.delay_ns
                due = now + effect.delay_ns
                self._push(due, name, TimerFired(due, effect.name))
            case CancelTimer():
                actor.timers.pop(effect.name, None)
            case Compute():
                self._compute(name, actor, effect, now)
            case Present():
                self._push(effect.at_ns, "", effect)
            case Record():
                self.records.append((now, name, effect))
            case _:
                raise AssertionError(f"unknown effect {effect!r}")

    def _envelope(self, name: str, actor: _Actor, at_ns: int) -> Envelope:
        return Envelope(name, actor.incarnation, actor.epoch, at_ns)

    def _route(self, name: str, actor: _Actor, effect: Send, depart: int, arrive: int) -> None:
        targets = self._router.match(effect.subject)
        if not targets:
            if effect.probe:
                self._push(depart, name, Unreachable(depart, effect.subject, effect.message))
            return
        data = encode_frame(self._envelope(name, actor, arrive), effect.message)
        for target in targets:
            self._push(arrive, target, data)

    def _transmit(self, name: str, actor: _Actor, effect: Transmit, now: int) -> None:
        depart = now if effect.at_ns is None else effect.at_ns
        inner = encode_frame(self._envelope(name, actor, depart), effect.message)
        frame, way = departing(actor.port, effect, depart, np.frombuffer(inner, np.uint8))
        data = encode_frame(self._envelope(name, actor, depart), frame)
        for target_actor in self._router.match(subjects.fabric(way.shard)):
            self._push(way.at_ns, target_actor, data)

    def _deliver(self, name: str, actor: _Actor, effect: Deliver) -> None:
        data = encode_frame(self._envelope(name, actor, effect.at_ns), effect.message)
        for target in self._router.match(effect.subject):
            self._push(effect.at_ns, target, data)

    def _compute(self, name: str, actor: _Actor, effect: Compute, now: int) -> None:
        assert actor.executor is not None, f"{name} has no executor"
        at_ns = now if effect.at_ns is None else effect.at_ns
        start = actor.timeline.reserve(at_ns, effect.cost_ns)
        try:
            result = actor.executor.run(effect.job)
        except OperatingError as error:
            result = error
        except Exception as error:
            story = "\n".join(actor.stepper.story.tell()[-20:])
            job = type(effect.job).__name__
            raise InvariantError(f"{name}: executor failed on {job}: {error!r}\n{story}") from error
        done = start + effect.cost_ns
        self._push(done, name, ComputeDone(done, effect.job_id, result))
