"""RTC: the KV of prompts that were computed before, kept for those that begin alike.

    place      longest cached prefix + new blocks behind it       request RUNNING
    computed   whole blocks of the prompt become the cache's      request goes on
    release    references end; what nobody refers to is idle      request gone
    (reclaim)  the idle leaf used longest ago makes room: forgotten, or spilled to host memory

A block is the cache's from the moment its rows are known to be right until it is reclaimed;
requests hold references meanwhile, and nobody writes to it. At least one token of a prompt is
always left to compute: its logits choose the first token.

With host memory a reclaimed block is copied to a slot first and comes back by a copy. Copies are
part of the job that needs the blocks (`Placed.spills`, `Placed.fills`); since one prompt runs at a
time, nobody can find a block before the job has made it true. A job that fails takes back what it
was to move (`abandon`).
"""

from __future__ import annotations

from dataclasses import dataclass, field

from libs.kvcache.block_pool import BlockPool
from libs.kvcache.radix import NOWHERE, LeafQueue, Node, RadixTree, Tokens, keys_of


@dataclass(frozen=True, slots=True)
class Placed:
    """Where the KV of a prompt goes: its blocks, of which the first `cached` hold their rows.

    `spills` are (block, host slot) pairs to copy out, in order, before anything is written to a
    block; `fills` are (host slot, block) pairs to copy in. A slot may occur in both: its rows must
    be read for the fill before they are replaced.
    """

    blocks: tuple[int, ...]
    cached: int
    spills: tuple[tuple[int, int], ...] = ()
    fills: tuple[tuple[int, int], ...] = ()


@dataclass(slots=True)
class _Prompt:
    """A prompt with blocks here: the edges it may insert, and the nodes it refers to."""

    salt: str
    keys: list[bytes]
    path: list[Node]
    #: Nodes whose KV its job moves between pool and host.
    moved: list[Node] = field(default_factory=list)


