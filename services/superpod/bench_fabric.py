"""What the emulated links do, measured from outside: frames in, delivery stamps out.

    SenderPort (egress of the source) --UbFrame--> FabricEmulatorCore (ingress, latency) --> stamp

The real core stamps every frame, in virtual time, with the independent checker on: a frame faster
than its links ends the benchmark with an error. No figure is computed from the constants of
`libs.fabric.params`; those stand beside the figures for comparison. What comes out for an idle link
is therefore by construction. What is not: the shares of an incast and of a fan-out, the bound on
frames under way, and how long frames queue under random load, which a textbook formula predicts.

`frames_per_s` is the one figure in real time: what this machine's emulator core can stamp.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from libs import units
from libs.actor import Deliver, Received
from libs.clock.pod_clock import monotonic_s
from libs.errors import InvariantError
from libs.fabric.link import LinkUse, SenderPort
from libs.fabric.params import UB
from libs.fabric.planes import Plane, plane_limits
from libs.fabric.superpod import WHOLE_SUPERPOD as POD
from libs.wire.fabric import UbFrame
from services.fabric_emulator.core import FabricEmulatorCore

KB = 1024
SIZES = (512, 4 * KB, 36 * KB, 288 * KB, 1152 * KB, 9216 * KB)
#: Frames that follow each other to see what a link carries. The first ones, as many as may be under
#: way at once, only fill it.
FILLING = UB.in_flight_frames_max
TRAIN = 4 * FILLING
#: Two dies of different servers.
FAR = (0, 17)
PAIRS = {"same chip": (0, 1), "same server": (0, 2), "next server": FAR, "last server": (0, 767)}
SENDERS = (1, 2, 4, 8, 16, 32)
SHARE_BYTES, SHARE_FRAMES = 256 * KB, 64
LOADS = (0.2, 0.4, 0.5, 0.6, 0.7, 0.8)
LOAD_BYTES, LOAD_FRAMES = 64 * KB, 6_000
REAL_FRAMES = 20_000
SEED = 20_250_802
_NO_PAYLOAD = np.zeros(0, np.uint8)


@dataclass(frozen=True, slots=True)
class Shot:
    """A frame to send: ready at `at_ns`, over `plane`."""

    at_ns: int
    source: int
    target: int
    nbytes: int
    plane: Plane = Plane.UB


class Wires:
    """A whole SuperPod's links, idle at first, and what has crossed them."""

    def __init__(self, *, check: bool = True) -> None:
        self.core = FabricEmulatorCore("fabric_emulator.0", POD.num_dies, check=check)
        self._port = SenderPort(POD)

    def frames(self, shots: Iterable[Shot]) -> list[UbFrame]:
        """Every shot past its egress link, in the order in which they leave it."""
        leaving = []
        for number, shot in enumerate(sorted(shots, key=lambda shot: shot.at_ns)):
            way = self._port.dispatch(
                shot.source, shot.target, shot.at_ns, shot.nbytes, str(shot.plane)
            )
            frame = UbFrame(
                shot.source, shot.target, shot.at_ns, shot.nbytes, 1, _NO_PAYLOAD,
                way.begin_ns, str(shot.plane),
            )  # fmt: skip
            leaving.append((way.at_ns, number, frame))
        return [frame for _, _, frame in sorted(leaving, key=lambda item: item[:2])]

    def stamp(self, frame: UbFrame) -> int:
        """When the emulator delivers it; raises `InvariantError` if the links do not allow that."""
        at_ns = max(frame.depart_ns, frame.begin_ns)
        deliver, *problems = self.core.handle(Received(at_ns, frame, "", 1, 1), at_ns)
        if problems:
            raise InvariantError(f"the sender's links were not kept: {problems}")
        assert isinstance(deliver, Deliver), deliver
        return deliver.at_ns

    def carry(self, shots: Iterable[Shot]) -> list[tuple[UbFrame, int]]:
        """Every shot with its delivery stamp, in the order of the stamps."""
        carried = [(frame, self.stamp(frame)) for frame in self.frames(shots)]
        return sorted(carried, key=lambda item: item[1])

    def busy(self, direction: str, link: int, end_ns: int) -> float:
        """Which part of the time up to `end_ns` a UB link was busy."""
        uses: Sequence[LinkUse] = (
            self._port.egress.use(0, end_ns)
            if direction == "egress"
            else self.core.link_use(0, end_ns)
        )
        found = [
            use.window_busy_ns
            for use in uses
            if (use.plane, use.link, use.direction) == (Plane.UB, link, direction)
        ]
        return sum(found) / end_ns


