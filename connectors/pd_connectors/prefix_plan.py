"""Which blocks of which group a prefix from a pool needs, and which of them to ask a store for. Pure.

Positions are tokens from the prompt's start. A prefix ends at a *boundary*, a multiple of every group's block size. The
engine has blocks of its own, of each group those before its `first_blocks`; see `Pool.find`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from pd_connectors.protocol.layout import KVKind

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from pd_connectors.protocol.layout import BlockLayout, BlockRun

    AreThere = Callable[[list["GroupBlock"]], list[bool]]

FIRST_PROBE = 8  # blocks in the first question to the store: most searches that find nothing find nothing there
PROBE_BATCH = 64  # blocks, or boundaries, in each later question


class GroupBlock(NamedTuple):
    """A block of the prompt, in one group."""

    group: int
    block: int


class PlacedBlock(NamedTuple):
    """A block of the prompt that is to be read, and its place in the cache."""

    end: int  # of its tokens
    at: GroupBlock
    block_id: int


class PrefixPlan:
    """The rules of one layout, without its optional groups, which no pool has.

    Groups of which a token reads every block are *whole*, the others are *partial*.
    """

    def __init__(self, layout: BlockLayout) -> None:
        self._groups = layout.required
        self._hash_tokens = layout.block_size
        self.boundary = layout.boundary
        kinds = [group.kind in (KVKind.FULL, KVKind.LATENT) for group in self._groups]
        self._whole = [index for index, is_whole in enumerate(kinds) if is_whole]
        self.partial = [index for index, is_whole in enumerate(kinds) if not is_whole]

    def last_boundary(self, position: int) -> int:
        """The largest boundary up to a position."""
        return position // self.boundary * self.boundary

    def end(self, num_hashes: int) -> int:
        """Where the longest prefix ends that so many hashes name."""
        return self.last_boundary(num_hashes * self._hash_tokens)

    def begin(self, first_blocks: Sequence[int]) -> int:
        """Where the engine's own prefix ends."""
        pairs = zip(self._groups, first_blocks, strict=False)
        return self.last_boundary(min(group.block_size * first for group, first in pairs))

    def hash_of(self, at: GroupBlock, hashes: Sequence[bytes]) -> bytes:
        """The hash at the block's end, of those of a prompt."""
        return hashes[(at.block + 1) * self._groups[at.group].block_size // self._hash_tokens - 1]

    def needed(self, group: int, end: int, first: int) -> range:
        """The blocks of a group that the engine lacks for a prefix up to `end`. It has its own up to block `first`."""
        kind = self._groups[group]
        stop = end // kind.block_size
        return range(min(stop, max(kind.first_block(end), first)), stop)

    def search(self, end: int, first_blocks: Sequence[int], are_there: AreThere) -> int:
        """Where the prefix ends, up to `end`, and with the blocks that `are_there` in the store."""
        end = self._search_whole(end, first_blocks, are_there)
        return self._search_partial(end, first_blocks, are_there) if self.partial else end

    def _search_whole(self, end: int, first_blocks: Sequence[int], are_there: AreThere) -> int:
        """From the left, because a prefix ends at the first block that is missing."""
        lacking = sorted(
            ((block + 1) * self._groups[group].block_size, GroupBlock(group, block))
            for group in self._whole
            for block in self.needed(group, end, first_blocks[group])
        )
        start = 0
        while batch := lacking[start : start + (PROBE_BATCH if start else FIRST_PROBE)]:
            there = are_there([at for _, at in batch])
            if not all(there):
                return self.last_boundary(batch[there.index(False)][0] - 1)
            start += len(batch)
        return end

    def _search_partial(self, end: int, first_blocks: Sequence[int], are_there: AreThere) -> int:
        """From the right, boundary by boundary: most often the last one has all that it needs, and no block is asked
        for that no later token reads."""
        begin = self.begin(first_blocks)
        ends = range(end, begin, -self.boundary)
        asked = dict.fromkeys(self.partial, end)  # blocks of a group from this one on were asked for
        absent: dict[int, set[int]] = {group: set() for group in self.partial}
        for batch in (ends[:1], *(ends[i : i + PROBE_BATCH] for i in range(1, len(ends), PROBE_BATCH))):
            needs = [{group: self.needed(group, at, first_blocks[group]) for group in self.partial} for at in batch]
            wanted = []
            for group, blocks in (pair for need in needs for pair in need.items()):
                wanted += [GroupBlock(group, block) for block in range(blocks.start, min(blocks.stop, asked[group]))]
                asked[group] = min(asked[group], blocks.start)
            for at, is_there in zip(wanted, are_there(wanted) if wanted else (), strict=True):
                if not is_there:
                    absent[at.group].add(at.block)
            for boundary, need in zip(batch, needs, strict=True):
                if all(absent[group].isdisjoint(blocks) for group, blocks in need.items()):
                    return boundary
        return begin

    def in_order(self, runs: Sequence[BlockRun], end: int) -> list[PlacedBlock]:
        """The blocks of these runs, by group, of a prefix up to `end`, in the order in which they end."""
        placed = []
        for index, (group, run) in enumerate(zip(self._groups, runs, strict=False)):
            assert run.first_block >= group.first_block(end), run
            assert run.span.stop == end // group.block_size, run
            for block, block_id in zip(run.span, run.block_ids, strict=True):
                placed.append(PlacedBlock((block + 1) * group.block_size, GroupBlock(index, block), block_id))
        return sorted(placed)

    def loaded(self, order: Sequence[PlacedBlock], num_read: int, end: int) -> int:
        """Where the prefix ends when so many of these blocks were read, of a prefix up to `end`.

        The blocks of a partial group are those of the last boundary, so without one of them there is no prefix.
        """
        if num_read == len(order):
            return end
        return 0 if self.partial else self.last_boundary(order[num_read].end - 1)