class PrefixCache:
    """One pool with its cache; `host_blocks` 0 means that nothing outlives its block."""

    def __init__(
        self, num_blocks: int, block_size: int, *, enabled: bool = True, host_blocks: int = 0
    ) -> None:
        assert enabled or not host_blocks, "host memory holds what the cache evicts"
        self.pool = BlockPool(num_blocks, block_size, self._reclaim)
        self.tree = RadixTree()
        self._enabled = enabled
        self._host_blocks = host_blocks
        self._free_slots = list(range(host_blocks - 1, -1, -1))
        self._prompts: dict[str, _Prompt] = {}
        self._idle_leaves = LeafQueue(self._is_idle_leaf, num_blocks)
        self._host_leaves = LeafQueue(_is_host_leaf, host_blocks)
        self._uses = 0
        self._spilled: list[tuple[Node, int, int]] = []

    def match(self, salt: str, tokens: Tokens) -> tuple[int, ...]:
        """The pool's blocks that hold the longest prefix of `tokens`; changes nothing."""
        found = self.tree.match(salt, keys_of(tokens, self.pool.block_size))
        return tuple(node.block for node in found if node.block != NOWHERE)

    def place(self, owner: str, salt: str, tokens: Tokens) -> Placed | None:
        """Blocks for a prompt, or None while there are not enough of them."""
        size, keys = self.pool.block_size, keys_of(tokens, self.pool.block_size)
        reusable = (len(tokens) - 1) // size if self._enabled else 0
        path = self.tree.match(salt, keys[:reusable])
        shared = [node.block for node in path if node.block != NOWHERE]
        wanted = self.pool.blocks_for(len(tokens)) - len(shared)
        if not self.pool.can_allocate(wanted, shared):
            return None
        from_host = path[len(shared) :]
        # Their slots may take what makes room for them: a job reads its fills first.
        slots = [self._leave_host(node) for node in from_host]
        allocation = self.pool.allocate(owner, wanted, shared=shared)
        for node, block in zip(from_host, allocation.blocks[len(shared) :], strict=False):
            node.block = block
        self.pool.share(owner, len(path))
        spilled, self._spilled = self._spilled, []
        moved = [*from_host, *(node for node, _, _ in spilled)]
        self._prompts[owner] = _Prompt(salt, keys, path, moved)
        self._touch(path)
        fills = tuple((slot, node.block) for slot, node in zip(slots, from_host, strict=True))
        spills = tuple((block, slot) for _, block, slot in spilled)
        return Placed(allocation.blocks, len(path), spills, fills)

    def computed(self, owner: str) -> None:
        """The prompt's rows are in its blocks: the whole ones are the cache's from now on."""
        prompt = self._prompts[owner]
        allocation = self.pool.get(owner)
        assert allocation is not None, owner
        path = prompt.path
        known = self.tree.match(prompt.salt, prompt.keys) if self._enabled else []
        for index in range(len(path), len(prompt.keys) if self._enabled else 0):
            if index < len(known) and known[index].block != NOWHERE:
                break  # computed twice: the second copy stays its owner's, and goes with it
            if index < len(known):
                node = known[index]
                self._leave_host(node)
            else:
                parent = path[-1] if path else None
                node = self.tree.add(prompt.salt, parent, prompt.keys[index])
                _above(node).pool_children += 1
            node.block = allocation.blocks[index]
            path.append(node)
        self.pool.share(owner, len(path))
        self._touch(path)

    def release(self, owner: str) -> int:
        """The request is over; releasing nothing is fine. Returns the number of blocks."""
        released = self.pool.release(owner)
        prompt = self._prompts.pop(owner, None)
        if prompt is not None:
            self._touch(prompt.path)
            for node in reversed(prompt.path):
                self._idle_leaves.put(node)
        return released

    def abandon(self, owner: str) -> None:
        """The prompt's job failed: release it, and forget whatever the job was to move."""
        moved = self._prompts[owner].moved
        self.release(owner)
        for node in moved:
            self._discard(node)

    # ------------------------------------------------------------ eviction

    def _is_idle_leaf(self, node: Node) -> bool:
        return self.pool.is_idle(node.block) and node.pool_children == 0

    def _reclaim(self) -> int:
        """Give up the block of the idle leaf that was used longest ago."""
        node = self._idle_leaves.take()
        block, node.block = node.block, NOWHERE
        parent = _above(node)
        parent.pool_children -= 1
        if self._host_blocks:
            self._spill(node, block)
        else:
            self.tree.remove(node)
        self._idle_leaves.put(parent)
        return block

    def _spill(self, node: Node, block: int) -> None:
        if not self._free_slots:
            self._free_slots.append(self._evict_from_host())
        node.slot = self._free_slots.pop()
        self._spilled.append((node, block, node.slot))
        self._host_leaves.put(node)

    def _evict_from_host(self) -> int:
        node = self._host_leaves.take()
        slot, node.slot = node.slot, NOWHERE
        self.tree.remove(node)
        self._host_leaves.put(_above(node))
        return slot

    def _leave_host(self, node: Node) -> int:
        """The node is to be in the pool again; returns the slot it had, which is free."""
        slot, node.slot = node.slot, NOWHERE
        assert slot != NOWHERE, "it was not in host memory"
        _above(node).pool_children += 1
        self._free_slots.append(slot)
        return slot

    def _discard(self, node: Node) -> None:
        """Forget a node and everything below it; one that is gone already is fine."""
        for child in list(node.children.values()):
            self._discard(child)
        if node.block == NOWHERE and node.slot == NOWHERE:
            return
        parent = _above(node)
        if node.block != NOWHERE:
            self.pool.forget(node.block)
            parent.pool_children -= 1
        else:
            self._free_slots.append(node.slot)
        node.block = node.slot = NOWHERE
        self.tree.remove(node)
        self._idle_leaves.put(parent)
        self._host_leaves.put(parent)

    def _touch(self, path: list[Node]) -> None:
        self._uses += 1
        for node in path:
            node.used_at = self._uses

    def validate(self) -> None:
        """Pool, tree, host slots and requests agree."""
        self.pool.validate()
        nodes = [node for _, node in self.tree.nodes()]
        blocks = sorted(node.block for node in nodes if node.block != NOWHERE)
        assert blocks == self.pool.cached_blocks(), "tree and pool disagree on what is cached"
        slots = [node.slot for node in nodes if node.slot != NOWHERE]
        assert sorted(slots + self._free_slots) == list(range(self._host_blocks)), "slots"
        for node in nodes:
            in_pool = node.block != NOWHERE
            assert in_pool != (node.slot != NOWHERE), "KV is in one place"
            below = sum(child.block != NOWHERE for child in node.children.values())
            assert below == node.pool_children, (below, node.pool_children)
            assert in_pool or not below, "KV in the pool without its prefix"
        for owner, prompt in self._prompts.items():
            allocation = self.pool.get(owner)
            assert allocation is not None, f"{owner} has no blocks"
            path = tuple(node.block for node in prompt.path)
            assert path == allocation.blocks[: allocation.shared], owner


def _above(node: Node) -> Node:
    assert node.parent is not None, "a root holds no KV"
    return node.parent


def _is_host_leaf(node: Node) -> bool:
    return node.slot != NOWHERE and not node.children
