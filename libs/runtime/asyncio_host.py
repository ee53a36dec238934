"""Runs one core as one service process: bus in, bus out, wall clock for pacing and liveness.

Events are handled synchronously in the bus callback, one at a time, so a core that is stuck stops
answering everything, heartbeats included (P115). Computation runs on one worker thread, never in
the loop that owns the connections. What a person can see is held until the wall clock has reached
its emulated time; `lag_ns` says how far the machine is behind.

An `InvariantError` ends the process with the story: a core that contradicted itself must not go on.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
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
from libs.bus.api import Bus, BusMessage, Lane, Subscription
from libs.clock.pod_clock import PodClock
from libs.errors import (
    InvariantError,
    LocalProtocolError,
    OperatingError,
    RemoteProtocolError,
    StaleEpoch,
)
from libs.fabric.link import SenderPort
from libs.fabric.timeline import Timeline
from libs.runtime.fabric_frames import arrived, departing, unwrapped
from libs.runtime.gc_control import GcControl
from libs.runtime.held import HeldItems, Presenter
from libs.runtime.options import HostOptions as HostOptions
from libs.runtime.options import RecordSink as RecordSink
from libs.runtime.shortcut import Shortcut
from libs.runtime.stepper import Stepper
from libs.wire import subjects
from libs.wire.codec import encode_frame
from libs.wire.control import Refused
from libs.wire.envelope import Envelope
from libs.wire.fabric import UbDelivery
from libs.wire.registry import Limit

_LANES = {Limit.CONTROL: Lane.CONTROL, Limit.TOKEN: Lane.TOKEN, Limit.BULK: Lane.BULK}


class AsyncioHost:
    """One core, one bus, one worker thread."""

    def __init__(
        self,
        core: Core,
        bus: Bus,
        clock: PodClock,
        *,
        executor: Executor | None = None,
        options: HostOptions | None = None,
        sink: RecordSink | None = None,
    ) -> None:
        self.options = options or HostOptions()
        self.bus = bus
        self.clock = clock
        self.stepper = Stepper(core, validate=self.options.validate)
        self.lag_ns = 0
        self.decode_errors = 0
        self.messages_lost = 0
        #: The way past the broker, of a process that has one.
        self.shortcut: Shortcut | None = None
        #: Collects garbage between iterations, in a process that has an executor.
        self.gc: GcControl | None = None
        self._executor = executor
        self._sink = sink
        self._timeline = Timeline()
        self._port = SenderPort(self.options.pod, self.options.params, self.options.sharding)
        self._timers: dict[str, asyncio.TimerHandle] = {}
        self._held = HeldItems(clock)
        self._subscriptions: list[Subscription] = []
        self._failure: asyncio.Future[None] | None = None
        self._stopped = False
        self._paces = False
        self._threads = ThreadPoolExecutor(1, thread_name_prefix=core.name)

    @property
    def core(self) -> Core:
        """The core this host runs."""
        return self.stepper.core

    def on_present(self, presenter: Presenter) -> None:
        """Call `presenter(key, item, at_ns)` when a visible effect is due."""
        self._held.presenter = presenter

    # ------------------------------------------------------------ life

    async def start(self) -> None:
        """Subscribe and hand the core its `Started`."""
        self._failure = asyncio.get_running_loop().create_future()
        for pattern, queue in subjects.subscriptions(self.core.name, self.options.dies):
            lane = Lane.BULK if pattern.startswith(("xds.ub.", "xds.fabric.")) else Lane.CONTROL
            subscription = await self.bus.subscribe(pattern, self._on_bus, queue=queue, lane=lane)
            self._subscriptions.append(subscription)
        await self.bus.flush()
        self.feed(Started(self.clock.now_ns()))

    async def wait(self) -> None:
        """Return never; raise what stopped the core."""
        assert self._failure is not None, "start first"
        await self._failure

    def fail(self, error: Exception) -> None:
        """Something the core cannot see ended this process's usefulness: `wait` raises it."""
        if self._failure is not None and not self._failure.done():
            self._failure.set_exception(error)

    async def stop(self) -> None:
        """Stop taking events, drain the bus, end the worker."""
        self._disarm()
        await self.bus.drain(timeout_s=2.0)
        self.halt()

    def halt(self) -> None:
        """Take no event any more; the bus stays, for whoever else is on it."""
        # Timers armed while draining, paced answers and held items are still scheduled.
        self._stopped = True
        self._disarm()
        self._held.close()
        self._threads.shutdown(wait=False, cancel_futures=True)

    # ------------------------------------------------------------ events

    async def _on_bus(self, message: BusMessage) -> None:
        try:
            at_ns, envelope, body = arrived(message.data)
        except RemoteProtocolError as error:
            self.refused(error, message.subject)
            if message.reply:
                refusal = Refused("frame", error.reason, str(error), definite=True)
                self._publish(message.reply, refusal, self.clock.now_ns())
            return
        self._received(at_ns, envelope, body, message.reply)

    def delivered(self, delivery: UbDelivery) -> None:
        """A frame that came the short way."""
        try:
            at_ns, envelope, body = unwrapped(delivery)
        except RemoteProtocolError as error:
            self.refused(error, subjects.ub(delivery.target))
            return
        self._received(at_ns, envelope, body, "")

    def _received(self, at_ns: int, envelope: Envelope, body: Any, reply: str) -> None:
        sender, reply_to = envelope.sender, envelope.reply_to or reply
        self.feed(Received(at_ns, body, sender, envelope.incarnation, envelope.epoch, reply_to))

    def refused(self, error: RemoteProtocolError, where: str) -> None:
        """Count a frame that is none."""
        self.decode_errors += 1
        self._record(Record("frame_refused", {"reason": error.reason, "subject": where}))

    def feed(self, event: Event) -> None:
        """Handle one event now and carry its effects out."""
        if self._stopped or (self._failure is not None and self._failure.done()):
            return
        self.clock.observe(event.at_ns)
        try:
            for effect in self.stepper.step(event):
                self._carry_out(effect)
        except (InvariantError, LocalProtocolError) as error:
            self.fail(error)

    def outside(self, message: Any) -> None:
        """An event from this process's own edge (an HTTP client), stamped by the paced wall
        clock.
        """
        self.feed(Received(self.clock.now_ns(), message, "outside", 0, 0))

    # ------------------------------------------------------------ effects

    def _carry_out(self, effect: Effect) -> None:
        now = self.stepper.now_ns
        match effect:
            case Send():
                depart = now if effect.at_ns is None else effect.at_ns
                self._send(effect, depart + self.options.params.control_latency_ns)
            case Reply():
                self._publish(effect.reply_to, effect.message, now)
            case Transmit():
                self._transmit(effect, now if effect.at_ns is None else effect.at_ns)
            case Deliver():
                self._deliver(effect)
            case SetTimer():
                self._set_timer(effect)
            case CancelTimer():
                self._cancel_timer(effect.name)
            case Compute():
                self._compute(effect, now if effect.at_ns is None else effect.at_ns)
            case Present():
                self._held.hold(effect)
            case Record():
                self._record(effect)
            case _:
                raise AssertionError(f"unknown effect {effect!r}")

    def _encode(self, message: Any, at_ns: int) -> bytes:
        name, options = self.core.name, self.options
        return encode_frame(Envelope(name, options.incarnation, options.epoch, at_ns), message)

    def _publish(
        self,
        subject: str,
        message: Any,
        at_ns: int,
        unreachable: Callable[[], None] | None = None,
    ) -> None:
        """Encode and send; with `unreachable` as a probe, which calls it when nobody listens."""
        lane = _LANES[type(message).LIMIT]
        data = self._encode(message, at_ns)
        try:
            if unreachable is None:
                self.bus.publish(subject, data, lane=lane)
            else:
                self.bus.probe(subject, data, unreachable, lane=lane)
        except OperatingError as error:
            self._lost(subject, error)

    def _lost(self, subject: str, error: OperatingError) -> None:
        # A lost message is covered by somebody's deadline, like one that the broker lost.
        self.messages_lost += 1
        self._record(Record("message_lost", {"subject": subject, "code": error.code}))

    def _send(self, effect: Send, at_ns: int) -> None:
        unreachable = partial(self._unreachable, effect) if effect.probe else None
        self._publish(effect.subject, effect.message, at_ns, unreachable)

    def _unreachable(self, effect: Send) -> None:
        self.feed(Unreachable(self.clock.now_ns(), effect.subject, effect.message))

    def _transmit(self, effect: Transmit, depart: int) -> None:
        inner = np.frombuffer(self._encode(effect.message, depart), np.uint8)
        frame, way = departing(self._port, effect, depart, inner)
        subject = subjects.fabric(way.shard)
        try:
            if self.shortcut is not None and self.shortcut.take(way.shard, frame):
                return
        except StaleEpoch as error:
            self.fail(error)  # somebody else serves this die by now
        except OperatingError as error:
            self._lost(subject, error)
        else:
            self._publish(subject, frame, depart)

    def _deliver(self, effect: Deliver) -> None:
        message, shortcut = effect.message, self.shortcut
        if shortcut is None or not shortcut.hand_over(message):
            self._publish(effect.subject, message, effect.at_ns)

    def _set_timer(self, effect: SetTimer) -> None:
        self._cancel_timer(effect.name)
        loop = asyncio.get_running_loop()
        delay_s = units.to_s(effect.delay_ns)
        self._timers[effect.name] = loop.call_later(delay_s, self._fire, effect.name)

    def _disarm(self) -> None:
        for timer in self._timers.values():
            timer.cancel()
        self._timers.clear()

    def _fire(self, name: str) -> None:
        self._timers.pop(name, None)
        self.feed(TimerFired(self.clock.now_ns(), name))

    def _cancel_timer(self, name: str) -> None:
        timer = self._timers.pop(name, None)
        if timer is not None:
            timer.cancel()

    def _compute(self, effect: Compute, at_ns: int) -> None:
        assert self._executor is not None, f"{self.core.name} has no executor"
        done_ns = self._timeline.reserve(at_ns, effect.cost_ns) + effect.cost_ns
        loop = asyncio.get_running_loop()
        if self.options.inline:
            future: asyncio.Future[Any] = loop.create_future()
            try:
                future.set_result(self._run(effect.job))
            except Exception as error:  # noqa: BLE001 - judged in `_computed`, like the thread's
                future.set_exception(error)
        else:
            future = loop.run_in_executor(self._threads, self._run, effect.job)
        future.add_done_callback(lambda f: self._computed(effect, done_ns, f))

    def _run(self, job: Any) -> Any:
        assert self._executor is not None
        try:
            return self._executor.run(job)
        except OperatingError as error:
            return error

    def _computed(self, effect: Compute, done_ns: int, future: asyncio.Future[Any]) -> None:
        if future.cancelled():
            return
        error = future.exception()
        if error is not None:
            job = type(effect.job).__name__
            failure = InvariantError(f"{self.core.name}: executor failed on {job}: {error!r}")
            failure.__cause__ = error
            self.fail(failure)
            return
        event = ComputeDone(done_ns, effect.job_id, future.result())
        self._paces = self._paces or effect.paced
        if effect.paced:
            self.lag_ns = self.clock.lag_ns(done_ns)
        if self.gc is not None and (effect.paced or not self._paces):
            # The result of a paced job waits for the clock anyway; where none is, after any job.
            self.gc.between()
        delay_s = self.clock.delay_s(done_ns) if effect.paced else 0.0
        if delay_s > 0:
            asyncio.get_running_loop().call_later(delay_s, self.feed, event)
        else:
            self.feed(event)

    def _record(self, record: Record) -> None:
        if self._sink is not None:
            self._sink.record(self.core.name, self.stepper.now_ns, record)
