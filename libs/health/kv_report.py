"""What a heartbeat says about a block pool."""

from __future__ import annotations

from libs.kvcache.block_pool import BlockPool, BlockState
from libs.wire.control import KvCounts


def kv_counts(pool: BlockPool) -> KvCounts:
    """Where the blocks of `pool` are; the parts always sum to the total."""
    counts = KvCounts(
        total=pool.num_blocks,
        free=pool.count(BlockState.FREE),
        held=pool.count(BlockState.HELD),
        leased=pool.count(BlockState.LEASED),
        in_transfer=pool.count(BlockState.IN_TRANSFER),
        quarantined=pool.count(BlockState.QUARANTINED),
    )
    parts = counts.free + counts.held + counts.leased + counts.in_transfer + counts.quarantined
    assert parts == counts.total, counts
    return counts
