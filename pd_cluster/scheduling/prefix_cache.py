"""Which blocks hold which prefixes: a radix tree at block granularity.

A node is one full block; the edge to it is labelled with the block's tokens, and because hashes are chained, a node's
hash names the whole path to it. So finding the longest cached prefix is one dictionary look-up per block, and tenants
with different salts live under different roots.

A holder of a node holds its ancestors too, and lets go of them tail first. Hence

    unreferenced node  =>  its whole subtree is unreferenced, and each descendant was let go of earlier

and the least recently used unreferenced node is always a leaf: its eviction is O(1) and cuts no path in the middle. Any
other unreferenced node is evicted with its subtree. Nodes that are inserted without a parent are no tree.
"""

from __future__ import annotations

from collections import OrderedDict
from itertools import islice
from typing import TYPE_CHECKING

import msgspec

if TYPE_CHECKING:
    from collections.abc import Iterable


class PrefixNode(msgspec.Struct, eq=False, gc=False):
    """One cached block. There are tens of thousands, without reference cycles, so the garbage collector skips them.

    Nodes refer to each other by hash. Objects outside the garbage collector are freed recursively, and a chain of
    100,000 references is too deep for that.
    """

    hash: bytes
    block_id: int
    parent: bytes | None = None  # None: a child of a root
    child: bytes | None = None  # the youngest; the others follow by `older`
    older: bytes | None = None  # siblings
    younger: bytes | None = None


class PrefixCache:
    """The tree, and the order in which its unreferenced nodes are evicted. Knows no reference counts."""

    def __init__(self) -> None:
        self._by_hash: dict[bytes, PrefixNode] = {}
        self._by_block: dict[int, PrefixNode] = {}
        self._evictable: OrderedDict[int, PrefixNode] = OrderedDict()  # block id -> node, least recently used first
        self._num_let_go = 0  # since boot

    def __len__(self) -> int:
        return len(self._by_hash)

    def __contains__(self, block_id: int) -> bool:
        return block_id in self._by_block

    @property
    def num_evictable(self) -> int:
        return len(self._evictable)

    def find(self, block_hash: bytes) -> int | None:
        """The block that holds this prefix's last block."""
        node = self._by_hash.get(block_hash)
        return None if node is None else node.block_id

    def match(self, hashes: Iterable[bytes]) -> list[int]:
        """Block ids of the longest cached run of `hashes`, which start where the caller's path ends."""
        found = []
        for block_hash in hashes:
            node = self._by_hash.get(block_hash)
            if node is None:
                break
            found.append(node.block_id)
        return found

    def insert(self, block_hash: bytes, block_id: int, parent_block: int | None) -> None:
        """Add a referenced node below the node of `parent_block` (None: below a root). The hash must be new."""
        assert block_hash not in self._by_hash
        assert block_id not in self._by_block
        node = PrefixNode(block_hash, block_id)
        if parent_block is not None:
            parent = self._by_block[parent_block]
            node.parent, node.older, parent.child = parent.hash, parent.child, block_hash
            if node.older is not None:
                self._by_hash[node.older].younger = block_hash
        self._by_hash[block_hash] = node
        self._by_block[block_id] = node

    def let_go(self, block_id: int) -> None:
        """Make the node of this block evictable, as the most recently used one. The block must have no reference."""
        self._evictable[block_id] = self._by_block[block_id]
        self._num_let_go += 1

    def take_up(self, block_id: int) -> None:
        """Make the node of this block not evictable, because the block got its first reference."""
        del self._evictable[block_id]

    def replace(self, block_id: int, own: int) -> None:
        """Let a referenced block of the same content take the place of an unreferenced one, which is free then."""
        node = self._evictable.pop(block_id)
        del self._by_block[block_id]
        node.block_id = own
        self._by_block[own] = node

    @property
    def evictable(self) -> Iterable[int]:
        """The blocks of the unreferenced nodes, least recently used first."""
        return self._evictable

    @property
    def num_left(self) -> int:
        """Nodes that were evictable and are not any more, since boot."""
        return self._num_let_go - len(self._evictable)

    def oldest(self, num: int) -> Iterable[tuple[int, bytes]]:
        """The blocks and hashes of the next so many nodes to be evicted."""
        return ((block_id, node.hash) for block_id, node in islice(self._evictable.items(), num))

    def evict(self) -> tuple[int, bytes]:
        """Forget the least recently used unreferenced leaf and return its block and hash. There must be one."""
        block_id, node = self._evictable.popitem(last=False)
        self._forget(node)
        return block_id, node.hash

    def evict_subtree(self, block_id: int) -> list[tuple[int, bytes]]:
        """Forget the unreferenced node of this block and all nodes below it. Returns their blocks and hashes."""
        doomed = [self._by_block[block_id]]
        for node in doomed:  # grows meanwhile
            child = node.child
            while child is not None:
                doomed.append(self._by_hash[child])
                child = doomed[-1].older
        for node in reversed(doomed):
            del self._evictable[node.block_id]
            self._forget(node)
        return [(node.block_id, node.hash) for node in doomed]

    def _forget(self, node: PrefixNode) -> None:
        assert node.child is None, f"block {node.block_id} was to be evicted before its children"
        if node.parent is not None:
            if node.younger is None:
                self._by_hash[node.parent].child = node.older
            else:
                self._by_hash[node.younger].older = node.older
            if node.older is not None:
                self._by_hash[node.older].younger = node.younger
        del self._by_hash[node.hash]
        del self._by_block[node.block_id]

    def check(self, refs: list[int]) -> None:
        """Raise AssertionError unless the tree agrees with itself and with the reference counts."""
        assert len(self._by_hash) == len(self._by_block), "two nodes share a hash or a block"
        children: dict[bytes, set[bytes]] = {}
        for block_id, node in self._by_block.items():
            assert node.block_id == block_id, f"node of block {block_id} is misfiled"
            assert self._by_hash.get(node.hash) is node, f"node of block {block_id} is not found by its hash"
            num_refs, evictable = refs[block_id], block_id in self._evictable
            assert (num_refs == 0) == evictable, (
                f"cached block {block_id}: {num_refs} references, evictable {evictable}"
            )
            if node.parent is not None:
                assert node.parent in self._by_hash, f"parent of cached block {block_id} is not cached"
                parent = self._by_hash[node.parent].block_id
                assert refs[parent] or not refs[block_id], f"block {block_id} is referenced, its parent {parent} is not"
                children.setdefault(node.parent, set()).add(node.hash)
        for node in self._by_block.values():
            linked, child, younger = set(), node.child, None
            while child is not None and child not in linked:
                assert self._by_hash[child].younger == younger, "siblings are linked one way"
                linked.add(child)
                child, younger = self._by_hash[child].older, child
            assert linked == children.get(node.hash, set()), f"the children of block {node.block_id} are not linked"
