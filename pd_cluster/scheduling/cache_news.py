"""Which cached prefixes have a name for routers, and what of that has changed: named, and evicted.

A name is a step of a prompt's text chain (`AddRequest.steps`) at a block boundary. It is known only for prompts that
came while routers listened, so at first no block has one. Blocks of generated tokens get theirs when a later prompt
contains them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from pd_connectors.protocol.feed import StoredBlock

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
      goes with the first of them. In a tree that is the boundary's own block, which goes before its ancestors;
    - a reader that removes `evicted` and then adds `stored` of each `take`, in order, has exactly the named boundaries.
    """

    def __init__(self) -> None:
        self.is_on = False  # routers listen
        self._clear()

    def _clear(self) -> None:
        # named boundary -> the (group, hash) of the WINDOW's or STATE's cached blocks that it needs
        self._named: dict[bytes, list[tuple[int, bytes]]] = {}
        self._stored: dict[bytes, StoredBlock] = {}  # since the last `take`
        self._evicted: list[int] = []
        self._needing: dict[tuple[int, bytes], set[bytes]] = {}  # the same the other way round

    def __bool__(self) -> bool:
        return bool(self._stored or self._evicted)

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

    def evicted(self, block_hash: bytes) -> None:
        """Note that the boundary after this block is no hit any more."""
        if (blocks := self._named.pop(block_hash, None)) is None:
            return
        for block in blocks:  # another boundary may need it for long
            self._needing[block].remove(block_hash)
            if not self._needing[block]:
                del self._needing[block]
        if self._stored.pop(block_hash, None) is None:
            self._evicted.append(block_id(block_hash))

    def evicted_in(self, group: int, block_hash: bytes) -> None:
        """Note that no boundary that needs this block of a WINDOW or STATE group is a hit any more."""
        for boundary in tuple(self._needing.get((group, block_hash), ())):
            self.evicted(boundary)

    def take(self) -> tuple[tuple[int, ...], tuple[StoredBlock, ...]]:
        """Evicted and stored blocks since the last call. A reader takes the evicted ones first."""
        evicted, stored = tuple(self._evicted), tuple(self._stored.values())
        self._evicted.clear()
        self._stored.clear()
        return evicted, stored
