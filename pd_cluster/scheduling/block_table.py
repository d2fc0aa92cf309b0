"""The blocks of one holder, by KV group, in prompt order."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

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


class Aside(NamedTuple):
    """A slot that a planned step reads or writes beside the live one. It is let go of when so many are computed."""

    num_tokens: int
    slot: int
    is_checkpoint: bool = False  # it gets the state after so many tokens; else it is only read
    is_newest: bool = False  # of an answer: it takes the place of the newest one before


class Reversal(NamedTuple):
    """What a holder had before its newest step."""

    start: int
    slot: int
    spare: int | None
    source: int | None


@dataclass(slots=True, eq=False)
class StateSlots(GroupBlocks):
    """A holder's slots of a STATE group. `ids` has the live one, which its steps write, and no other holder has.

    A hit, a load and a fork put the slot that is only read there; `grow` takes a live one beside it. `first` is where
    the hit or the load was: steps do not move it.
    """

    source: int | None = None  # what the next step reads, if it is not the live slot
    reverses: bool = False  # steps that draw can be taken back, so they write to another slot than the one they read
    spare: int | None = None  # the other one
    aside: list[Aside] = field(default_factory=list)
    before: Reversal | None = None
    newest: int | None = None  # slot of the answer's newest checkpoint

    @property
    def references(self) -> list[int]:
        others = (one for one in (self.source, self.spare) if one is not None)
        return [*self.ids, *others, *(one.slot for one in self.aside)]


@dataclass(slots=True, eq=False)
class BlockTable:
    """One holder's blocks. Changed by the block manager only."""

    groups: tuple[GroupBlocks, ...]
    capacity: int = 0  # positions below this can be written in every group without `grow`
    due: float = 0  # when so many tokens are computed there is something to `publish` or to `let_go`
    branch: int = 0  # tokens: as far as the FULL and LATENT caches went when it was matched


@dataclass(frozen=True, slots=True)
class Growth:
    """How a table changed."""

    new_blocks: tuple[NewBlocks, ...]
    copies: tuple[tuple[int, int, int], ...]  # (group, from, to): a new block replaces a shared one, of this content
