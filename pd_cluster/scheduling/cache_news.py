"""Which cached prefixes have a name for routers, and what of that has changed: named, and evicted.

A name is a step of a prompt's text chain (`AddRequest.steps`) at a block boundary. It is known only for prompts that
came while routers listened, so at first no block has one. Blocks of generated tokens get theirs when a later prompt
contains them.
"""

from __future__ import annotations

from itertools import pairwise
from typing import TYPE_CHECKING

from pd_connectors.protocol.feed import StoredBlock

if TYPE_CHECKING:
    from collections.abc import Container, Sequence

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
        self._named: set[bytes] = set()
        self._stored: dict[bytes, StoredBlock] = {}  # since the last `take`
        self._evicted: list[int] = []

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
        hits: Container[int] | None = None,
    ) -> int:
        """Name boundaries of a prompt, of which the blocks with these `hashes` are cached: by steps[first:].

        `hits`: only these boundaries, in blocks; None: all. Returns the number of `steps` that are done with.
        """
        at = first
        while at < len(steps) and (num_blocks := steps[at][0] // block_size) <= len(hashes):
            block_hash = hashes[num_blocks - 1]
            if self.is_on and block_hash not in self._named and (hits is None or num_blocks in hits):
                self._named.add(block_hash)
                self._stored[block_hash] = StoredBlock(block_id(block_hash), steps[at][1], steps[at][0])
            at += 1
        return at

    def evicted(self, block_hash: bytes) -> None:
        """Note that the boundary behind this block is no hit any more."""
        if block_hash in self._named:
            self._named.remove(block_hash)
            if self._stored.pop(block_hash, None) is None:
                self._evicted.append(block_id(block_hash))

    def take(self) -> tuple[tuple[int, ...], tuple[StoredBlock, ...]]:
        """Evicted and stored blocks since the last call. A reader takes the evicted ones first."""
        evicted, stored = tuple(self._evicted), tuple(self._stored.values())
        self._evicted.clear()
        self._stored.clear()
        return evicted, stored


class WindowChains:
    """The cached blocks of a WINDOW group before named boundaries, each with those that continue it.

    Invariant: the blocks that a named boundary needs of the group are cached, and linked in a row up to the boundary.
    `reach`: how many boundaries need one block, in a row.
    """

    def __init__(self, news: CacheNews, reach: int) -> None:
        self._news = news
        self._reach = reach
        self._next: dict[bytes, set[bytes]] = {}
        self._previous: dict[bytes, bytes] = {}

    def link(self, hashes: Sequence[bytes | None]) -> None:
        """Note that blocks follow each other. None: one that is not cached."""
        for block_hash, following in pairwise(hashes):
            if block_hash is not None and following is not None and following not in self._previous:
                self._previous[following] = block_hash
                self._next.setdefault(block_hash, set()).add(following)

    def evicted(self, block_hash: bytes) -> None:
        """Take the names back that need this block."""
        reached = [block_hash]
        for _ in range(self._reach):
            for one in reached:
                self._news.evicted(one)
            reached = [following for one in reached for following in self._next.get(one, ())]
        for following in self._next.pop(block_hash, ()):
            del self._previous[following]
        if (previous := self._previous.pop(block_hash, None)) is not None:
            self._next[previous].discard(block_hash)
            if not self._next[previous]:
                del self._next[previous]
