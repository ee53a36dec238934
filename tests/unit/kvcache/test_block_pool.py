from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from libs.errors import Backpressure
from libs.kvcache.block_pool import BlockPool, BlockState

BLOCKS = 12
OWNERS = st.sampled_from([f"r{i}" for i in range(6)])
STATES = st.sampled_from([state for state in BlockState if state is not BlockState.FREE])


def test_rows_are_rounded_up_to_whole_blocks() -> None:
    pool = BlockPool(4, 16)
    assert [pool.blocks_for(rows) for rows in (1, 16, 17)] == [1, 1, 2]


def test_allocating_more_than_is_free_is_back_pressure_and_takes_nothing() -> None:
    pool = BlockPool(4, 16)
    pool.allocate("r1", 3)
    with pytest.raises(Backpressure, match="2 KV blocks wanted, 1 free"):
        pool.allocate("r2", 2)
    assert pool.free_blocks == 1
    assert pool.get("r2") is None


def test_an_owner_cannot_allocate_twice() -> None:
    pool = BlockPool(4, 16)
    pool.allocate("r1", 1)
    with pytest.raises(AssertionError, match="r1 already owns blocks"):
        pool.allocate("r1", 1)


def test_the_block_freed_last_is_reused_first() -> None:
    pool = BlockPool(8, 16)
    pool.allocate("r1", 2)
    second = pool.allocate("r2", 2).blocks
    pool.release("r2")
    assert pool.allocate("r3", 2).blocks == second


def test_a_write_of_an_earlier_generation_is_fenced_off() -> None:
    pool = BlockPool(4, 16)
    old = pool.allocate("r1", 4, BlockState.IN_TRANSFER).generation
    pool.release("r1")
    new = pool.allocate("r1", 4, BlockState.IN_TRANSFER).generation
    assert pool.accepts("r1", new)
    assert not pool.accepts("r1", old)


def test_a_remote_write_lands_only_in_blocks_in_transfer() -> None:
    pool = BlockPool(4, 16)
    generation = pool.allocate("r1", 4, BlockState.IN_TRANSFER).generation
    pool.move("r1", BlockState.HELD)
    assert not pool.accepts("r1", generation)
    assert not pool.accepts("nobody", generation)


def test_blocks_become_free_by_release_alone() -> None:
    pool = BlockPool(4, 16)
    pool.allocate("r1", 1)
    with pytest.raises(AssertionError, match="use release"):
        pool.move("r1", BlockState.FREE)


def test_validate_notices_a_block_with_two_owners() -> None:
    pool = BlockPool(4, 16)
    first = pool.allocate("r1", 1)
    second = pool.allocate("r2", 1)
    second.blocks = first.blocks
    with pytest.raises(AssertionError, match="lost or owned twice"):
        pool.validate()


class PoolMachine(RuleBasedStateMachine):
    """Any sequence of allocations, moves and releases keeps every block in exactly one place."""

    def __init__(self) -> None:
        super().__init__()
        self.pool = BlockPool(BLOCKS, 16)
        self.owned: dict[str, tuple[int, BlockState]] = {}
        self.last_generation = 0

    @rule(owner=OWNERS, blocks=st.integers(1, BLOCKS + 1), state=STATES)
    def allocate(self, owner: str, blocks: int, state: BlockState) -> None:
        if owner in self.owned:
            return
        if blocks > BLOCKS - sum(count for count, _ in self.owned.values()):
            with pytest.raises(Backpressure):
                self.pool.allocate(owner, blocks, state)
            return
        allocation = self.pool.allocate(owner, blocks, state)
        assert len(set(allocation.blocks)) == blocks
        assert allocation.generation > self.last_generation, "generations only grow"
        self.last_generation = allocation.generation
        self.owned[owner] = (blocks, state)

    @precondition(lambda self: bool(self.owned))
    @rule(data=st.data(), state=STATES)
    def move(self, data: st.DataObject, state: BlockState) -> None:
        owner = data.draw(st.sampled_from(sorted(self.owned)))
        self.pool.move(owner, state)
        self.owned[owner] = (self.owned[owner][0], state)

    @rule(owner=OWNERS)
    def release(self, owner: str) -> None:
        expected = self.owned.pop(owner, (0, BlockState.FREE))[0]
        assert self.pool.release(owner) == expected

    @rule(owner=OWNERS, generation=st.integers(0, 20))
    def accepts_exactly_the_current_transfer(self, owner: str, generation: int) -> None:
        allocation = self.pool.get(owner)
        current = allocation is not None and allocation.generation == generation
        receiving = self.owned.get(owner, (0, None))[1] is BlockState.IN_TRANSFER
        assert self.pool.accepts(owner, generation) == (current and receiving)

    @invariant()
    def counts_agree_with_the_model(self) -> None:
        self.pool.validate()
        counts = {state: self.pool.count(state) for state in BlockState}
        assert sum(counts.values()) == BLOCKS
        for state in BlockState:
            if state is not BlockState.FREE:
                modelled = sum(n for n, where in self.owned.values() if where is state)
                assert counts[state] == modelled


TestPool = PoolMachine.TestCase
TestPool.settings = settings(max_examples=40, stateful_step_count=25, deadline=None)
