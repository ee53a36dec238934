"""`SimHost` without encoding, for benchmarks of many frames.

The same heap, the same emulator core stamping every frame, and messages handed over as objects: a
collective of 128 ranks has 32,000 frames, and encoding each six times would be most of the run.
Nothing but frames and `Started` exists here; a timer or a bus message is an error.
"""

from __future__ import annotations

import heapq
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from libs.actor import Core, Deliver, Effect, Received, Started, Transmit
from libs.fabric.link import SenderPort
from libs.fabric.params import FabricParams
from libs.fabric.superpod import WHOLE_SUPERPOD
from libs.runtime.fabric_frames import departing
from libs.wire.fabric import UbDelivery, UbFrame

_NO_PAYLOAD = np.zeros(0, np.uint8)


@dataclass(frozen=True, slots=True, eq=False)
class _Departing:
    """A frame at its source, and the message that it stands for."""

    frame: UbFrame
    message: Any


class LeanHost:
    """Runs cores by die around one emulator core; `frames` is how many crossed the fabric."""

    def __init__(self, emulator: Core, cores: Mapping[int, Core], params: FabricParams) -> None:
        self.now_ns = 0
        self.frames = 0
        self._emulator = emulator
        self._cores = cores
        self._ports = {die: SenderPort(WHOLE_SUPERPOD, params) for die in cores}
        self._heap: list[tuple[int, int, int, Any]] = []
        self._sequence = 0

    def start(self) -> None:
        """Every core's `Started`, now; then run to rest."""
        for core in self._cores.values():
            self.carry_out(core.handle(Started(self.now_ns), self.now_ns))
        self.run()

    def run(self) -> None:
        """Until no frame is under way."""
        while self._heap:
            self.now_ns, _, die, item = heapq.heappop(self._heap)
            if isinstance(item, _Departing):
                event = Received(self.now_ns, item.frame, "", 1, 1)
                self._stamp(self._emulator.handle(event, self.now_ns), item.message)
            else:
                event = Received(self.now_ns, item, "", 1, 1)
                self.carry_out(self._cores[die].handle(event, self.now_ns))

    def carry_out(self, effects: list[Effect]) -> None:
        """Frames reach the emulator at their departure."""
        for effect in effects:
            match effect:
                case Transmit():
                    self._transmit(effect)
                case _:
                    raise AssertionError(f"unexpected {effect!r}")

    def _transmit(self, effect: Transmit) -> None:
        """As `SimHost` does: the sender reserves its egress, and the shard gets the frame then."""
        depart_ns = self.now_ns if effect.at_ns is None else effect.at_ns
        frame, way = departing(self._ports[effect.source], effect, depart_ns, _NO_PAYLOAD)
        self._push(way.at_ns, effect.target, _Departing(frame, effect.message))

    def _stamp(self, effects: list[Effect], message: Any) -> None:
        for effect in effects:
            match effect:
                case Deliver(message=UbDelivery() as delivery, at_ns=at_ns):
                    self.frames += 1
                    self._push(at_ns, delivery.target, message)
                case _:
                    raise AssertionError(f"the fabric said {effect!r}")

    def _push(self, when_ns: int, die: int, item: Any) -> None:
        heapq.heappush(self._heap, (when_ns, self._sequence, die, item))
        self._sequence += 1
