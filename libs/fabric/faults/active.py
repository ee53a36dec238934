"""Rules that are armed: which fault, where, how likely, from when to when, and what it has done.

    rule \\ time   | before start  during         after           healed
    --------------+----------------------------------------------------
    frames        | pass          fault.apply    pass            pass

A rule hits frames by the stamp at which they leave, so that it means the same whatever order frames
are handled in; a dead die also takes no frame that would be delivered while the rule lasts. `seen`
counts the frames in scope, `touched` those that did not come out as they
went in: the witness that the fault was real.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field

from libs.errors import Backpressure, BadInput
from libs.fabric.faults.catalogue import AT_DELIVERY, build_fault
from libs.fabric.faults.delivery import Delivery, Fault
from libs.fabric.faults.draw import Chance, Draw, per_end, seed_of, threshold_of
from libs.fabric.faults.scope import Scope
from libs.fabric.superpod import SuperPod

#: Rules armed at once.
RULES_MAX = 64
#: What `duration_ns` 0 means: until healed.
FOR_EVER = 0
EVERYWHERE = Scope()


@dataclass(frozen=True, slots=True)
class FaultRule:
    """One armed fault; `probability` is the share of the traffic in scope that is touched, as
    `libs.fabric.faults.catalogue` says for each class.
    """

    fault_id: str
    fault: Fault
    scope: Scope = EVERYWHERE
    probability: float = 1.0
    start_ns: int = 0
    duration_ns: int = FOR_EVER
    seed: int = 0

    def require(self, pod: SuperPod) -> None:
        """Raise `BadInput` naming the field that is wrong."""
        if not self.fault_id:
            raise BadInput("a fault needs an id", field="fault_id")
        if not 0 < self.probability <= 1:
            text = f"probability must be above 0 and at most 1, not {self.probability}"
            raise BadInput(text, field="probability")
        if self.start_ns < 0 or self.duration_ns < 0:
            raise BadInput("start and duration must not be negative", field="start_ns")
        self.scope.require(pod)

    @property
    def looks_at_delivery(self) -> bool:
        """Whether the fault is also about where a frame would arrive, and when."""
        return self.fault.KIND in AT_DELIVERY

    def chance(self) -> Chance:
        """What the draws of this rule share."""
        one_end = per_end(self.probability) if self.scope.has_both_ends else self.probability
        return Chance(
            seed_of(self.seed, self.fault_id), threshold_of(self.probability),
            threshold_of(one_end), self.start_ns,
            None if self.duration_ns == FOR_EVER else self.start_ns + self.duration_ns,
        )  # fmt: skip


@dataclass(slots=True)
class Armed:
    """A rule and its history; frames are numbered per ordered pair, which their draws depend on."""

    rule: FaultRule
    chance: Chance
    counts: defaultdict[tuple[int, int], int] = field(default_factory=lambda: defaultdict(int))
    seen: int = 0
    touched: int = 0

    def concerns(self, delivery: Delivery) -> bool:
        """Whether the rule is active when the frame leaves, or where it matters arrives."""
        if self.chance.covers(delivery.begin_ns):
            return True
        return self.rule.looks_at_delivery and self.chance.covers(delivery.deliver_ns)


class FaultSet:
    """All rules of one emulator shard, in the order in which they were armed; those that look at
    the stamp of delivery behind the others.
    """

    def __init__(self, pod: SuperPod) -> None:
        self._pod = pod
        self._armed: dict[str, Armed] = {}

    @property
    def is_empty(self) -> bool:
        """Whether nothing is armed; the usual case, which must cost nothing."""
        return not self._armed

    def arm(self, rule: FaultRule) -> None:
        """Add a rule, or replace the one of the same id; raises `BadInput` or `Backpressure`."""
        rule.require(self._pod)
        if rule.fault_id not in self._armed and len(self._armed) >= RULES_MAX:
            raise Backpressure(f"{RULES_MAX} faults are armed")
        self._armed[rule.fault_id] = Armed(rule, rule.chance())
        last = sorted(self._armed.items(), key=lambda item: item[1].rule.looks_at_delivery)
        self._armed = dict(last)

    def heal(self, fault_id: str) -> Armed | None:
        """Remove a rule and return its history; an unknown id gives None."""
        return self._armed.pop(fault_id, None)

    def armed(self) -> tuple[Armed, ...]:
        """Every rule with its history."""
        return tuple(self._armed.values())

    def apply(self, delivery: Delivery) -> list[Delivery]:
        """What arrives instead of one frame; rules work on what the ones before have left."""
        deliveries = [delivery]
        for armed in self._armed.values():
            if not any(map(armed.concerns, deliveries)):
                continue
            ends = armed.rule.scope.ends_in(
                self._pod, delivery.plane, delivery.source, delivery.target
            )
            if ends:
                deliveries = self._apply_one(armed, deliveries, ends)
        return deliveries

    def _apply_one(
        self, armed: Armed, deliveries: list[Delivery], ends: tuple[int, ...]
    ) -> list[Delivery]:
        pair = deliveries[0].source, deliveries[0].target
        result: list[Delivery] = []
        for delivery in deliveries:
            if not armed.concerns(delivery):
                result.append(delivery)
                continue
            draw = Draw(armed.chance, pair, armed.counts[pair], ends)
            armed.counts[pair] += 1
            armed.seen += 1
            left = armed.rule.fault.apply(delivery, draw)
            armed.touched += left != [delivery]
            result += left
        return result


def fault_named(kind: str, probability: float, seed: int) -> FaultRule:
    """The standard rule of one class on every link, as `xds verify --faults` uses it in a
    simulation and (`services.cli.pod_faults.arm_of`) in a pod of processes.
    """
    return FaultRule(f"all-{kind}", build_fault(kind), EVERYWHERE, probability, seed=seed)
