"""The fabric emulator: charges every UB frame what the real interconnect would, and passes it on.

A frame occupies the egress of its source die and the ingress of its target die for bytes /
bandwidth each, and needs one latency per exchange it stands for:

    begin    = first moment at or after departure at which both links have room
    deliver  = begin + repeat x latency + charge_bytes / bandwidth

Links are `Timeline`s, charged by stamp. The emulator never retries and never drops; faults are
added by rules of their own. Nothing is ever delivered faster than its links allow (checked on
every frame).
"""

from __future__ import annotations

from collections import defaultdict

from libs.actor import Deliver, Effect, Event, Received, Record
from libs.fabric.params import UB, FabricParams
from libs.fabric.timeline import Timeline
from libs.health.presence import Presence, describe_simple
from libs.units import transfer_ns
from libs.wire import subjects
from libs.wire.fabric import UbDelivery, UbFrame


class FabricEmulatorCore:
    """One shard: serves the dies whose number modulo the shard count is its own."""

    def __init__(self, name: str, num_dies: int, params: FabricParams = UB) -> None:
        self.name = name
        self.params = params
        self.num_dies = num_dies
        self.frames = 0
        self.charged_bytes = 0
        self._egress: defaultdict[int, Timeline] = defaultdict(Timeline)
        self._ingress: defaultdict[int, Timeline] = defaultdict(Timeline)
        self._presence = Presence(name, "", lambda: describe_simple(name))

    def handle(self, event: Event, now_ns: int) -> list[Effect]:
        """Stamp frames; everything else is presence."""
        handled = self._presence.handle(event)
        if handled is not None:
            return handled
        match event:
            case Received(message=UbFrame() as frame):
                return self._relay(frame)
            case Received(message=message):
                return [Record("unexpected_message", {"kind": type(message).__name__})]
            case _:
                raise AssertionError(f"unexpected {event!r}")

    def _relay(self, frame: UbFrame) -> list[Effect]:
        if not (0 <= frame.source < self.num_dies and 0 <= frame.target < self.num_dies):
            pair = {"source": frame.source, "target": frame.target}
            return [Record("unknown_die", pair)]
        if frame.charge_bytes < 0 or frame.repeat < 1:
            charge = {"charge_bytes": frame.charge_bytes, "repeat": frame.repeat}
            return [Record("malformed_frame", charge)]
        occupancy = transfer_ns(frame.charge_bytes, self.params.ub_bytes_per_s)
        begin = self._egress[frame.source].reserve(frame.depart_ns, occupancy)
        begin = self._ingress[frame.target].reserve(begin, occupancy)
        deliver_ns = begin + frame.repeat * self.params.ub_latency_ns + occupancy
        assert deliver_ns >= frame.depart_ns + self.params.ub_latency_ns + occupancy, "too fast"
        self.frames += 1
        self.charged_bytes += frame.charge_bytes
        delivery = UbDelivery(frame.source, frame.target, deliver_ns, frame.payload)
        return [Deliver(subjects.ub(frame.target), delivery, deliver_ns)]

    def validate(self) -> None:
        """Every link's reservations are disjoint."""
        for link in (*self._egress.values(), *self._ingress.values()):
            link.validate()
