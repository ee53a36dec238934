"""A bench for one core: feed events, look at effects, no host and no event loop.

    bench = Bench(DistFlowCore("distflow.p0.d0"))
    effects = bench.take(register)
    pull = effects.one(Send, message=PullKv).message

Every step goes through `Stepper(validate=True)`, so each test also checks every invariant of the
core after every event. Effects are compared partially: only the fields a test is about.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from libs.actor import (
    Compute,
    ComputeDone,
    Core,
    Effect,
    Event,
    Received,
    SetTimer,
    Started,
    TimerFired,
    Unreachable,
)
from libs.runtime.stepper import Stepper


def matches(item: Any, kind: type[Any], **fields: Any) -> bool:
    """Whether `item` is a `kind` whose named fields agree.

    A name with `__` reaches inside (`message__request_id`); a class as the wanted value asks for an
    instance of it.
    """
    return isinstance(item, kind) and all(
        _agrees(_reach(item, path), wanted) for path, wanted in fields.items()
    )


def _reach(item: Any, path: str) -> Any:
    for name in path.split("__"):
        item = getattr(item, name, None)
    return item


def _agrees(found: Any, wanted: Any) -> bool:
    return isinstance(found, wanted) if isinstance(wanted, type) else bool(found == wanted)


class Effects(list[Effect]):
    """What came of one event."""

    def all(self, kind: type[Any], **fields: Any) -> list[Any]:
        """Every effect that matches, in order."""
        return [effect for effect in self if matches(effect, kind, **fields)]

    def one(self, kind: type[Any], **fields: Any) -> Any:
        """The only effect that matches."""
        found = self.all(kind, **fields)
        assert len(found) == 1, f"{len(found)} effects match {kind.__name__} {fields}: {list(self)}"
        return found[0]

    def has(self, kind: type[Any], **fields: Any) -> bool:
        """Whether any effect matches."""
        return bool(self.all(kind, **fields))


class Bench:
    """Feeds one core; `now_ns` is the stamp of the next event and never goes back by itself."""

    def __init__(self, core: Core) -> None:
        self.stepper = Stepper(core, validate=True)
        self.now_ns = 0

    def step(self, event: Event) -> Effects:
        """One event, every invariant checked."""
        return Effects(self.stepper.step(event))

    def start(self) -> Effects:
        """The first event of every core."""
        return self.step(Started(self.now_ns))

    def take(self, message: Any, *, sender: str = "peer", **about: Any) -> Effects:
        """A message arrives; `about` overrides `at_ns`, `incarnation`, `epoch` or `reply_to`."""
        stamp = {"at_ns": self.now_ns, "incarnation": 1, "epoch": 1, **about}
        return self.step(Received(message=message, sender=sender, **stamp))

    def take_all(self, messages: Iterable[Any], **about: Any) -> Effects:
        """Several messages in a row; all their effects."""
        return Effects(effect for message in messages for effect in self.take(message, **about))

    def fire(self, timer: str | SetTimer) -> Effects:
        """A timer is due: by name now, or as it was armed."""
        name = timer if isinstance(timer, str) else timer.name
        if isinstance(timer, SetTimer):
            self.now_ns += timer.delay_ns
        return self.step(TimerFired(self.now_ns, name))

    def done(self, compute: Compute, result: Any, at_ns: int | None = None) -> Effects:
        """The executor finished `compute`, at its start plus its cost unless told otherwise."""
        start = self.now_ns if compute.at_ns is None else compute.at_ns
        stamp = start + compute.cost_ns if at_ns is None else at_ns
        self.now_ns = max(self.now_ns, stamp)
        return self.step(ComputeDone(stamp, compute.job_id, result))

    def unreachable(self, subject: str, message: Any) -> Effects:
        """A probed message found nobody."""
        return self.step(Unreachable(self.now_ns, subject, message))
