"""What a UB frame costs in real time by each way between two processes, in one interleaved run.

The shared-memory carrier (frames given to the receiver, and frames lent to it), a unix socket and
the bus on a NATS server, and beside them a plain copy of as many bytes inside one process. Every
round takes every way at every size once, in random order, so that all of them see the same machine
and none finds its frame in a cache that another does not.

A given frame is copied twice (in and out), a lent one once, a socket's twice by the kernel. A
benchmark, not a test: it says as much about the machine, and who else uses it, as about us.
"""

from __future__ import annotations

import asyncio
import os
import random
import statistics
import tempfile
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from libs.bus.server import NatsServer
from libs.carrier.segment import DEFAULT_ROOT, make_segments
from libs.clock.pod_clock import monotonic_s
from services.superpod.bench_carrier_ends import DIES, NearSide, Places, far_side

KIB, MIB = 1024, 1024 * 1024
SIZES = (4 * KIB, 16 * KIB, 64 * KIB, 256 * KIB, MIB, 4 * MIB, 9 * MIB)
ROUNDS = 200
WARM_UP = 10
COLUMNS = ("shm", "shm_lent", "unix", "nats", "memcpy")

#: What is asked of given frames: from this size on at most so many plain copies ...
COPY_BYTES_MIN = MIB
COPY_RATIO_MAX = 2.0
#: ... and at this size so many times faster than NATS.
NATS_BYTES = MIB
NATS_RATIO_MIN = 5.0

#: Seconds that were measured, by column and size.
Samples = Mapping[tuple[str, int], list[float]]


def run(
    sizes: Sequence[int] = SIZES, rounds: int = ROUNDS, root: Path = DEFAULT_ROOT
) -> dict[str, Any]:
    """Measure: `rows` by size, `targets` what is asked of the carrier and what this run reached.

    `root` is where the carrier's memory is made.
    """
    assert rounds > 0, rounds
    with (
        tempfile.TemporaryDirectory(prefix="xds-bench-") as folder,
        make_segments(DIES, root=root) as shm,
        NatsServer() as broker,
    ):
        places = Places(shm, Path(folder) / "socket", broker.url)
        with far_side(places):
            samples = asyncio.run(_measure(places, sizes, rounds))
    rows = [_row(size, samples) for size in sizes]
    return {
        "rounds": rounds,
        "cpus": os.cpu_count(),
        "load": round(os.getloadavg()[0], 2),
        "rows": rows,
        "targets": targets(rows),
    }


async def _measure(places: Places, sizes: Sequence[int], rounds: int) -> Samples:
    async with NearSide.opened(places) as near:
        return await _rounds(near, sizes, rounds)


async def _rounds(near: NearSide, sizes: Sequence[int], rounds: int) -> Samples:
    order = random.Random(1)
    frames = {size: order.randbytes(size) for size in sizes}
    spare = {size: np.zeros(size, np.uint8) for size in sizes}
    samples: defaultdict[tuple[str, int], list[float]] = defaultdict(list)
    turns = [(column, size) for column in COLUMNS for size in sizes]
    for number in range(-WARM_UP, rounds):
        order.shuffle(turns)
        for column, size in turns:
            if column == "memcpy":
                took_s = _copy_s(frames[size], spare[size])
            else:
                took_s = await near.latency_s(column, frames[size])
            if number >= 0:
                samples[column, size].append(took_s)
    return samples


def _copy_s(frame: bytes, target: np.ndarray) -> float:
    source = np.frombuffer(frame, np.uint8)
    begin_s = monotonic_s()
    np.copyto(target, source)
    return monotonic_s() - begin_s


def _row(size: int, samples: Samples) -> dict[str, Any]:
    row: dict[str, Any] = {"bytes": size}
    for column in COLUMNS:
        taken_s = sorted(samples[column, size])
        row[f"{column}_us"] = round(statistics.median(taken_s) * 1e6, 1)
        row[f"{column}_p99_us"] = round(taken_s[len(taken_s) * 99 // 100] * 1e6, 1)
    return row


def targets(rows: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Each thing that is asked, what the medians say, and whether that is enough."""
    asked = []
    for row in rows:
        size = row["bytes"]
        if size >= COPY_BYTES_MIN:
            measured = round(row["shm_us"] / row["memcpy_us"], 2)
            asked.append(
                {
                    "target": f"shm takes at most {COPY_RATIO_MAX} x memcpy",
                    "bytes": size,
                    "measured": measured,
                    "met": measured <= COPY_RATIO_MAX,
                }
            )
        if size == NATS_BYTES:
            measured = round(row["nats_us"] / row["shm_us"], 2)
            asked.append(
                {
                    "target": f"nats takes at least {NATS_RATIO_MIN} x shm",
                    "bytes": size,
                    "measured": measured,
                    "met": measured >= NATS_RATIO_MIN,
                }
            )
    return asked
