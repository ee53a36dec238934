"""Requests and the messages around them, with defaults that only differ where a test cares."""

from __future__ import annotations

from typing import Any

import numpy as np

from libs import units
from libs.model.sampling import SamplingParams
from libs.wire.request import (
    AssignDecode,
    AssignPrefill,
    FirstToken,
    OutputOptions,
    PrefillDone,
    PrefillTiming,
    RequestSpec,
    TransferManifest,
)

END_TOKEN = 1
RAW = OutputOptions(raw=True, reasoning_open=False)


def make_spec(request_id: str = "r1", prompt: int = 20, **other: Any) -> RequestSpec:
    """A request with a prompt of `prompt` tokens; greedy, ended by `END_TOKEN`."""
    fields: dict[str, Any] = {
        "choice": 0,
        "prompt_ids": np.arange(2, 2 + prompt, dtype=np.int32),
        "sampling": SamplingParams(temperature=0.0, seed=1, stop_token_ids=(END_TOKEN,)),
        "max_tokens": 8,
        "output": RAW,
        "gateway": "gateway.0",
        "submitted_at_ns": 0,
        "budget_ns": units.s(300),
    }
    return RequestSpec(request_id=request_id, **(fields | other))


def assign_prefill(request_id: str = "r1", prompt: int = 20, **other: Any) -> AssignPrefill:
    """A prompt for a prefill DP."""
    return AssignPrefill(make_spec(request_id, prompt, **other), "job_executor.0")


def make_manifest(
    request_id: str = "r1", prompt: int = 20, block_size: int = 16
) -> TransferManifest:
    """Where the KV of a prompt waits."""
    return TransferManifest(
        transfer_id=f"kv-{request_id}",
        distflow="distflow.p0.d0",
        source_dp="prefill_te.p0.dp0",
        source_die=0,
        rows=prompt,
        blocks=-(-prompt // block_size),
        layers=3,
    )


TIMING = PrefillTiming("p0", "prefill_te.p0.dp0", 0, units.ms(100))
FIRST = FirstToken(token=40, logprob=0.0)


def assign_decode(request_id: str = "r1", prompt: int = 20, **other: Any) -> AssignDecode:
    """A prefilled request for a decode DP."""
    spec = make_spec(request_id, prompt, **other)
    return AssignDecode(spec, "job_executor.0", make_manifest(request_id, prompt), FIRST, TIMING)


def prefill_done(request_id: str = "r1", finish_reason: str | None = None) -> PrefillDone:
    """A prefill DP reports its prompt."""
    return PrefillDone(request_id, make_manifest(request_id), FIRST, TIMING, finish_reason)
