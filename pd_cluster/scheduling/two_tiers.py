"""What is cached of one KV group on the device or in host memory: to look up, not to hold."""

from __future__ import annotations

from itertools import takewhile
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from pd_cluster.scheduling.host_blocks import HostBlocks
    from pd_cluster.scheduling.prefix_cache import PrefixCache


class TwoTiers:
    """What is cached of a group on the device or in host memory."""

    def __init__(self, cache: PrefixCache, host: HostBlocks) -> None:
        self._cache, self._host = cache, host

    def __len__(self) -> int:
        return len(self._cache) + len(self._host.cached)

    def find(self, block_hash: bytes) -> int | None:
        """The block with this content, of the tier that has it."""
        found = self._cache.find(block_hash)
        return self._host.find(block_hash) if found is None else found

    def match(self, hashes: Iterable[bytes]) -> list[int]:
        """Blocks of the longest cached run of `hashes`."""
        return list(takewhile(lambda block: block is not None, map(self.find, hashes)))  # type: ignore[arg-type]


class ThreeTiers(TwoTiers):
    """Or in a third tier, which says what it `has`; such a block has the number -1."""

    def __init__(self, cache: PrefixCache, host: HostBlocks, has: Callable[[bytes], bool]) -> None:
        super().__init__(cache, host)
        self._has = has

    def __len__(self) -> int:
        return super().__len__() + 1  # else nothing is looked for where blocks die

    def find(self, block_hash: bytes) -> int | None:
        found = super().find(block_hash)
        return -1 if found is None and self._has(block_hash) else found
