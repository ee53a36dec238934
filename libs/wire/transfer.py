"""KV transfer between a prefill DP and a decode DP, paired by one DistFlow instance (P098-P103).

prefill DP --RegisterTransfer--> DistFlow <--OfferReceive-- decode DP
prefill DP <----PullKv---------- DistFlow
prefill DP ====XCCL, straight into its memory====> decode DP
                                 DistFlow <--ReceiveDone--- decode DP
prefill DP <--TransferComplete-- DistFlow --TransferComplete--> decode DP
"""

from __future__ import annotations

from dataclasses import dataclass

from libs.wire.registry import message


@message("register_transfer")
@dataclass(frozen=True, slots=True)
class RegisterTransfer:
    """The prefill DP owns `blocks` blocks of KV and offers them; metadata only (P098)."""

    transfer_id: str
    request_id: str
    source_dp: str
    source_die: int
    rows: int
    blocks: int


@dataclass(frozen=True, slots=True)
class KvGoal:
    """Where the KV of one request may be written: a registered range of a die's memory.

    `event` names the message on its flow, `generation` the range in its present use, `life` the
    process that has registered it. A write with another generation or life never lands.
    """

    die: int
    life: int
    event: int
    offset: int
    nbytes: int
    generation: int


@message("offer_receive")
@dataclass(frozen=True, slots=True)
class OfferReceive:
    """The decode DP has reserved blocks and posted the receive: the asynchronous RECV of P101."""

    transfer_id: str
    request_id: str
    target_dp: str
    blocks: int
    goal: KvGoal


@message("pull_kv")
@dataclass(frozen=True, slots=True)
class PullKv:
    """Both sides are there: the prefill DP may send."""

    transfer_id: str
    target_dp: str
    goal: KvGoal


@message("receive_done")
@dataclass(frozen=True, slots=True)
class ReceiveDone:
    """Every block arrived and matched its checksum; the decode DP owns the KV now."""

    transfer_id: str
    request_id: str
    target_dp: str


@message("transfer_complete")
@dataclass(frozen=True, slots=True)
class TransferComplete:
    """An entry of the completion queue, for both sides (P103)."""

    transfer_id: str
    request_id: str


@message("transfer_failed")
@dataclass(frozen=True, slots=True)
class TransferFailure:
    """The transfer ended without a completion; a negative acknowledgement for both sides."""

    transfer_id: str
    request_id: str
    reason: str


@message("abort_transfer")
@dataclass(frozen=True, slots=True)
class AbortTransfer:
    """One side gives up: DistFlow forgets the transfer and tells the other."""

    transfer_id: str
    request_id: str
    side: str
    reason: str
