"""A fixed pool of KV blocks with one owner per block and exact accounting.

    free --allocate--> held --lease--> leased --release--> free
                        |  ^
            (receiving) v  | commit
                     in_transfer

`held` blocks are read by the owner's iterations, `leased` ones belong to a prefill DP until the
transfer completes, `in_transfer` ones are being written by a remote die. Each block has a
generation that grows whenever the block changes hands, so that a write meant for an earlier owner
is recognised and dropped instead of landing in somebody else's KV.

Invariant: free + held + leased + in_transfer + quarantined = total, and every block is in one
place.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from libs.errors import Backpressure


class BlockState(Enum):
    """Where a block is."""

    FREE = "free"
    HELD = "held"
    LEASED = "leased"
    IN_TRANSFER = "in_transfer"
    QUARANTINED = "quarantined"


@dataclass(slots=True)
class Allocation:
    """The blocks of one owner; all of them are in the same state."""

    owner: str
    blocks: tuple[int, ...]
    state: BlockState
    generation: int


class BlockPool:
    """Allocates blocks to owners; an owner has at most one allocation."""

    def __init__(self, num_blocks: int, block_size: int) -> None:
        assert num_blocks > 0, num_blocks
        assert block_size > 0, block_size
        self.num_blocks = num_blocks
        self.block_size = block_size
        # A stack: the block freed last is reused first, which is what exposes a late write soonest.
        self._free = list(range(num_blocks - 1, -1, -1))
        self._allocations: dict[str, Allocation] = {}
        self._generation = 0

    def blocks_for(self, rows: int) -> int:
        """Blocks that hold `rows` KV rows."""
        return -(-rows // self.block_size)

    @property
    def free_blocks(self) -> int:
        """Blocks that can be allocated now."""
        return len(self._free)

    def can_allocate(self, blocks: int) -> bool:
        """Whether `allocate` would succeed."""
        return blocks <= len(self._free)

    def allocate(self, owner: str, blocks: int, state: BlockState = BlockState.HELD) -> Allocation:
        """Give `blocks` blocks to `owner`; raises `Backpressure` when they are not there."""
        assert owner not in self._allocations, f"{owner} already owns blocks"
        if not self.can_allocate(blocks):
            raise Backpressure(f"{blocks} KV blocks wanted, {len(self._free)} free")
        self._generation += 1
        taken = tuple(self._free.pop() for _ in range(blocks))
        allocation = Allocation(owner, taken, state, self._generation)
        self._allocations[owner] = allocation
        return allocation

    def get(self, owner: str) -> Allocation | None:
        """The allocation of `owner`, if any."""
        return self._allocations.get(owner)

    def move(self, owner: str, state: BlockState) -> None:
        """Change the state of an owner's blocks (`held` to `leased`, `in_transfer` to `held`)."""
        assert state is not BlockState.FREE, "use release"
        self._allocations[owner].state = state

    def release(self, owner: str) -> int:
        """Free everything `owner` has; freeing nothing is fine. Returns the number of blocks."""
        allocation = self._allocations.pop(owner, None)
        if allocation is None:
            return 0
        self._free.extend(reversed(allocation.blocks))
        return len(allocation.blocks)

    def accepts(self, owner: str, generation: int) -> bool:
        """The fence: may a remote write of `generation` still land in the blocks of `owner`?"""
        allocation = self._allocations.get(owner)
        return (
            allocation is not None
            and allocation.state is BlockState.IN_TRANSFER
            and allocation.generation == generation
        )

    def count(self, state: BlockState) -> int:
        """Blocks in `state`."""
        if state is BlockState.FREE:
            return len(self._free)
        return sum(len(a.blocks) for a in self._allocations.values() if a.state is state)

    def validate(self) -> None:
        """Every block is in exactly one place."""
        seen = list(self._free)
        for allocation in self._allocations.values():
            seen += allocation.blocks
        assert sorted(seen) == list(range(self.num_blocks)), "a block is lost or owned twice"
