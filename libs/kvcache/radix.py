"""A radix tree of prompts, one whole KV block per edge, one tree per tenant salt.

    root of a salt --tokens 0..15--> node --tokens 16..31--> node
                                         \\-tokens 16..31'-> node

The path from a root to a node is the exact tokens of a prefix: edges are compared by their tokens,
not by a hash of them, so what is found was filled with exactly those tokens under that salt. A node
says where the KV of its block is: in a block of the pool, in a slot of host memory, or nowhere
while it moves. KV in the pool has its whole prefix in the pool, so a path is first pool, then host.

`LeafQueue` finds the leaf that was used longest ago without looking at every node.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

Tokens = Sequence[int] | NDArray[np.int32]

NOWHERE = -1


@dataclass(slots=True, eq=False)
class Node:
    """One block of a prefix; `used_at` counts uses, and `serial` tells equal ones apart."""

    key: bytes
    parent: Node | None
    serial: int = 0
    block: int = NOWHERE
    slot: int = NOWHERE
    used_at: int = 0
    #: Children whose KV is in the pool (or on its way there).
    pool_children: int = 0
    children: dict[bytes, Node] = field(default_factory=dict)


def keys_of(tokens: Tokens, block_size: int) -> list[bytes]:
    """The edges along whole blocks of `tokens`; what does not fill a block has none."""
    ids = np.ascontiguousarray(tokens, np.int32)
    whole = len(ids) // block_size
    return [ids[i * block_size : (i + 1) * block_size].tobytes() for i in range(whole)]


class RadixTree:
    """All prefixes; a salt without any has no root."""

    def __init__(self) -> None:
        self._roots: dict[str, Node] = {}
        self._salt_of: dict[int, str] = {}
        self._serial = 0

    def match(self, salt: str, keys: Sequence[bytes]) -> list[Node]:
        """The nodes of the longest known prefix, in order."""
        found: list[Node] = []
        node = self._roots.get(salt)
        for key in keys:
            node = None if node is None else node.children.get(key)
            if node is None:
                break
            found.append(node)
        return found

    def add(self, salt: str, parent: Node | None, key: bytes) -> Node:
        """A new node below `parent`, or below the root of `salt`; its KV is nowhere yet."""
        above = self._root(salt) if parent is None else parent
        assert key not in above.children, "known already"
        node = above.children[key] = Node(key, above, self._new_serial())
        return node

    def remove(self, node: Node) -> None:
        """Forget a node without children; a root that is left without any goes as well."""
        parent = node.parent
        assert parent is not None, "roots go by themselves"
        assert not node.children, "its children would have no prefix"
        del parent.children[node.key]
        if parent.parent is None and not parent.children:
            del self._roots[self._salt_of.pop(parent.serial)]

    def nodes(self) -> Iterator[tuple[str, Node]]:
        """Every node with its salt, parents first."""
        for salt, root in self._roots.items():
            stack = list(root.children.values())
            while stack:
                node = stack.pop()
                yield salt, node
                stack += node.children.values()

    def _root(self, salt: str) -> Node:
        if salt not in self._roots:
            root = self._roots[salt] = Node(b"", None, self._new_serial())
            self._salt_of[root.serial] = salt
        return self._roots[salt]

    def _new_serial(self) -> int:
        self._serial += 1
        return self._serial


class LeafQueue:
    """Nodes by their last use; `is_leaf` says at the end whether one may really be taken.

    A node is put in whenever it may have become a leaf and is judged when it comes out, so nothing
    has to be found and removed in between.
    """

    def __init__(self, is_leaf: Callable[[Node], bool], nodes_max: int) -> None:
        self._is_leaf = is_leaf
        self._entries_max = 4 * nodes_max + 64
        self._heap: list[tuple[int, int, Node]] = []

    def put(self, node: Node) -> None:
        """`node` may be a leaf now."""
        if not self._is_leaf(node):
            return
        if len(self._heap) >= self._entries_max:
            self._heap = sorted({entry for entry in self._heap if self._stands(entry)})
        heapq.heappush(self._heap, (node.used_at, node.serial, node))

    def take(self) -> Node:
        """The leaf that was used longest ago; there must be one."""
        while self._heap:
            entry = heapq.heappop(self._heap)
            if self._stands(entry):
                return entry[2]
        raise AssertionError("nothing can be evicted, though something is idle")

    def _stands(self, entry: tuple[int, int, Node]) -> bool:
        used_at, _, node = entry
        return node.used_at == used_at and self._is_leaf(node)
