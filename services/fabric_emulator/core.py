"""The fabric emulator: charges every frame what the real interconnect would, and passes it on.

Links are resources (`libs.fabric.link`): the sender reserves its egress, this shard the ingress
of the dies it serves, and a frame is delivered when both links, the latency and the bound on what
may be under way allow it. Frames are charged by stamp, whatever order they come in.

A sender may claim time on its egress that its earlier frames had: one that was restarted knows of
none. Such a frame begins when that link has room, as far as this shard has seen it, and is counted.

Armed faults (`libs.fabric.faults`) then make frames late, damage, repeat or lose them, and count
what they did. The emulator itself never retries and never drops. With `check` every frame's
stamps are held against an independent model of the links: nothing is ever delivered faster than
they allow, whatever senders say, so that a broken model is a bug of ours.

Once a second the shard tells the gateways what its links carried, as
`services.fabric_emulator.links` keeps it.
"""

from __future__ import annotations

import numpy as np

from libs.actor import (
    Deliver,
    Effect,
    Event,
    Received,
    Record,
    Reply,
    Send,
    SetTimer,
    Started,
    TimerFired,
)
from libs.errors import OperatingError
from libs.fabric.checker import LinkModel
from libs.fabric.faults.active import FaultRule, FaultSet
from libs.fabric.faults.catalogue import build_fault
from libs.fabric.faults.delivery import Delivery
from libs.fabric.faults.scope import Scope
from libs.fabric.link import Departed, EgressLinks, IngressLinks, LinkUse, Stamps
from libs.fabric.params import UB, FabricParams
from libs.fabric.planes import is_shared, plane_between
from libs.fabric.superpod import SuperPod
from libs.health.presence import Presence, describe_simple
from libs.wire import subjects
from libs.wire.fabric import FaultArm, FaultHeal, FaultState, UbDelivery, UbFrame
from services.fabric_emulator.links import PERIOD_NS, LinkLog

LINKS_TIMER = "links"
#: No frame is stamped, charged or repeated beyond these: sums of them still travel as 64 bits.
STAMP_NS_MAX = 1 << 61
CHARGE_BYTES_MAX = 1 << 40
REPEAT_MAX = 1 << 20


