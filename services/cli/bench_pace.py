"""`xds bench pace`: does a client see the time that the pod charges?

N streams at once against the running pod; per stream the mean time between tokens as the client's
clock saw it, divided by the pod's own account of it (emulated, times the pace). 1.0 is perfect;
above it the machine could not keep up. A benchmark, not a test: it says as much about the machine
as about the pod.
"""

from __future__ import annotations

import asyncio
import statistics
from typing import Any

from libs.clock.pod_clock import monotonic_s
from services.cli.client import PodClient


async def bench_pace(base_url: str, pace: float, *, streams: int, tokens: int) -> dict[str, Any]:
    """Measure; `ratio` is over all streams, `rows` holds each."""
    async with PodClient(base_url) as client:
        rows = await asyncio.gather(*(_one(client, i, tokens) for i in range(streams)))
    seen_ms = statistics.fmean(row["client_tpot_ms"] for row in rows)
    charged_ms = statistics.fmean(row["emulated_tpot_ms"] for row in rows)
    return {
        "streams": streams,
        "tokens": tokens,
        "pace": pace,
        "client_tpot_ms": round(seen_ms, 3),
        "emulated_tpot_ms": round(charged_ms, 3),
        "ratio": round(seen_ms / (charged_ms * pace), 4) if pace else None,
        "rows": rows,
    }


async def _one(client: PodClient, seed: int, tokens: int) -> dict[str, float]:
    body = {
        "model": "xds-tiny",
        "prompt": "Emma was not at all",
        "max_tokens": tokens,
        "temperature": 0.8,
        "seed": seed,
        "ignore_eos": True,
        "return_token_ids": True,
    }
    stamps_s: list[float] = []
    account: dict[str, Any] = {}
    async for event in client.stream("/v1/completions", body):
        account = event.get("xds") or account
        if any(choice.get("token_ids") for choice in event.get("choices", ())):
            stamps_s.append(monotonic_s())
    assert len(stamps_s) == tokens, "every token arrives in a chunk of its own"
    gap_ms = (stamps_s[-1] - stamps_s[0]) / (tokens - 1) * 1e3
    return {
        "client_tpot_ms": round(gap_ms, 3),
        "emulated_tpot_ms": round(account["emulated_ms"]["per_token"], 3),
    }
