"""The host blocks of one KV group, and what is in each. See `host_tier`."""

from __future__ import annotations

from collections import Counter, OrderedDict
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable


class HostBlocks:
    """The host blocks of one KV group. `per_unit`: see `host_unit`."""

    def __init__(self, per_unit: int = 1) -> None:
        self.per_unit, self.num_blocks = per_unit, 0
        self.free: list[int] = []
        self.cached: OrderedDict[bytes, int] = OrderedDict()  # the first is evicted first
        self.taken: set[int] = set()
        self.pins: Counter[int] = Counter()  # of cached blocks and of `orphans`
        self.orphans: set[int] = set()  # pinned blocks that are cached no more
        self.clean_to = 0  # of all blocks that have left the device's order of eviction or will, so many have a copy

    @property
    def num_takeable(self) -> int:
        return len(self.free) + len(self.cached) - len(self.pins) + len(self.orphans)

    def grow(self, num_units: int) -> None:
        """Have so many units of blocks, no fewer than before."""
        num_blocks = num_units * self.per_unit
        assert num_blocks >= self.num_blocks, "host memory that may be in use is taken away"
        self.free[:0] = range(num_blocks - 1, self.num_blocks - 1, -1)
        self.num_blocks = num_blocks

    def pin(self, block: int) -> None:
        """Keep a cached block from being evicted."""
        self.pins[block] += 1

    def unpin(self, block: int) -> None:
        self.pins[block] -= 1
        if not self.pins[block]:
            del self.pins[block]
            if block in self.orphans:
                self.orphans.remove(block)
                self.free.append(block)

    def give_back(self, blocks: Iterable[int]) -> None:
        """Free taken blocks."""
        self.taken.difference_update(blocks)
        self.free += blocks

    def clear(self) -> Iterable[bytes]:
        """Forget what is cached. Returns it."""
        cached, self.cached, self.clean_to = self.cached, OrderedDict(), 0
        for block in cached.values():
            (self.orphans.add if block in self.pins else self.free.append)(block)
        return cached

    def check(self) -> None:
        """Raise AssertionError unless every block is accounted for once."""
        held = [*self.free, *self.cached.values(), *self.taken, *self.orphans]
        num = self.num_blocks
        assert len(held) == len(set(held)) == num, f"{len(held)} of {num} host blocks held, some twice"
        assert self.pins.keys() <= {*self.cached.values(), *self.orphans}, "a host block is pinned and not cached"
        assert self.orphans <= self.pins.keys(), "an orphan without a pin"
