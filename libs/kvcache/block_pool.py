"""A fixed pool of KV blocks with one owner per block and exact accounting.

    free --allocate--> held --lease--> leased --release--> free
                        |  ^
            (receiving) v  | commit
                     in_transfer

`held` blocks are read by the owner's iterations, `leased` ones belong to a prefill DP until the
transfer completes, `in_transfer` ones are being read or written by a remote die. Each allocation
has a generation that grows whenever blocks change hands, so that a write meant for an earlier owner
is recognised and dropped instead of landing in somebody else's KV.

A block that several requests read is owned by the cache, and the requests hold references:

    held --share--> the cache's, referenced --last release--> idle --reclaim--> free

The blocks of an allocation are the cache's first, then its own. A shared block is in the state of
whoever uses it, counted once; an idle one counts as free: it can be given out at once, and what it
holds is forgotten then. Nobody writes to a shared block, so no remote write is accepted for an
owner that refers to one.

Invariant: free + held + leased + in_transfer + quarantined = total, and every block is in one
place.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
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


#: A shared block counts under the last of these that one of its users is in.
_PRECEDENCE = (
    BlockState.LEASED, BlockState.HELD, BlockState.IN_TRANSFER, BlockState.QUARANTINED,
)  # fmt: skip


@dataclass(slots=True)
class Allocation:
    """The blocks of one owner, all in the same state; the first `shared` are the cache's."""

    owner: str
    blocks: tuple[int, ...]
    state: BlockState
    generation: int
    shared: int = 0


def _nothing_cached() -> int:
    raise AssertionError("without a cache no block is idle")


class BlockPool:
    """Allocates blocks to owners; an owner has at most one allocation.

    `reclaim` is how a cache gives up one of its idle blocks, of its own choice.
    """

    def __init__(
        self, num_blocks: int, block_size: int, reclaim: Callable[[], int] = _nothing_cached
    ) -> None:
        assert num_blocks > 0, num_blocks
        assert block_size > 0, block_size
        self.num_blocks = num_blocks
        self.block_size = block_size
        self._reclaim = reclaim
        # A stack: the block freed last is reused first, which is what exposes a late write soonest.
        self._free = list(range(num_blocks - 1, -1, -1))
        self._allocations: dict[str, Allocation] = {}
        #: References to each block of the cache, and how many blocks have none.
        self._references: dict[int, int] = {}
        self._idle = 0
        self._generation = 0

    def blocks_for(self, rows: int) -> int:
        """Blocks that hold `rows` KV rows."""
        return -(-rows // self.block_size)

    @property
    def free_blocks(self) -> int:
        """Blocks that can be allocated now."""
        return len(self._free) + self._idle

    def can_allocate(self, blocks: int, shared: Sequence[int] = ()) -> bool:
        """Whether `allocate` would succeed."""
        return blocks <= self.free_blocks - sum(map(self.is_idle, shared))

    def allocate(
        self,
        owner: str,
        blocks: int,
        state: BlockState = BlockState.HELD,
        shared: Sequence[int] = (),
    ) -> Allocation:
        """Give `owner` references to `shared` and `blocks` blocks of its own behind them.

        Raises `Backpressure`, and gives nothing, when they are not there.
        """
        assert owner not in self._allocations, f"{owner} already owns blocks"
        if not self.can_allocate(blocks, shared):
            raise Backpressure(f"{blocks} KV blocks wanted, {self.free_blocks} free")
        for block in shared:  # first, so that none of them is reclaimed for the others
            self._idle -= self.is_idle(block)
            self._references[block] += 1
        while len(self._free) < blocks:
            self.forget(self._reclaim())
        self._generation += 1
        taken = tuple(self._free.pop() for _ in range(blocks))
        allocation = Allocation(owner, (*shared, *taken), state, self._generation, len(shared))
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
        for block in allocation.blocks[: allocation.shared]:
            self._references[block] -= 1
            self._idle += self.is_idle(block)
        self._free.extend(reversed(allocation.blocks[allocation.shared :]))
        return len(allocation.blocks)

    def accepts(self, owner: str, generation: int) -> bool:
        """The fence: may a remote write of `generation` still land in the blocks of `owner`?"""
        allocation = self._allocations.get(owner)
        return (
            allocation is not None
            and allocation.state is BlockState.IN_TRANSFER
            and allocation.generation == generation
            and allocation.shared == 0
        )

    # ------------------------------------------------------------ the cache's blocks

    def share(self, owner: str, blocks: int) -> None:
        """The first `blocks` blocks of `owner` are the cache's from now on; it keeps references."""
        allocation = self._allocations[owner]
        assert allocation.shared <= blocks <= len(allocation.blocks), (allocation, blocks)
        for block in allocation.blocks[allocation.shared : blocks]:
            assert block not in self._references, f"block {block} is the cache's already"
            self._references[block] = 1
        allocation.shared = blocks

    def is_idle(self, block: int) -> bool:
        """Whether `block` is the cache's and nobody refers to it."""
        return self._references.get(block) == 0

    def forget(self, block: int) -> None:
        """The cache gives up an idle block: it is free, and nobody's."""
        assert self.is_idle(block), f"block {block} is in use"
        del self._references[block]
        self._idle -= 1
        self._free.append(block)

    def cached_blocks(self) -> list[int]:
        """The blocks that the cache owns, ascending."""
        return sorted(self._references)

    # ------------------------------------------------------------ accounts

    def count(self, state: BlockState) -> int:
        """Blocks in `state`."""
        if state is BlockState.FREE:
            return self.free_blocks
        own = sum(len(a.blocks) - a.shared for a in self._allocations.values() if a.state is state)
        return own + sum(found is state for found in self._shared_states().values())

    def _shared_states(self) -> dict[int, BlockState]:
        states: dict[int, BlockState] = {}
        for allocation in self._allocations.values():
            for block in allocation.blocks[: allocation.shared]:
                other = states.get(block, allocation.state)
                states[block] = max(other, allocation.state, key=_PRECEDENCE.index)
        return states

    def validate(self) -> None:
        """Every block is in exactly one place, and references are what the allocations say."""
        seen = [*self._free, *self._references]
        references: Counter[int] = Counter()
        for allocation in self._allocations.values():
            seen += allocation.blocks[allocation.shared :]
            references.update(allocation.blocks[: allocation.shared])
        assert sorted(seen) == list(range(self.num_blocks)), "a block is lost or owned twice"
        found = {block: references[block] for block in self._references}
        assert found == self._references, "a reference is lost or counted twice"
        assert set(references) <= set(found), "a request refers to a block that is not the cache's"
        assert self._idle == list(found.values()).count(0), self._idle
