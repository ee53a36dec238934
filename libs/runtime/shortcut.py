"""The short way of UB frames: past the broker, from the sender to the owner of the die.

    sender's host --take--> shared memory --> shard beside the owner --hand_over--> owner's host

With `carrier: shm` the shard that stamps what reaches a die lives in the process that owns the die.
A frame comes to it through shared memory when the sender is on the same host, else over the broker
like any other; either way the same core stamps it in the same order of arrival, so the stamps are
those that a shard elsewhere would have given.

What the short way cannot take, because the die is on another host or the frame fits no ring, is
left to the broker: slower, never lost for that reason.
"""

from __future__ import annotations

import asyncio
from dataclasses import asdict
from typing import Protocol

from libs.actor import Event, Received
from libs.carrier.api import Carrier
from libs.carrier.waybill import read_waybill, with_waybill
from libs.errors import CapacityExceeded, RemoteProtocolError
from libs.ids import die_shard
from libs.wire.fabric import UbDelivery, UbFrame


class Inlet(Protocol):
    """The side of a host that frames come in by."""

    def feed(self, event: Event) -> None:
        """Handle one event now."""
        ...

    def delivered(self, delivery: UbDelivery) -> None:
        """Unwrap a delivered frame and handle what was in it."""
        ...

    def refused(self, error: RemoteProtocolError, where: str) -> None:
        """Count a frame that is none."""
        ...


class Shortcut:
    """The short way from and to one die; `carrier` is None in a process that shares no memory."""

    def __init__(self, die: int, carrier: Carrier | None = None) -> None:
        self.die = die
        self.frames_left = 0  # to the broker, although their die is on this host
        self._carrier = carrier
        self._owner: Inlet | None = None
        self._shard: Inlet | None = None

    def start(self, owner: Inlet, shard: Inlet, loop: asyncio.AbstractEventLoop) -> None:
        """Begin to carry, between the host of the die's owner and that of its shard."""
        self._owner, self._shard = owner, shard
        if self._carrier is not None:
            self._carrier.on_frame(self._arrived)
            self._carrier.start(loop)

    def take(self, shard: str, frame: UbFrame) -> bool:
        """Carry a departed frame to `shard`; False leaves it to the broker.

        Raises what `Carrier.send` raises: the frame is lost then.
        """
        carrier, target = self._carrier, frame.target
        near = target != self.die and carrier is not None and carrier.reaches(target)
        if not near or shard != die_shard(target):
            return False
        assert carrier is not None
        try:
            carrier.send(target, with_waybill(frame))
        except CapacityExceeded:
            self.frames_left += 1
            return False
        return True

    def _arrived(self, source: int, view: memoryview) -> None:
        assert self._shard is not None, "start first"
        try:
            frame = read_waybill(view)
        except RemoteProtocolError as error:
            self._shard.refused(error, f"shared memory of die {source}")
            return
        self._shard.feed(Received(frame.depart_ns, frame, f"die.{source}", 0, 0))

    def hand_over(self, delivery: UbDelivery) -> bool:
        """Give what the shard has stamped to the owner; False when it is for another die."""
        if self._owner is None or delivery.target != self.die:
            return False
        self._owner.delivered(delivery)
        return True

    def counters(self) -> dict[str, int]:
        """What was carried, what was refused or damaged, and what was left to the broker."""
        if self._carrier is None:
            return {}
        return {**asdict(self._carrier.statistics()), "frames_left": self.frames_left}

    def close(self) -> None:
        """Carry nothing any more; closing twice is fine."""
        if self._carrier is not None:
            self._carrier.close()