class FabricEmulatorCore:
    """One shard: serves the links that `libs.fabric.planes.shard_of_link` gives it.

    `num_dies` are in use on the machine `pod` (default: a whole SuperPod).
    """

    def __init__(
        self,
        name: str,
        num_dies: int,
        params: FabricParams = UB,
        *,
        pod: SuperPod | None = None,
        check: bool = False,
    ) -> None:
        self.name = name
        self.num_dies = num_dies
        self.pod = pod = pod or SuperPod()
        assert 0 < num_dies <= pod.num_dies, num_dies
        self.frames = 0
        self.charged_bytes = 0
        #: Frames whose sender had given their time on its egress to another one.
        self.double_booked = 0
        self.faults = FaultSet(pod)
        self._egress = EgressLinks(pod, params)
        self._ingress = IngressLinks(pod, params)
        self._log = LinkLog(self._egress, self._ingress)
        self._model = LinkModel(pod, params) if check else None
        self._presence = Presence(name, "", lambda: describe_simple(name))

    def handle(self, event: Event, now_ns: int) -> list[Effect]:
        """Stamp frames, take commands; everything else is presence."""
        if isinstance(event, Received) and isinstance(event.message, UbFrame):
            return self._relay(event.message)
        handled = self._presence.handle(event)
        if handled is not None:
            return [*handled, *self._begin(now_ns)] if isinstance(event, Started) else handled
        match event:
            case TimerFired(name=name) if name == LINKS_TIMER:
                return self._tell_links(now_ns)
            case Received(message=FaultArm() as arm, reply_to=reply_to):
                return self._arm(arm, reply_to)
            case Received(message=FaultHeal(fault_id=fault_id), reply_to=reply_to):
                return self._heal(fault_id, reply_to)
            case Received(message=message):
                return [Record("unexpected_message", {"kind": type(message).__name__})]
            case _:
                raise AssertionError(f"unexpected {event!r}")

    # ------------------------------------------------------------ frames

    def _relay(self, frame: UbFrame) -> list[Effect]:
        if not (0 <= frame.source < self.num_dies and 0 <= frame.target < self.num_dies):
            pair = {"source": frame.source, "target": frame.target}
            return [Record("unknown_die", pair)]
        plane = plane_between(self.pod, frame.source, frame.target, frame.plane)
        if plane is None or not (
            0 <= frame.charge_bytes <= CHARGE_BYTES_MAX
            and 1 <= frame.repeat <= REPEAT_MAX
            and 0 <= frame.depart_ns <= STAMP_NS_MAX
            and frame.begin_ns <= STAMP_NS_MAX
        ):
            cost = {"charge_bytes": frame.charge_bytes, "repeat": frame.repeat}
            return [Record("malformed_frame", {**cost, "plane": frame.plane})]
        # The server's card, or a sender that keeps no links: the shard reserves for it.
        claimed = not is_shared(plane) and frame.begin_ns >= frame.depart_ns
        wanted_ns = frame.begin_ns if claimed else frame.depart_ns
        begin_ns = self._egress.depart(plane, frame.source, wanted_ns, frame.charge_bytes)
        departed = Departed(
            plane, frame.source, frame.target, frame.charge_bytes, frame.repeat,
            frame.depart_ns, begin_ns,
        )  # fmt: skip
        stamps = self._ingress.arrive(departed)
        if self._model is not None:
            self._model.check(stamps)
        self.frames += 1
        self.charged_bytes += frame.charge_bytes
        effects: list[Effect] = (
            [_deliver(frame.source, frame.target, stamps.deliver_ns, frame.payload)]
            if self.faults.is_empty
            else self._faulted(stamps, frame.payload)
        )
        if claimed and begin_ns != wanted_ns:
            self.double_booked += 1
            effects.append(_double_booked(frame, begin_ns))
        return effects

    def _faulted(self, stamps: Stamps, payload: np.ndarray) -> list[Effect]:
        """What arrives of a stamped frame, now that faults have had their way with it."""
        frame = stamps.frame
        delivery = Delivery(
            str(frame.plane), frame.source, frame.target, frame.begin_ns, stamps.deliver_ns,
            frame.nbytes, payload, stamps.occupied_ns,
        )  # fmt: skip
        arriving = self.faults.apply(delivery)
        return [_deliver(d.source, d.target, d.deliver_ns, d.payload) for d in arriving]

    # ------------------------------------------------------------ links

    def _begin(self, now_ns: int) -> list[Effect]:
        self._log.begin(now_ns)
        return [SetTimer(LINKS_TIMER, PERIOD_NS)]

    def _tell_links(self, now_ns: int) -> list[Effect]:
        report = self._log.report(now_ns)
        again = SetTimer(LINKS_TIMER, PERIOD_NS)
        return [again] if report is None else [Send(subjects.LINKS, report), again]

    def link_use(self, begin_ns: int, end_ns: int) -> tuple[LinkUse, ...]:
        """What the links of this shard have carried, with their busy time between two stamps; of
        the egress of other shards' dies that is the part which came here.
        """
        return self._ingress.use(begin_ns, end_ns) + self._egress.use(begin_ns, end_ns)

    # ------------------------------------------------------------ faults

    def _arm(self, arm: FaultArm, reply_to: str) -> list[Effect]:
        try:
            self.faults.arm(rule_of(arm))
        except OperatingError as error:
            fields = {"fault_id": arm.fault_id, "kind": arm.kind, "problem": error.message}
            state = FaultState(arm.fault_id, False, 0, 0, error.message)
            return _told(Record("fault_refused", fields), state, reply_to)
        armed = Record("fault_armed", {"fault_id": arm.fault_id, "kind": arm.kind})
        return _told(armed, FaultState(arm.fault_id, True, 0, 0), reply_to)

    def _heal(self, fault_id: str, reply_to: str) -> list[Effect]:
        was = self.faults.heal(fault_id)
        if was is None:
            unknown = Record("fault_unknown", {"fault_id": fault_id})
            return _told(unknown, FaultState(fault_id, False, 0, 0), reply_to)
        fields = {"fault_id": fault_id, "seen": was.seen, "touched": was.touched}
        state = FaultState(fault_id, False, was.seen, was.touched)
        return _told(Record("fault_healed", fields), state, reply_to)

    def validate(self) -> None:
        """Every link's reservations are disjoint."""
        self._egress.validate()
        self._ingress.validate()


def rule_of(arm: FaultArm) -> FaultRule:
    """The rule that a command describes; raises `BadInput` naming what is wrong."""
    return FaultRule(
        arm.fault_id,
        build_fault(arm.kind, arm.parameters),
        Scope(arm.scope, arm.numbers, arm.plane, arm.direction),
        arm.probability,
        arm.start_ns,
        arm.duration_ns,
        arm.seed,
    )


def _double_booked(frame: UbFrame, begin_ns: int) -> Record:
    pair = {"source": frame.source, "target": frame.target}
    stamps = {"claimed_ns": frame.begin_ns, "begin_ns": begin_ns}
    return Record("egress_double_booked", {**pair, **stamps})


def _told(record: Record, state: FaultState, reply_to: str) -> list[Effect]:
    """What happened, for the log, and for whoever waits to hear it."""
    return [record, Reply(reply_to, state)] if reply_to else [record]


def _deliver(source: int, target: int, deliver_ns: int, payload: np.ndarray) -> Deliver:
    delivery = UbDelivery(source, target, deliver_ns, payload)
    return Deliver(subjects.ub(target), delivery, deliver_ns)
