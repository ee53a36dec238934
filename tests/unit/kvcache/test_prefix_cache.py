"""RTC against a memory that remembers what was really written where."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from libs.kvcache.block_pool import BlockState
from libs.kvcache.prefix_cache import Placed, PrefixCache
from libs.kvcache.radix import LeafQueue, Node, RadixTree, keys_of

SIZE = 2


class Memory:
    """Device blocks and host slots; a cell holds (salt, all tokens up to the block's end)."""

    def __init__(self) -> None:
        self.blocks: dict[int, tuple[str, tuple[int, ...]]] = {}
        self.slots: dict[int, tuple[str, tuple[int, ...]]] = {}

    def run(self, placed: Placed, salt: str, tokens: tuple[int, ...]) -> None:
        """What an executor does with a job: fills are read first, then spills, then the rest."""
        filled = [(self.slots[slot], block) for slot, block in placed.fills]
        for block, slot in placed.spills:
            self.slots[slot] = self.blocks[block]
        for row, block in filled:
            self.blocks[block] = row
        for index in range(placed.cached, len(placed.blocks)):
            self.blocks[placed.blocks[index]] = (salt, tokens[: (index + 1) * SIZE])


class Bench:
    def __init__(self, blocks: int, *, enabled: bool = True, host: int = 0) -> None:
        self.cache = PrefixCache(blocks, SIZE, enabled=enabled, host_blocks=host)
        self.memory = Memory()

    def place(self, owner: str, text: str, salt: str = "") -> Placed:
        placed = self.cache.place(owner, salt, tokens(text))
        assert placed is not None
        self.memory.run(placed, salt, tokens(text))
        return placed

    def compute(self, owner: str, text: str, salt: str = "") -> Placed:
        """A prompt from its start to its end; its blocks are idle afterwards."""
        placed = self.place(owner, text, salt)
        self.cache.computed(owner)
        self.cache.release(owner)
        self.cache.validate()
        return placed


def tokens(text: str) -> tuple[int, ...]:
    return tuple(map(ord, text))


# ---------------------------------------------------------------- what is found


def test_a_prompt_takes_the_whole_blocks_it_shares_with_an_earlier_one() -> None:
    bench = Bench(8)
    first = bench.compute("r1", "abcde")
    second = bench.place("r2", "abcdxy")
    assert second.cached == 2
    assert second.blocks[:2] == first.blocks[:2]
    assert second.blocks[2] not in first.blocks[:2]


@pytest.mark.parametrize(("text", "cached"), [("abcd", 1), ("abcde", 2), ("abc", 1), ("ab", 0)])
def test_at_least_one_token_is_left_to_compute(text: str, cached: int) -> None:
    bench = Bench(8)
    bench.compute("r1", "abcdef")
    assert bench.place("r2", text).cached == cached


def test_a_salt_finds_nothing_of_another() -> None:
    bench = Bench(8)
    first = bench.compute("r1", "abcde", salt="one")
    second = bench.compute("r2", "abcde", salt="two")
    assert (first.cached, second.cached) == (0, 0)
    assert not set(first.blocks[:2]) & set(bench.cache.match("two", tokens("abcd")))
    assert bench.compute("r3", "abcde", salt="two").cached == 2


def test_nothing_is_found_before_it_is_computed() -> None:
    bench = Bench(8)
    bench.place("r1", "abcde")
    assert bench.place("r2", "abcde").cached == 0


def test_the_same_block_after_another_prefix_is_another_block() -> None:
    bench = Bench(8)
    bench.compute("r1", "abcde")
    assert bench.compute("r2", "xycde").cached == 0


def test_switched_off_nothing_is_kept() -> None:
    bench = Bench(8, enabled=False)
    bench.compute("r1", "abcde")
    assert bench.place("r2", "abcde").cached == 0
    assert bench.cache.pool.cached_blocks() == []


# ---------------------------------------------------------------- references and accounts


def test_a_shared_block_is_counted_once_and_in_the_state_of_its_busiest_user() -> None:
    bench = Bench(8)
    bench.place("r1", "abcde")
    bench.cache.computed("r1")
    pool = bench.cache.pool
    pool.move("r1", BlockState.LEASED)
    bench.place("r2", "abcdx")
    assert {s: pool.count(s) for s in BlockState if pool.count(s)} == {
        BlockState.FREE: 4, BlockState.LEASED: 1, BlockState.HELD: 3,
    }  # fmt: skip
    pool.move("r1", BlockState.IN_TRANSFER)
    assert pool.count(BlockState.IN_TRANSFER) == 3
    assert pool.count(BlockState.HELD) == 1


def test_cached_blocks_that_nobody_uses_count_as_free_and_can_all_be_had() -> None:
    bench = Bench(4)
    bench.compute("r1", "abcdefgh")
    assert bench.cache.pool.free_blocks == 4
    assert bench.place("r2", "stuvwxyz").cached == 0
    assert bench.cache.match("", tokens("abcdefgh")) == ()


def test_a_block_in_use_is_never_reclaimed() -> None:
    bench = Bench(4)
    bench.place("r1", "abcd")
    bench.cache.computed("r1")
    bench.compute("r2", "uvwx")
    assert bench.cache.place("r3", "", tokens("123456")) is None
    assert bench.cache.match("", tokens("uvwx")), "a refusal evicts nothing"
    assert bench.place("r4", "1234").cached == 0
    assert len(bench.cache.match("", tokens("abcd"))) == 2


def test_the_prefix_a_prompt_is_about_to_use_does_not_make_room_for_it() -> None:
    bench = Bench(4)
    bench.compute("r1", "abcdef")
    placed = bench.place("r2", "abcdefgh")
    assert placed.cached == 3
    assert len(set(placed.blocks)) == 4


def test_what_was_used_longest_ago_goes_first_and_leaves_before_their_prefix() -> None:
    bench = Bench(6)
    bench.compute("old", "abcd")
    bench.compute("young", "uvwx")
    bench.compute("again", "abcde")  # "abcd" is younger now
    bench.place("large", "123456")
    assert len(bench.cache.match("", tokens("abcd"))) == 2
    assert len(bench.cache.match("", tokens("uvwx"))) == 1


def test_a_prefix_is_as_young_as_the_last_request_that_let_go_of_it() -> None:
    bench = Bench(6)
    bench.place("long", "abcd")
    bench.cache.computed("long")
    bench.compute("short", "uvwx")
    bench.cache.release("long")
    bench.place("large", "123456")
    assert len(bench.cache.match("", tokens("abcd"))) == 2


def test_a_prompt_computed_twice_keeps_its_second_copy_to_itself() -> None:
    bench = Bench(8)
    bench.place("r1", "abcd")
    bench.cache.computed("r1")
    second = bench.place("r2", "abcd")  # its last block is computed again
    bench.cache.computed("r2")
    assert second.blocks[1] not in bench.cache.pool.cached_blocks()
    assert bench.cache.release("r2") == 2
    bench.cache.validate()


def test_no_remote_write_may_land_in_the_blocks_of_one_that_shares_them() -> None:
    bench = Bench(8)
    bench.compute("r1", "abcde")
    bench.place("r2", "abcde")
    pool = bench.cache.pool
    pool.move("r2", BlockState.IN_TRANSFER)
    allocation = pool.get("r2")
    assert allocation is not None
    assert not pool.accepts("r2", allocation.generation)


def test_a_block_in_use_cannot_be_forgotten() -> None:
    bench = Bench(8)
    placed = bench.place("r1", "abcd")
    bench.cache.computed("r1")
    with pytest.raises(AssertionError, match="is in use"):
        bench.cache.pool.forget(placed.blocks[0])


def test_validate_notices_a_lost_reference() -> None:
    bench = Bench(8)
    placed = bench.place("r1", "abcd")
    bench.cache.computed("r1")
    bench.cache.pool._references[placed.blocks[0]] = 2
    with pytest.raises(AssertionError, match="reference is lost"):
        bench.cache.validate()


# ---------------------------------------------------------------- host memory


def test_what_is_evicted_lives_on_in_host_memory_and_comes_back_by_a_copy() -> None:
    bench = Bench(3, host=3)
    bench.compute("r1", "abcd")
    other = bench.compute("r2", "uvwxyz")
    assert len(other.spills) == 2
    assert bench.cache.match("", tokens("abcd")) == ()
    back = bench.place("r3", "abcde")
    assert (back.cached, len(back.fills)) == (2, 2)
    assert bench.memory.blocks[back.blocks[1]] == ("", tokens("abcd"))


def test_full_host_memory_forgets_what_was_used_longest_ago() -> None:
    bench = Bench(2, host=2)
    bench.compute("r1", "abcd")
    bench.compute("r2", "uvwx")
    bench.compute("r3", "1234")
    assert bench.compute("r4", "uvwxy"[:4]).cached == 1
    assert bench.compute("r5", "abcd").cached == 0


def test_a_full_host_and_a_full_pool_change_places() -> None:
    bench = Bench(2, host=2)
    bench.compute("r1", "abcd")
    bench.compute("r2", "uvwx")
    back = bench.place("r3", "abc")
    assert len(back.fills) == 1
    assert {slot for slot, _ in back.fills} & {slot for _, slot in back.spills}
    assert bench.memory.blocks[back.blocks[0]] == ("", tokens("ab"))


def test_a_job_that_failed_takes_back_what_it_was_to_move() -> None:
    bench = Bench(3, host=4)
    bench.compute("r1", "abcd")
    bench.compute("r2", "uvwxyz")
    failed = bench.cache.place("r3", "", tokens("abcde"))  # and is never run
    assert failed is not None
    assert failed.fills
    assert failed.spills
    bench.cache.abandon("r3")
    bench.cache.validate()
    assert bench.cache.pool.free_blocks == 3
    assert bench.place("r4", "abcde").cached == 0


def test_rows_computed_again_replace_their_copy_in_host_memory() -> None:
    bench = Bench(2, host=4)
    bench.compute("r1", "abcd")
    bench.compute("r2", "uvwx")
    placed = bench.place("r3", "abcd")  # the second block is on the host, and is computed
    bench.cache.computed("r3")
    assert bench.cache.match("", tokens("abcd")) == placed.blocks
    bench.cache.validate()


# ---------------------------------------------------------------- the tree and its queue


def test_a_tree_without_prompts_has_no_roots() -> None:
    tree = RadixTree()
    top = tree.add("salt", None, b"ab")
    below = tree.add("salt", top, b"cd")
    with pytest.raises(AssertionError, match="no prefix"):
        tree.remove(top)
    tree.remove(below)
    tree.remove(top)
    assert list(tree.nodes()) == []
    assert tree._roots == {}


def test_edges_are_whole_blocks_of_exact_tokens() -> None:
    assert len(keys_of((1, 2, 3, 4, 5), SIZE)) == 2
    assert keys_of((1, 2), SIZE) != keys_of((1, 3), SIZE)


def test_the_queue_stays_bounded_however_often_a_leaf_is_used() -> None:
    node = Node(b"", None, slot=0)
    queue = LeafQueue(lambda _node: True, 1)
    for use in range(10_000):
        node.used_at = use
        queue.put(node)
    assert len(queue._heap) <= 4 + 64
    assert queue.take() is node


# ---------------------------------------------------------------- any order of events

OWNERS = st.sampled_from([f"r{i}" for i in range(5)])
SALTS = st.sampled_from(["", "a", "b"])
TOKENS = st.lists(st.integers(0, 1), min_size=1, max_size=11).map(tuple)
USED = (BlockState.LEASED, BlockState.HELD, BlockState.IN_TRANSFER)


class CacheMachine(RuleBasedStateMachine):
    """One prompt is computed at a time; others hold blocks; everything ends somehow."""

    BLOCKS, HOST = 9, 0

    def __init__(self) -> None:
        super().__init__()
        self.cache = PrefixCache(self.BLOCKS, SIZE, host_blocks=self.HOST)
        self.memory = Memory()
        self.running: tuple[str, Placed, str, tuple[int, ...]] | None = None
        self.done: dict[str, tuple[Placed, str, tuple[int, ...]]] = {}
        self.generations: dict[int, int] = {}

    def owns(self, owner: str) -> bool:
        return owner in self.done or (self.running is not None and self.running[0] == owner)

    @rule(owner=OWNERS, salt=SALTS, prompt=TOKENS)
    def start(self, owner: str, salt: str, prompt: tuple[int, ...]) -> None:
        if self.running is not None or self.owns(owner):
            return
        free = self.cache.pool.free_blocks
        placed = self.cache.place(owner, salt, prompt)
        if placed is None:
            assert self.cache.pool.blocks_for(len(prompt)) > free - self.BLOCKS
            assert self.cache.pool.free_blocks == free
            return
        assert placed.cached * SIZE < len(prompt), "a token must be left to compute"
        assert len(set(placed.blocks)) == len(placed.blocks) == -(-len(prompt) // SIZE)
        taken = {block for other, _, _ in self.done.values() for block in other.blocks}
        assert not taken & set(placed.blocks[placed.cached :]), "given out while in use"
        allocation = self.cache.pool.get(owner)
        assert allocation is not None
        for block in placed.blocks[placed.cached :]:
            assert allocation.generation > self.generations.get(block, 0)
            self.generations[block] = allocation.generation
        self.running = (owner, placed, salt, prompt)

    @precondition(lambda self: self.running is not None)
    @rule(leave=st.booleans())
    def finish(self, leave: bool) -> None:
        assert self.running is not None
        (owner, placed, salt, prompt), self.running = self.running, None
        self.memory.run(placed, salt, prompt)
        self.cache.computed(owner)
        self.done[owner] = (placed, salt, prompt)
        if leave:
            self.release(owner)

    @precondition(lambda self: self.running is not None)
    @rule()
    def fail(self) -> None:
        """The job wrote nothing, or rubbish."""
        assert self.running is not None
        (owner, placed, _, _), self.running = self.running, None
        self.cache.abandon(owner)
        for block in placed.blocks[placed.cached - len(placed.fills) :]:
            self.memory.blocks.pop(block, None)
        for _, slot in placed.spills:
            self.memory.slots.pop(slot, None)

    @rule(owner=OWNERS)
    def release(self, owner: str) -> None:
        if owner in self.done:
            placed = self.done.pop(owner)[0]
            assert self.cache.release(owner) == len(placed.blocks)

    @precondition(lambda self: bool(self.done))
    @rule(data=st.data(), state=st.sampled_from(USED))
    def move(self, data: st.DataObject, state: BlockState) -> None:
        self.cache.pool.move(data.draw(st.sampled_from(sorted(self.done))), state)

    @invariant()
    def accounts_are_exact(self) -> None:
        self.cache.validate()
        pool = self.cache.pool
        assert sum(pool.count(state) for state in BlockState) == self.BLOCKS
        in_use = {block for placed, _, _ in self.done.values() for block in placed.blocks}
        in_use |= set(self.running[1].blocks) if self.running else set()
        assert pool.free_blocks == self.BLOCKS - len(in_use), "a leak"

    @invariant()
    def every_request_reads_its_own_rows(self) -> None:
        for placed, salt, prompt in self.done.values():
            for index, block in enumerate(placed.blocks):
                assert self.memory.blocks[block] == (salt, prompt[: (index + 1) * SIZE])

    @invariant()
    def what_the_cache_holds_was_filled_with_exactly_that(self) -> None:
        if self.running is not None:
            return  # what a job moves is true at its end
        for salt, node in self.cache.tree.nodes():
            found = self.memory.blocks if node.block >= 0 else self.memory.slots
            keys, at = [], node
            while at.parent is not None:
                keys.append(at.key)
                at = at.parent
            whole_salt, prefix = found[node.block if node.block >= 0 else node.slot]
            assert whole_salt == salt
            assert keys_of(prefix, SIZE) == keys[::-1]


class HostMachine(CacheMachine):
    BLOCKS, HOST = 7, 4


class TightHostMachine(CacheMachine):
    BLOCKS, HOST = 6, 1


TestCache = CacheMachine.TestCase
TestHost = HostMachine.TestCase
TestTightHost = TightHostMachine.TestCase
for case in (TestCache, TestHost, TestTightHost):
    case.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
