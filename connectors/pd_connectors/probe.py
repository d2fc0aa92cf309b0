"""The questions of one search to the store: which prefix is there?

Blocks of the whole groups are asked for from the left, because a prefix ends at the first that is missing. Then those
of the partial groups from the right, boundary by boundary: most often the last one has all that it needs, and no block
is asked for that no later token reads.
"""

from __future__ import annotations

from itertools import takewhile
from typing import TYPE_CHECKING

from pd_connectors.prefix_plan import GroupBlock
from pd_connectors.search import Miss

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from pd_connectors.prefix_plan import PrefixPlan
    from pd_connectors.store import KVStore, ObjectName

FIRST_PROBE = 8  # units in the first question to the store: most searches that find nothing find nothing there
PROBE_BATCH = 64  # units, or boundaries, in each later question


class Probe:
    """names: of a block's objects. hopeless: why to give up now; None: go on."""

    def __init__(
        self,
        plan: PrefixPlan,
        store: KVStore,
        names: Callable[[GroupBlock], list[ObjectName]],
        hopeless: Callable[[], Miss | None],
    ) -> None:
        self._plan = plan
        self._store = store
        self._names = names
        self._hopeless = hopeless

    def find(self, have: int, end: int) -> tuple[int, Miss | None]:
        """Where the stored prefix ends, between two boundaries, and why it is not `end`. Raises StoreUnavailable."""
        found, miss = self._find_whole(have, end)
        if miss in (None, Miss.ABSENT) and self._plan.partial:
            last, why = self._find_partial(have, found)
            return last, why or (miss if last == found else Miss.ABSENT)
        return found, miss

    def _find_whole(self, have: int, end: int) -> tuple[int, Miss | None]:
        units, num_there = self._plan.units(have, end), 0
        while num_there < len(units):
            if miss := self._hopeless():
                return have, miss
            batch = units[num_there : num_there + (PROBE_BATCH if num_there else FIRST_PROBE)]
            found = sum(1 for _ in takewhile(bool, self._contains(batch)))
            num_there += found
            if found < len(batch):
                return have + num_there * self._plan.unit, Miss.ABSENT
        return end, None

    def _find_partial(self, have: int, end: int) -> tuple[int, Miss | None]:
        """The largest boundary up to `end` of which the partial groups have all blocks."""
        boundary, plan = self._plan.boundary, self._plan
        ends = range(end // boundary * boundary, have, -boundary)
        asked = dict.fromkeys(plan.partial, end)  # blocks of a group from this one on were asked for
        absent: dict[int, set[int]] = {group: set() for group in plan.partial}
        for batch in (ends[:1], *(ends[i : i + PROBE_BATCH] for i in range(1, len(ends), PROBE_BATCH))):
            if miss := self._hopeless():
                return have, miss
            wanted = []
            for group, at in ((group, at) for at in batch for group in plan.partial):
                needed = plan.needed(group, at, have)
                wanted += [GroupBlock(group, block) for block in needed if block < asked[group]]
                asked[group] = min(asked[group], needed.start)
            for one, is_there in zip(wanted, self._contains([[one] for one in wanted]), strict=True):
                if not is_there:
                    absent[one.group].add(one.block)
            for at in batch:
                if all(absent[group].isdisjoint(plan.needed(group, at, have)) for group in plan.partial):
                    return at, None
        return have, None

    def _contains(self, blocks: Sequence[Sequence[GroupBlock]]) -> list[bool]:
        return contains(self._store, [[name for one in unit for name in self._names(one)] for unit in blocks])


def contains(store: KVStore, blocks: Sequence[Sequence[ObjectName]]) -> list[bool]:
    """Whether all objects of each block are stored. If the first one of a block is missing, no other is asked for."""
    there = store.contains([block[0] for block in blocks])
    others = [name for block, is_there in zip(blocks, there, strict=True) if is_there for name in block[1:]]
    is_known = dict(zip(others, store.contains(others) if others else (), strict=True))
    return [
        is_there and all(is_known[name] for name in block[1:]) for block, is_there in zip(blocks, there, strict=True)
    ]
