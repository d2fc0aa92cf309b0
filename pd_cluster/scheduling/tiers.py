"""What is cached of one KV group on the device or in a tier below: to look up, not to hold."""

from __future__ import annotations

from itertools import takewhile
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from pd_cluster.scheduling.host_blocks import HostBlocks
    from pd_cluster.scheduling.prefix_cache import PrefixCache


class Tiers:
    """What is cached of a group on the device, in host memory, or in a third tier that says what it `has`."""

    def __init__(self, cache: PrefixCache, host: HostBlocks, has: Callable[[bytes], bool] | None = None) -> None:
        self._cache, self._host, self._has = cache, host, has

    def __len__(self) -> int:
        # Where blocks die nothing is looked for in what has none
        return len(self._cache) + len(self._host.cached) + (self._has is not None)

    def find(self, block_hash: bytes) -> int | None:
        """The block with this content, of the first tier that has it. -1: the third."""
        found = self._cache.find(block_hash)
        if found is None:
            found = self._host.cached.get(block_hash)
        return -1 if found is None and self._has is not None and self._has(block_hash) else found

    def match(self, hashes: Iterable[bytes]) -> list[int]:
        """Blocks of the longest cached run of `hashes`."""
        return list(takewhile(lambda block: block is not None, map(self.find, hashes)))  # type: ignore[arg-type]
