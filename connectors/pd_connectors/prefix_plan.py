"""Which blocks of which group a prefix from a pool needs. Pure.

Positions are tokens from the prompt's start. A prefix ends at a *boundary*, a multiple of every group's block size. The
engine *has* the prompt up to some boundary already: in each group the blocks that a token there, or a later one, reads.
"""

from __future__ import annotations

from math import lcm
from typing import TYPE_CHECKING, NamedTuple

from pd_connectors.protocol.layout import KVKind

if TYPE_CHECKING:
    from collections.abc import Sequence

    from pd_connectors.protocol.layout import BlockLayout, BlockRun


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
        self.unit = lcm(*(self._groups[index].block_size for index in self._whole))  # tokens; 1: no group is whole

    def last_boundary(self, num_hashes: int) -> int:
        """Where the longest prefix ends that so many hashes name."""
        return num_hashes * self._hash_tokens // self.boundary * self.boundary

    def hash_of(self, at: GroupBlock, hashes: Sequence[bytes]) -> bytes:
        """The hash at the block's end, of those of a prompt."""
        return hashes[(at.block + 1) * self._groups[at.group].block_size // self._hash_tokens - 1]

    def needed(self, group: int, end: int, have: int) -> range:
        """The blocks of a group that the engine lacks for a prefix up to `end`. It has the prompt up to `have`."""
        kind = self._groups[group]
        stop = end // kind.block_size
        return range(min(stop, max(kind.first_block(end), have // kind.block_size)), stop)

    def units(self, have: int, end: int) -> list[list[GroupBlock]]:
        """The blocks of the whole groups between two boundaries, by `unit`. [] when no group is whole."""
        return [
            [GroupBlock(g, block) for g in self._whole for block in self.needed(g, start + self.unit, start)]
            for start in (range(have, end, self.unit) if self._whole else ())
        ]

    def in_order(self, runs: Sequence[BlockRun]) -> list[PlacedBlock]:
        """The blocks of these runs, by group, in the order in which they end."""
        placed = [
            PlacedBlock((block + 1) * group.block_size, GroupBlock(index, block), block_id)
            for index, (group, run) in enumerate(zip(self._groups, runs, strict=False))
            for block, block_id in zip(run.span, run.block_ids, strict=True)
        ]
        return sorted(placed)

    def begin(self, runs: Sequence[BlockRun], end: int, have: int) -> int:
        """Up to where the engine has the prompt, if it asks for these runs of a prefix up to `end`.

        have: what it had before, which counts when the runs do not tell: a partial group's may begin later.
        """
        pairs = list(zip(self._groups, runs, strict=False))
        known = [run.first_block * group.block_size for group, run in pairs if run.first_block > group.first_block(end)]
        return max(known, default=0 if self._whole else min(have, end))

    def is_asked_for(self, runs: Sequence[BlockRun], end: int) -> bool:
        """Whether these runs, by group, are of a prefix up to `end`."""
        pairs = zip(self._groups, runs, strict=False)
        return all(g.first_block(end) <= run.first_block and run.span.stop == end // g.block_size for g, run in pairs)

    def loaded(self, have: int, end: int, *, is_all: bool) -> int:
        """Where the prefix ends when every block before `end` was read; `is_all`: every block that was asked for.

        The blocks of a partial group are those of the last boundary, so without one of them there is no prefix.
        """
        return end if is_all else 0 if self.partial else max(have, end // self.boundary * self.boundary)
