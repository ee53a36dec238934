"""The fabric emulator: charges every frame what the real interconnect would, and passes it on.

Links are resources (`libs.fabric.link`): the sender reserves its egress, this shard the ingress
of the dies it serves, and a frame is delivered when both links, the latency and the bound on what
may be under way allow it. Frames are charged by stamp, whatever order they come in.

Armed faults (`libs.fabric.faults`) then make frames late, damage, repeat or lose them, and count
what they did. The emulator itself never retries and never drops. With `check` every frame's
stamps are held against an independent model of the links: nothing is ever delivered faster than
they allow.
"""

from __future__ import annotations

import numpy as np

from libs.actor import Deliver, Effect, Event, Received, Record, Reply
from libs.errors import OperatingError
from libs.fabric.checker import LinkModel
from libs.fabric.faults.active import FaultRule, FaultSet
from libs.fabric.faults.catalogue import build_fault
from libs.fabric.faults.delivery import Delivery
from libs.fabric.faults.scope import Scope
from libs.fabric.link import Departed, EgressLinks, IngressLinks, LinkUse
from libs.fabric.params import UB, FabricParams
from libs.fabric.planes import Plane, is_shared, plane_between
from libs.fabric.superpod import SuperPod
from libs.health.presence import Presence, describe_simple
from libs.wire import subjects
from libs.wire.fabric import FaultArm, FaultHeal, FaultState, UbDelivery, UbFrame


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
        self.faults = FaultSet(pod)
        self._egress = EgressLinks(pod, params)
        self._ingress = IngressLinks(pod, params)
        self._model = LinkModel(pod, params) if check else None
        self._presence = Presence(name, "", lambda: describe_simple(name))

    def handle(self, event: Event, now_ns: int) -> list[Effect]:
        """Stamp frames, take commands; everything else is presence."""
        if isinstance(event, Received) and isinstance(event.message, UbFrame):
            return self._relay(event.message)
        handled = self._presence.handle(event)
        if handled is not None:
            return handled
        match event:
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
        if plane is None or frame.charge_bytes < 0 or frame.repeat < 1 or frame.depart_ns < 0:
            cost = {"charge_bytes": frame.charge_bytes, "repeat": frame.repeat}
            return [Record("malformed_frame", {**cost, "plane": frame.plane})]
        departed = self._departed(frame, plane)
        stamps = self._ingress.arrive(departed)
        if self._model is not None:
            self._model.check(stamps)
        self.frames += 1
        self.charged_bytes += frame.charge_bytes
        if self.faults.is_empty:
            return [_deliver(frame.source, frame.target, stamps.deliver_ns, frame.payload)]
        delivery = Delivery(
            str(plane), frame.source, frame.target, departed.begin_ns, stamps.deliver_ns,
            frame.charge_bytes, frame.payload,
        )  # fmt: skip
        arriving = self.faults.apply(delivery)
        return [_deliver(d.source, d.target, d.deliver_ns, d.payload) for d in arriving]

    def _departed(self, frame: UbFrame, plane: Plane) -> Departed:
        begin_ns = frame.begin_ns
        if is_shared(plane) or begin_ns < frame.depart_ns:
            # The server's card, or a sender that keeps no links: the shard reserves for it.
            begin_ns = self._egress.depart(plane, frame.source, frame.depart_ns, frame.charge_bytes)
        return Departed(
            plane, frame.source, frame.target, frame.charge_bytes, frame.repeat,
            frame.depart_ns, begin_ns,
        )  # fmt: skip

    def link_use(self, begin_ns: int, end_ns: int) -> tuple[LinkUse, ...]:
        """What the links of this shard have carried, with their busy time between two stamps."""
        return self._ingress.use(begin_ns, end_ns) + self._egress.use(begin_ns, end_ns)

    # ------------------------------------------------------------ faults

    def _arm(self, arm: FaultArm, reply_to: str) -> list[Effect]:
        try:
            self.faults.arm(rule_of(arm))
        except OperatingError as error:
            state = FaultState(arm.fault_id, False, 0, 0, error.message)
            return [Reply(reply_to, state)] if reply_to else [Record("fault_refused")]
        armed = Record("fault_armed", {"fault_id": arm.fault_id, "kind": arm.kind})
        state = FaultState(arm.fault_id, True, 0, 0)
        return [armed, Reply(reply_to, state)] if reply_to else [armed]

    def _heal(self, fault_id: str, reply_to: str) -> list[Effect]:
        was = self.faults.heal(fault_id)
        seen, touched = (0, 0) if was is None else (was.seen, was.touched)
        fields = {"fault_id": fault_id, "seen": seen, "touched": touched}
        healed = Record("fault_healed", fields)
        state = FaultState(fault_id, False, seen, touched)
        return [healed, Reply(reply_to, state)] if reply_to else [healed]

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


def _deliver(source: int, target: int, deliver_ns: int, payload: np.ndarray) -> Deliver:
    delivery = UbDelivery(source, target, deliver_ns, payload)
    return Deliver(subjects.ub(target), delivery, deliver_ns)