def run() -> dict[str, Any]:
    """Everything, in the form of `--json`; a few seconds."""
    latency, uniform = by_size(), by_distance()
    incast = [shares("incast", number) for number in SENDERS]
    fan_out = [shares("fan_out", number) for number in SENDERS]
    load = [under_load(offered) for offered in LOADS]
    largest = {row["plane"]: row for row in latency if row["bytes"] == SIZES[-1]}
    flight = in_flight()
    rates = {name: real_time_rate(check) for name, check in (("plain", False), ("checked", True))}
    return {
        "ub_us_512b": next(row["us"] for row in latency if row["bytes"] == 512),
        "ub_gb_per_s": largest[Plane.UB]["train_gb_per_s"],
        "ub_over_roce": round(
            largest[Plane.UB]["train_gb_per_s"] / largest[Plane.ROCE]["train_gb_per_s"], 2
        ),
        "uniform_spread_percent": spread_percent(),
        "incast_total_gb_per_s": incast[-1]["total_gb_per_s"],
        "incast_fairness": min(row["fairness"] for row in incast),
        "fan_out_total_gb_per_s": fan_out[-1]["total_gb_per_s"],
        "in_flight_frames": flight["seen"],
        "frames_per_s": rates["plain"],
        "frames_per_s_checked": rates["checked"],
        "real_time": ["frames_per_s", "frames_per_s_checked"],
        "by_construction": ["ub_us_512b", "ub_gb_per_s", "ub_over_roce", "uniform_spread_percent"],
        "grid": [*latency, *uniform, *incast, *fan_out, flight, *load],
    }


# ---------------------------------------------------------------- one pair


def frame_ns(pair: tuple[int, int], nbytes: int, plane: Plane = Plane.UB) -> int:
    """One frame over idle links."""
    ((_, deliver_ns),) = Wires().carry([Shot(0, *pair, nbytes, plane)])
    return deliver_ns


def by_size() -> list[dict[str, Any]]:
    """Latency of one frame, and what a train of them carries, by plane and size."""
    limits = plane_limits(UB)
    rows = []
    for plane in Plane:
        for nbytes in SIZES:
            stamps = [at for _, at in Wires().carry([Shot(0, *FAR, nbytes, plane)] * TRAIN)]
            rows.append(
                {
                    "what": "latency",
                    "plane": str(plane),
                    "bytes": nbytes,
                    "us": round(units.to_us(frame_ns(FAR, nbytes, plane)), 3),
                    "train_gb_per_s": _gb_per_s(
                        nbytes * (TRAIN - FILLING), stamps[-1] - stamps[FILLING - 1]
                    ),
                    "link_gb_per_s": limits[plane].bytes_per_s / units.NS_PER_S,
                    "link_latency_us": units.to_us(limits[plane].latency_ns),
                }
            )
    return rows


def by_distance() -> list[dict[str, Any]]:
    """The same frame between dies that are near and far (P025)."""
    return [
        {
            "what": "uniform",
            "pair": name,
            "source": pair[0],
            "target": pair[1],
            "bytes": nbytes,
            "us": round(units.to_us(frame_ns(pair, nbytes)), 3),
        }
        for name, pair in PAIRS.items()
        for nbytes in (512, 1152 * KB)
    ]


def spread_percent(pairs: int = 200) -> float:
    """By how much the slowest of random pairs of the whole pod is behind the fastest."""
    generator = np.random.default_rng(SEED)
    ends = [generator.choice(POD.pod_dies, 2, replace=False).tolist() for _ in range(pairs)]
    times = [frame_ns((source, target), 512) for source, target in ends]
    return round(100 * (max(times) / min(times) - 1), 3)


def in_flight(frames: int = 4 * UB.in_flight_frames_max) -> dict[str, Any]:
    """How many frames of one pair are under way at once, when all want to leave together.

    Frames delivered within one latency were all under way at its beginning. The VPC has the longest
    latency, and tiny frames do not fill its link, so only the bound holds them back.
    """
    latency_ns = plane_limits(UB)[Plane.VPC].latency_ns
    stamps = [at for _, at in Wires().carry([Shot(0, *FAR, 64, Plane.VPC)] * frames)]
    seen = max(sum(1 for at in stamps if begin <= at < begin + latency_ns) for begin in stamps)
    return {
        "what": "in_flight",
        "plane": str(Plane.VPC),
        "frames": frames,
        "bound": UB.in_flight_frames_max,
        "seen": seen,
        "us": round(units.to_us(stamps[-1]), 3),
    }


