"""A request's way through the pod: submit, assign, report, cancel.

gateway --Submit--> JE --AssignPrefill--> TE-shell --AssignPrefill--> prefill DP
                    JE <--PrefillDone---------------------------------- prefill DP
                    JE --BindTransfer---------------------------------> prefill DP
                    JE --AssignDecode--> TE-shell --AssignDecode--> decode DP
                    JE <--RequestFinished------------------------------ decode DP
                    JE --Cancel--> TE-shells --Cancel--> DPs
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from libs.model.sampling import SamplingParams
from libs.wire.registry import Limit, message


@dataclass(frozen=True, slots=True)
class OutputOptions:
    """What the output process needs to turn tokens into OpenAI deltas.

    `reasoning_open` says that the prompt already ends inside a `<think>` block; `raw` asks for
    plain text (the completions API), without reasoning or tool-call parsing.
    """

    raw: bool
    reasoning_open: bool
    stops: tuple[str, ...] = ()
    logprobs: bool = False


@dataclass(frozen=True, slots=True, eq=False)
class RequestSpec:
    """Everything any leg needs to know about one choice of one request.

    `prompt_ids` is `[prompt_tokens]` int32; `sampling` always carries a seed; `gateway` the actor
    that streams to the client; `submitted_at_ns` its emulated arrival; `budget_ns` how long any
    leg may hold the request. Only prompts of equal `cache_salt` share cached KV.
    """

    request_id: str
    choice: int
    prompt_ids: np.ndarray
    sampling: SamplingParams
    max_tokens: int
    output: OutputOptions
    gateway: str
    submitted_at_ns: int
    budget_ns: int
    cache_salt: str = ""

    @property
    def prompt_tokens(self) -> int:
        """Length of the prompt."""
        return int(self.prompt_ids.shape[0])

    @property
    def max_total_tokens(self) -> int:
        """The most KV rows the request can ever need."""
        return self.prompt_tokens + self.max_tokens


@dataclass(frozen=True, slots=True)
class PrefillTiming:
    """When prefill happened, on the emulated timeline, and who did it.

    `cached_tokens` of the prompt were found in the prefix cache and not computed.
    """

    prefill_te: str
    prefill_dp: str
    started_at_ns: int
    finished_at_ns: int
    cached_tokens: int = 0


@dataclass(frozen=True, slots=True)
class TransferManifest:
    """What a decode DP needs to fetch a request's KV: who has it, how much, and how to check it.

    `rows` counts the KV rows (one per prompt token), `layers` the layers each block carries.
    """

    transfer_id: str
    distflow: str
    source_dp: str
    source_die: int
    rows: int
    blocks: int
    layers: int


@dataclass(frozen=True, slots=True)
class FirstToken:
    """The token that prefill sampled, with its log probabilities when asked for."""

    token: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()


@message("submit", limit=Limit.BULK)
@dataclass(frozen=True, slots=True, eq=False)
class Submit:
    """A new request, from a gateway to any job executor."""

    spec: RequestSpec


@message("accepted")
@dataclass(frozen=True, slots=True)
class Accepted:
    """A job executor owns the request from now on; cancellations go to it."""

    request_id: str
    job_executor: str


@message("request_failed")
@dataclass(frozen=True, slots=True)
class RequestFailed:
    """The request ended without an answer; `definite` says that nothing of it happened."""

    request_id: str
    code: str
    reason: str
    definite: bool
    stage: str


@message("assign_prefill", limit=Limit.BULK)
@dataclass(frozen=True, slots=True, eq=False)
class AssignPrefill:
    """Run the prompt; the TE-shell passes it on to one of its DP groups."""

    spec: RequestSpec
    job_executor: str


@message("prefill_done")
@dataclass(frozen=True, slots=True)
class PrefillDone:
    """The prompt's KV is ready at the prefill DP and the first token is known.

    `finish_reason` is set when the first token already ends the request.
    """

    request_id: str
    manifest: TransferManifest
    first: FirstToken
    timing: PrefillTiming
    finish_reason: str | None = None


@message("bind_transfer")
@dataclass(frozen=True, slots=True)
class BindTransfer:
    """Tells the prefill DP which DistFlow instance moves the KV: register the transfer there."""

    request_id: str
    transfer_id: str
    distflow: str


@message("assign_decode", limit=Limit.BULK)
@dataclass(frozen=True, slots=True, eq=False)
class AssignDecode:
    """Continue the request at a decode TE; the TE-shell routes it to one DP group (P059)."""

    spec: RequestSpec
    job_executor: str
    manifest: TransferManifest
    first: FirstToken
    timing: PrefillTiming


@message("leg_failed")
@dataclass(frozen=True, slots=True)
class LegFailed:
    """One leg gave up; the job executor cancels the sibling and tells the gateway."""

    request_id: str
    leg: str
    code: str
    reason: str
    definite: bool


@message("request_finished")
@dataclass(frozen=True, slots=True)
class RequestFinished:
    """A DP group is done with the request and holds nothing of it any more."""

    request_id: str
    dp: str
    reason: str
    output_tokens: int


@message("cancel")
@dataclass(frozen=True, slots=True)
class Cancel:
    """Stop the request and free what it holds; unknown ids are fine."""

    request_id: str
    reason: str
