"""The state of a prefill DP group as data: its settings, its requests with their stage.

    state \\ event | blocks free  computed   bound        pull      complete/failed/cancel
    --------------+------------------------------------------------------------------
    QUEUED        | RUNNING                                         gone
    RUNNING       |              LEASED                             gone at its end
    LEASED        |                         LEASED       SENDING    gone
    SENDING       |                                                 gone

Any stage may also end by failure; blocks are freed at once unless the executor still writes them
(RUNNING), and then at its end.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from libs.actor import Effect, Send
from libs.config.plan import output_of
from libs.fabric.profiles import ModelProfile
from libs.wire import subjects
from libs.wire.request import FirstToken, PrefillTiming, RequestSpec, TransferManifest
from libs.wire.tokens import CloseStream, OpenStream, RequestTiming, TokenRow, TokensCommitted
from libs.wire.transfer import RegisterTransfer


class Stage(Enum):
    """Where a request is."""

    QUEUED = "queued"
    RUNNING = "running"
    LEASED = "leased"
    SENDING = "sending"


@dataclass(slots=True)
class PrefillRequest:
    """One request at this DP group."""

    spec: RequestSpec
    job_executor: str
    sequence: int
    ready_at_ns: int
    stage: Stage = Stage.QUEUED
    block_ids: tuple[int, ...] = ()
    cached_tokens: int = 0
    started_at_ns: int = 0
    distflow: str = ""
    leaving: str | None = None

    @property
    def transfer_id(self) -> str:
        """The transfer of this request's KV; one attempt per request."""
        return f"kv-{self.spec.request_id}"


@dataclass(frozen=True, slots=True)
class PrefillConfig:
    """Identity and limits of one prefill DP group; `block_bytes` is a KV block, all layers.

    `host_blocks` evicted blocks of the prefix cache live on in host memory.
    """

    name: str
    te: str
    die: int
    profile: ModelProfile
    num_layers: int
    num_blocks: int
    block_size: int
    block_bytes: int
    queue_max: int
    epoch: int = 1
    life: int = 1
    prefix_cache: bool = True
    host_blocks: int = 0


def manifest_of(config: PrefillConfig, request: PrefillRequest) -> TransferManifest:
    """What the decode side needs to fetch the KV; the job executor fills in the DistFlow name."""
    return TransferManifest(
        request.transfer_id, "", config.name, config.die, request.spec.prompt_tokens,
        len(request.block_ids), config.num_layers,
    )  # fmt: skip


def register_of(config: PrefillConfig, request: PrefillRequest) -> RegisterTransfer:
    """The metadata by which DistFlow pairs the transfer (P098)."""
    return RegisterTransfer(
        request.transfer_id, request.spec.request_id, config.name, config.die,
        request.spec.prompt_tokens, len(request.block_ids),
    )  # fmt: skip


def first_token_effects(
    config: PrefillConfig,
    request: PrefillRequest,
    first: FirstToken,
    timing: PrefillTiming,
    reason: str | None,
) -> list[Effect]:
    """The first token on its way to the client, through this group's own output process."""
    spec, at_ns = request.spec, timing.finished_at_ns
    output = subjects.inbox(output_of(config.name))
    opened = OpenStream(
        spec.request_id, config.name, spec.gateway, spec.output, RequestTiming(timing),
        spec.budget_ns,
    )  # fmt: skip
    row = TokenRow(spec.request_id, 0, first.token, at_ns, reason, first.logprob, first.top)
    committed = TokensCommitted(config.name, 0, (row,))
    effects: list[Effect] = [Send(output, opened, at_ns), Send(output, committed, at_ns)]
    if reason is None:
        # The stream goes on at the decode DP; the parser here has done its part.
        effects.append(Send(output, CloseStream(spec.request_id), at_ns))
    return effects
