"""Which cached prefixes have a name for routers, and what of that has changed: named, evicted, in another tier.

A name is a step of a prompt's text chain (`AddRequest.steps`) at a block boundary. It is known only for prompts that
came while routers listened, so at first no block has one. Blocks of generated tokens get theirs when a later prompt
contains them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from msgspec.structs import replace

from pd_connectors.protocol.feed import DEVICE, HOST, StoredBlock

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

ID_BYTES = 8  # of a block's hash: the block's name in the feed


def block_id(block_hash: bytes) -> int:
    """The number by which the feed names a block."""
    return int.from_bytes(block_hash[:ID_BYTES], "little")


class CacheNews:
    """The named boundaries of one engine's prefix caches.

    Invariants:

    - a named boundary is a hit: each group has the blocks that a sequence needs to continue there (`hits`). The name
      goes with the first of them. In a tree that is the boundary's own block, which goes before its ancestors. Below
      the device a name may stay though a block before it was lost without a copy: a router then expects too much;
    - a reader that removes `evicted`, adds `stored` and then changes the tiers of `moved` of each `take`, in order, has
      exactly the named boundaries, each with its tier: the lowest one of the blocks that it needs of its own.
    """

    def __init__(self, trees: Sequence[int] = (0,)) -> None:
        """`trees`: the groups in which a boundary needs all blocks before it."""
        self.is_on = False  # routers listen
        self._trees = trees
        self._tiers: dict[tuple[int, bytes], int] = {}  # of (group, hash) that is not on the device, named or not
        self._clear()

    def _clear(self) -> None:
        # named boundary -> the (group, hash) of the WINDOW's or STATE's cached blocks that it needs
        self._named: dict[bytes, list[tuple[int, bytes]]] = {}
        self._stored: dict[bytes, StoredBlock] = {}  # since the last `take`
        self._evicted: list[int] = []
        self._moved: dict[bytes, None] = {}  # named boundaries of which a block has moved
        self._needing: dict[tuple[int, bytes], set[bytes]] = {}  # the same the other way round

    def __bool__(self) -> bool:
        return bool(self._stored or self._evicted or self._moved)

    def switch(self, *, is_on: bool) -> None:
        """Forget all names, and take new ones or not."""
        self._clear()
        self.is_on = is_on

    def name(
        self,
        steps: Sequence[tuple[int, int]],
        first: int,
        hashes: Sequence[bytes],
        block_size: int,
        needed: Callable[[Sequence[bytes], int], list[tuple[int, bytes]] | None],
    ) -> int:
        """Name boundaries of a prompt by steps[first:]. The blocks with these `hashes` are cached in all trees.

        `needed`: see `Hits.needed`; None: no hit. Returns the number of `steps` that are done with.
        """
        at = first
        while at < len(steps) and (num_blocks := steps[at][0] // block_size) <= len(hashes):
            block_hash = hashes[num_blocks - 1]
            is_new = self.is_on and block_hash not in self._named
            if is_new and (blocks := needed(hashes, num_blocks)) is not None:
                for block in blocks:
                    self._needing.setdefault(block, set()).add(block_hash)
                self._named[block_hash] = blocks
                self._stored[block_hash] = StoredBlock(block_id(block_hash), steps[at][1], steps[at][0])
            at += 1
        return at

    def evicted(self, group: int, block_hash: bytes) -> None:
        """Note that no tier has this block of any group: no boundary that needs it is a hit any more."""
        self._tiers.pop((group, block_hash), None)
        for boundary in self._needing_of(group, block_hash):
            for block in self._named.pop(boundary):  # another boundary may need it for long
                self._needing[block].remove(boundary)
                if not self._needing[block]:
                    del self._needing[block]
            self._moved.pop(boundary, None)
            if self._stored.pop(boundary, None) is None:
                self._evicted.append(block_id(boundary))

    def _needing_of(self, group: int, block_hash: bytes) -> tuple[bytes, ...]:
        """The named boundaries that need a block of its own: in a tree, the one after it."""
        if group in self._trees:
            return (block_hash,) if block_hash in self._named else ()
        return tuple(self._needing.get((group, block_hash), ()))

    def lowered(self, group: int, block_hash: bytes, tier: int = HOST) -> None:
        """Note that the device has this block of any group no more, and that a lower tier has it. Idempotent."""
        self._tiers[group, block_hash] = tier
        self._moved.update(dict.fromkeys(self._needing_of(group, block_hash)))

    def raised(self, group: int, block_hash: bytes) -> None:
        """Note that the device has this block: it was loaded, or computed again. Nothing if it had it already."""
        if self._tiers.pop((group, block_hash), None) is not None:
            self._moved.update(dict.fromkeys(self._needing_of(group, block_hash)))

    def _tier(self, boundary: bytes) -> int:
        """The lowest one of the blocks that the boundary needs, but those of the boundaries before it."""
        if not (tiers := self._tiers):
            return DEVICE
        blocks = [*((group, boundary) for group in self._trees), *self._named[boundary]]
        return max(tiers.get(block, DEVICE) for block in blocks)

    def take(self) -> tuple[tuple[int, ...], tuple[StoredBlock, ...], tuple[tuple[int, int], ...]]:
        """Evicted and stored blocks since the last call, and (block, tier) of those that moved, in this order."""
        evicted, stored, moved = tuple(self._evicted), self._stored, self._moved
        self._evicted, self._stored, self._moved = [], {}, {}
        if self._tiers:
            names = ((name, self._tier(boundary)) for boundary, name in stored.items())
            told = tuple(replace(name, tier=tier) if tier else name for name, tier in names)
        else:
            told = tuple(stored.values())
        still = (boundary for boundary in moved if boundary not in stored)
        return evicted, told, tuple((block_id(boundary), self._tier(boundary)) for boundary in still)
