"""KV transfer between a prefill DP and a decode DP, paired by one DistFlow instance (P098-P103).

prefill DP --RegisterTransfer--> DistFlow <--OfferReceive-- decode DP
prefill DP <----PullKv---------- DistFlow
prefill DP ====KvBlock (UB frames)===============> decode DP
prefill DP <---BlocksMissing (after a while)------ decode DP
                                 DistFlow <--ReceiveDone--- decode DP
prefill DP <--TransferComplete-- DistFlow --TransferComplete--> decode DP
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from libs.wire.registry import Limit, message


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


@message("offer_receive")
@dataclass(frozen=True, slots=True)
class OfferReceive:
    """The decode DP has reserved blocks and is ready to receive: the asynchronous RECV of P101.

    `generation` tags every frame of this attempt; a frame with another generation is never written.
    """

    transfer_id: str
    request_id: str
    target_dp: str
    target_die: int
    blocks: int
    generation: int


@message("pull_kv")
@dataclass(frozen=True, slots=True)
class PullKv:
    """Both sides are there: the prefill DP may send."""

    transfer_id: str
    target_dp: str
    target_die: int
    generation: int


@message("kv_block", limit=Limit.BULK)
@dataclass(frozen=True, slots=True, eq=False)
class KvBlock:
    """One block of KV, all layers: `rows` is `[layers, block_size, width]` float32.

    `index` counts the request's blocks from 0; `of` is their number; `checksum` covers the rows.
    """

    transfer_id: str
    generation: int
    index: int
    of: int
    checksum: int
    rows: np.ndarray


@message("blocks_missing")
@dataclass(frozen=True, slots=True)
class BlocksMissing:
    """A negative acknowledgement: these blocks have not come; send them again.

    A frame can be lost or arrive damaged, and then nobody else would ever notice.
    """

    transfer_id: str
    generation: int
    indices: tuple[int, ...]


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
