"""Every fault class by name, and how one is built from plain numbers that came from outside.

The probability of a rule is the share of the traffic in its scope that it touches. What it is a
chance of differs:

    corruption duplicate jitter latency       each frame by itself
      one_way_loss reorder
    blackhole bandwidth_cap                   each link (an ordered pair of dies) and slot of time
    flap                                      the part of every period in which a link is down
    dead_die slow_die                         each die and slot of time

Of a frame between two dies in scope either may be hit, so each is with less: `draw.per_end`. Where
the scope names dies or servers, the probability is that of each die. With probability 1 all of it
is hit as long as the rule lasts, whatever the class.
"""

from __future__ import annotations

from dataclasses import fields

from libs.errors import BadInput
from libs.fabric.faults.bandwidth_cap import BandwidthCap
from libs.fabric.faults.blackhole import Blackhole
from libs.fabric.faults.corruption import Corruption
from libs.fabric.faults.dead_die import DeadDie
from libs.fabric.faults.delivery import Fault
from libs.fabric.faults.duplicate import Duplicate
from libs.fabric.faults.flap import Flap
from libs.fabric.faults.jitter import Jitter
from libs.fabric.faults.latency import Latency
from libs.fabric.faults.one_way_loss import OneWayLoss
from libs.fabric.faults.reorder import Reorder
from libs.fabric.faults.slow_die import SlowDie

CLASSES: dict[str, type[Fault]] = {
    cls.KIND: cls
    for cls in (
        BandwidthCap, Blackhole, Corruption, DeadDie, Duplicate, Flap, Jitter, Latency,
        OneWayLoss, Reorder, SlowDie,
    )
}  # fmt: skip

#: Classes that look at the stamp of delivery too. They come last, when nothing moves it any more.
AT_DELIVERY = frozenset({DeadDie.KIND})

#: No parameter of any class is meant to be larger (an hour in nanoseconds).
PARAMETER_MAX = 3_600_000_000_000


def parameters_of(kind: str) -> tuple[str, ...]:
    """Names of the numbers that `kind` takes; raises `BadInput` for an unknown kind."""
    cls = CLASSES.get(kind)
    if cls is None:
        known = ", ".join(sorted(CLASSES))
        raise BadInput(f"unknown fault class {kind!r}; there are: {known}", field="kind")
    # Protocols are no dataclasses, the classes that implement this one are.
    return tuple(item.name for item in fields(cls) if item.init)  # type: ignore[arg-type]


def build_fault(kind: str, parameters: tuple[tuple[str, int], ...] = ()) -> Fault:
    """A fault of `kind`; what is not given keeps the class's default."""
    known = parameters_of(kind)
    for name, value in parameters:
        if name not in known:
            raise BadInput(f"fault {kind} has no parameter {name!r}", field=f"parameters.{name}")
        if not 1 <= value <= PARAMETER_MAX:
            text = f"fault {kind}: {name} must be from 1 to {PARAMETER_MAX}, not {value}"
            raise BadInput(text, field=f"parameters.{name}")
    return CLASSES[kind](**dict(parameters))