# ---------------------------------------------------------------- many dies


def shares(what: str, number: int) -> dict[str, Any]:
    """`number` dies send to one (incast), or one sends to them (fan-out): who gets how much.

    Each of them has the same to move. A share is what one had moved when the first had all of it.
    """
    others = [POD.dies_per_server * (index + 1) % POD.pod_dies for index in range(number)]
    wires = Wires()
    ends = [(other, 0) if what == "incast" else (0, other) for other in others]
    shots = [Shot(0, *pair, SHARE_BYTES) for _ in range(SHARE_FRAMES) for pair in ends]
    moved: dict[int, list[int]] = {other: [] for other in others}
    for frame, at_ns in wires.carry(shots):
        moved[frame.source or frame.target].append(at_ns)
    first_ns = min(stamps[-1] for stamps in moved.values())
    last_ns = max(stamps[-1] for stamps in moved.values())
    streaming_ns = first_ns - UB.ub_latency_ns
    parts = [sum(at <= first_ns for at in stamps) * SHARE_BYTES for stamps in moved.values()]
    mouth = "ingress" if what == "incast" else "egress"
    return {
        "what": what,
        "dies": number,
        "bytes_each": SHARE_BYTES * SHARE_FRAMES,
        "share_min_gb_per_s": _gb_per_s(min(parts), streaming_ns),
        "share_max_gb_per_s": _gb_per_s(max(parts), streaming_ns),
        "fairness": round(min(parts) / max(parts), 4),
        "total_gb_per_s": _gb_per_s(
            SHARE_BYTES * SHARE_FRAMES * number, last_ns - UB.ub_latency_ns
        ),
        "shared_link_busy": round(wires.busy(mouth, 0, last_ns - UB.ub_latency_ns), 4),
        "us": round(units.to_us(last_ns), 3),
    }


def under_load(offered: float) -> dict[str, Any]:
    """Frames from all over the pod reach one die at random moments, at a part of its link's rate.

    For random arrivals of equal frames the mean time in the queue is load / 2 (1 - load) frames
    (M/D/1). Nothing in the emulator knows that formula.
    """
    generator = np.random.default_rng(SEED)
    service_ns = units.transfer_ns(LOAD_BYTES, UB.ub_bytes_per_s)
    gaps = generator.exponential(service_ns / offered, LOAD_FRAMES)
    times = np.cumsum(gaps).astype(np.int64).tolist()
    sources = generator.integers(1, POD.pod_dies, LOAD_FRAMES).tolist()
    wires = Wires()
    shots = [Shot(at, source, 0, LOAD_BYTES) for at, source in zip(times, sources, strict=True)]
    idle_ns = service_ns + UB.ub_latency_ns
    waits = sorted(at - frame.depart_ns - idle_ns for frame, at in wires.carry(shots))
    (ingress,) = (use for use in wires.core.link_use(0, 0) if use.link == 0)
    return {
        "what": "load",
        "offered": offered,
        "frames": LOAD_FRAMES,
        "bytes": LOAD_BYTES,
        "busy": round(ingress.busy_ns / times[-1], 3),
        "wait_mean_us": round(units.to_us(sum(waits)) / len(waits), 3),
        "wait_p99_us": round(units.to_us(waits[len(waits) * 99 // 100]), 3),
        "wait_formula_us": round(units.to_us(service_ns) * offered / (2 * (1 - offered)), 3),
    }


def _gb_per_s(nbytes: int, ns: int) -> float:
    return round(nbytes / ns, 2)


# ---------------------------------------------------------------- real time


def real_time_rate(check: bool, frames: int = REAL_FRAMES) -> int:
    """Frames per second of wall time that the core stamps here; the best of three runs."""
    generator = np.random.default_rng(SEED)
    times = np.cumsum(generator.integers(0, 40, frames)).tolist()
    ends = generator.integers(0, POD.pod_dies, (2, frames)).tolist()
    best_s = float("inf")
    for _ in range(3):
        wires = Wires(check=check)
        leaving = wires.frames(
            Shot(at, source, target, 7_680) for at, source, target in zip(times, *ends, strict=True)
        )
        begin_s = monotonic_s()
        for frame in leaving:
            wires.stamp(frame)
        best_s = min(best_s, monotonic_s() - begin_s)
    return round(frames / best_s)
