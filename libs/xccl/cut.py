"""Into which pieces a message is cut, and which AIV core sends which of them.

    pieces   equal, short, and as many for each core as for the next while cores are the bottleneck
    lanes    one per AIV core, no more than the message can keep busy

The cut decides how latency depends on the number of cores: the link begins to carry when the first
piece is loaded and all but stored, and the receiver has it all when the last one is copied.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

from libs.xccl.p2p_cost import FILLING_AIVS
from libs.xccl.ring import BLOCK_BYTES

#: A share below this is not worth a further lane, nor its two more fields to write (assumed).
LANE_BYTES_MIN = 8 * 1024
#: The longest piece that an AIV core stores at once (assumed). Short, so that filling and draining
#: the pipeline is little of the whole; but the eight slots of a lane must hold what one core stores
#: (36 GB/s) in the 4.1 us until an ACK, and the 64 frames that may be under way between two dies
#: what the link carries meanwhile.
PIECE_BYTES = 22 * 1024


@dataclass(frozen=True, slots=True)
class Chunk:
    """`nbytes` at `offset` of the message."""

    offset: int
    nbytes: int


def cut(nbytes: int, lanes_max: int, piece_bytes_max: int) -> tuple[tuple[Chunk, ...], ...]:
    """Divide a message into equal pieces, and deal them to lanes: each a run, the first ones longer
    by one if it does not come out even. There is always a piece, if need be an empty one.

    Lanes are no more than the message can keep busy. As long as the cores are slower than the link
    each gets as many pieces as the next, or all would wait for the one with most. Beyond that the
    link is what they wait for, and the pieces stay the same however many share them. With more
    lanes a piece is never longer, so a further core never makes a message slower.
    """
    assert piece_bytes_max % BLOCK_BYTES == 0, piece_bytes_max
    lanes = max(1, min(lanes_max, nbytes // min(LANE_BYTES_MIN, piece_bytes_max)))
    blocks = max(1, -(-nbytes // BLOCK_BYTES))
    count = max(1, -(-nbytes // piece_bytes_max))
    for sharing in range(1, min(lanes, FILLING_AIVS) + 1):
        count = -(-count // sharing) * sharing
    count = min(count, blocks)
    bounds = [blocks * number // count * BLOCK_BYTES for number in range(count)]
    pieces = [Chunk(begin, end - begin) for begin, end in pairwise((*bounds, nbytes))]
    lanes = min(lanes, count)
    each, over = divmod(count, lanes)
    starts = [lane * each + min(lane, over) for lane in range(lanes)]
    return tuple(tuple(pieces[begin:end]) for begin, end in pairwise((*starts, count)))
