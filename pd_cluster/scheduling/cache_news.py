"""Which cached blocks have a name for routers, and what of that has changed: blocks named, and blocks evicted.

A name is a step of a prompt's text chain (`AddRequest.steps`). It is known only for prompts that came while routers
listened, so at first no block has one. Blocks of generated tokens get theirs when a later prompt contains them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from pd_connectors.protocol.feed import StoredBlock

if TYPE_CHECKING:
    from collections.abc import Sequence

ID_BYTES = 8  # of a block's hash: the block's name in the feed


def block_id(block_hash: bytes) -> int:
    """The number by which the feed names a block."""
    return int.from_bytes(block_hash[:ID_BYTES], "little")


class CacheNews:
    """The named blocks of one prefix cache.

    Invariant: a reader that removes `evicted` and then adds `stored` of each `take`, in order, has exactly the blocks
    that are cached and named.
    """

    def __init__(self) -> None:
        self.is_on = False  # routers listen
        self._named: set[bytes] = set()
        self._stored: dict[bytes, StoredBlock] = {}  # since the last `take`
        self._evicted: list[int] = []

    def __bool__(self) -> bool:
        return bool(self._stored or self._evicted)

    def switch(self, *, is_on: bool) -> None:
        """Forget all names, and take new ones or not."""
        self.__init__()  # type: ignore[misc]
        self.is_on = is_on

    def name(self, steps: Sequence[tuple[int, int]], first: int, hashes: Sequence[bytes], block_size: int) -> int:
        """Name blocks of a prompt, of which the blocks with these `hashes` are cached: by steps[first:].

        Returns the number of `steps` that are done with.
        """
        at = first
        while at < len(steps) and (num_blocks := steps[at][0] // block_size) <= len(hashes):
            block_hash = hashes[num_blocks - 1]
            if self.is_on and block_hash not in self._named:
                self._named.add(block_hash)
                self._stored[block_hash] = StoredBlock(block_id(block_hash), steps[at][1], steps[at][0])
            at += 1
        return at

    def evicted(self, block_hash: bytes) -> None:
        """Note that the cache has forgotten a block."""
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
