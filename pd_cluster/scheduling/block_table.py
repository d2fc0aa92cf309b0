"""The blocks of one holder, by KV group, in prompt order."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pd_cluster.scheduling.batch import NewBlocks


@dataclass(slots=True, eq=False)
class GroupBlocks:
    """A holder's blocks of one group. Changed by the group's pool only."""

    # ids[i] holds tokens [(first + i) * block_size, (first + i + 1) * block_size); those before it are dead
    first: int = 0
    ids: list[int] = field(default_factory=list)
    # Published blocks. In a tree (FULL, LATENT): cached blocks of the same content as ids[: len(path)]. Else: these ids
    path: list[int] = field(default_factory=list)

    @property
    def end(self) -> int:
        """The index after the last block."""
        return self.first + len(self.ids)

    @property
    def references(self) -> list[int]:
        """The blocks that the holder refers to: its own, and the cached twins of them."""
        return self.ids + [cached for own, cached in zip(self.ids, self.path, strict=False) if own != cached]


@dataclass(slots=True, eq=False)
class BlockTable:
    """One holder's blocks. Changed by the block manager only."""

    groups: tuple[GroupBlocks, ...]
    capacity: int = 0  # positions below this can be written in every group without `grow`
    due: float = 0  # when so many tokens are computed there is something to `publish` or to `let_go`


@dataclass(frozen=True, slots=True)
class Growth:
    """How a table changed."""

    new_blocks: tuple[NewBlocks, ...]
    copies: tuple[tuple[int, int, int], ...]  # (group, from, to): a new block replaces a shared one, of this content
