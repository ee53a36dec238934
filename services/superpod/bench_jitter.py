"""What garbage collection does to the way to the first dispatch (P060, P064), in real time.

A simulated pod with the real model serves long streams in this process. Each `BeginIteration` is
timed: from the start of an iteration to its first exchange with the experts, where all other dies
would wait. The two ways of collecting alternate every few iterations of one run, so that both see
the same machine and the same heap:

    automatic   Python's own thresholds, nothing frozen
    manual      off; after warm-up everything is frozen; one collection at the end of a stretch

A benchmark, not a test: it says as much about the machine as about us.
"""

from __future__ import annotations

import gc
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from libs import units
from libs.clock.pod_clock import monotonic_s
from libs.config.topology import load_topology
from libs.model.resources import ModelResources
from libs.model.sampling import SamplingParams
from libs.runtime.gc_control import GcPauses
from libs.runtime.sim_host import SimHost
from libs.wire.tokens import Chunk
from libs.workload.requests import ClientRequest, spec_of
from services.decode_te.jobs import BeginIteration
from services.gateway.core import ClientSubmit
from services.superpod.wiring import simulate_pod

#: Iterations of one way before the other has its turn.
STRETCH = 25
STREAMS = 8
_GATEWAY = "gateway.0"
_WARM_UP_NS = units.s(1)


@dataclass(slots=True)
class Way:
    """What one way of collecting has cost."""

    first_dispatch_s: list[float] = field(default_factory=list)
    pauses: GcPauses = field(default_factory=GcPauses)

    def row(self, name: str) -> dict[str, Any]:
        """As the report has it, in milliseconds."""
        times = 1e3 * np.asarray(self.first_dispatch_s)
        return {
            "gc": name,
            "iterations": len(times),
            "first_dispatch_ms": round(float(np.median(times)), 3),
            "first_dispatch_ms_p99": round(float(np.percentile(times, 99)), 3),
            "first_dispatch_ms_max": round(float(times.max()), 3),
            "pauses_in_iterations": self.pauses.collections,
            "pause_ms_total": round(1e3 * self.pauses.total_s, 2),
            "pause_ms_longest": round(1e3 * self.pauses.longest_s, 3),
        }


class Alternating:
    """An executor that times every iteration's way to its first dispatch, and changes ways."""

    def __init__(self, executor: Any, meter: Meter) -> None:
        self._executor = executor
        self._meter = meter

    def run(self, job: Any) -> Any:
        if not isinstance(job, BeginIteration):
            return self._executor.run(job)
        self._meter.next_iteration()
        began_s = monotonic_s()
        result = self._executor.run(job)
        self._meter.way.first_dispatch_s.append(monotonic_s() - began_s)
        return result


class Meter:
    """Which way is on, and the pauses of each."""

    def __init__(self) -> None:
        self.ways = {"automatic": Way(), "manual": Way()}
        self._names = list(self.ways)
        self._iterations = 0
        self._current = "automatic"
        self._collecting = False
        self._began_s = 0.0

    @property
    def way(self) -> Way:
        """The one that is on."""
        return self.ways[self._current]

    def next_iteration(self) -> None:
        """Change ways after every stretch; the manual one collects here, between iterations."""
        stretch, place = divmod(self._iterations, STRETCH)
        self._iterations += 1
        if place:
            return
        self._collecting = True
        self._current = self._names[stretch % 2]
        if self._current == "manual":
            gc.collect()
            gc.freeze()
            gc.disable()
        else:
            gc.enable()
            gc.unfreeze()
        self._collecting = False

    def count(self, phase: str, _info: dict[str, int]) -> None:
        """Called by the collector; what is asked for between stretches is no pause."""
        if phase == "start":
            self._began_s = monotonic_s()
        elif not self._collecting:
            self.way.pauses.add(monotonic_s() - self._began_s)


def run(tokens: int = 256) -> dict[str, Any]:
    """Serve `STREAMS` streams of `tokens` tokens and compare."""
    topology = load_topology("mini")
    model = ModelResources(topology.model.checkpoint, topology.model.engine)
    host, meter = simulate_pod(topology, model, seed=1, validate=False), Meter()
    for name in host.names():
        if name.startswith("decode_te."):
            host.wrap_executor(name, lambda executor: Alternating(executor, meter))
    ended = _submit(host, model, tokens)
    gc.callbacks.append(meter.count)
    try:
        host.run(lambda: len(ended) == STREAMS)
    finally:
        gc.callbacks.remove(meter.count)
        gc.enable()
        gc.unfreeze()
    return {"streams": STREAMS, "rows": [way.row(name) for name, way in meter.ways.items()]}


def _submit(host: SimHost, model: ModelResources, tokens: int) -> set[str]:
    ended: set[str] = set()

    def present(key: str, item: Any, _at_ns: int) -> None:
        if not isinstance(item, Chunk) or item.finish_reason is not None:
            ended.add(key)

    host.on_present(present)
    for index in range(STREAMS):
        request = ClientRequest(
            index=index, chat=True, text="Tell me a story.", thinking=False,
            sampling=SamplingParams(temperature=1.0, seed=index, ignore_eos=True),
            max_tokens=tokens, stops=(), arrive_ns=0, stream=True, cancel_after=None,
        )  # fmt: skip
        spec = spec_of(request, f"stream-{index}", _WARM_UP_NS, model)
        host.inject(_GATEWAY, ClientSubmit(spec), _WARM_UP_NS)
    return ended
