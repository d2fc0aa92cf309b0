"""What a step computed, on its way from the cache to the store."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from pd_connectors.block_staging import Gathered
    from pd_connectors.head_parts import HeadPart
    from pd_connectors.store import ObjectName


@dataclass(frozen=True, slots=True)
class Offered:
    """A block of one group."""

    names: list[ObjectName]  # of its objects, as `parts`
    parts: tuple[HeadPart, ...]
    copy: Gathered
    index: int  # in the copy


@dataclass(frozen=True, slots=True)
class Parcel:
    """The blocks of one call."""

    blocks: list[Offered]
    num_bytes: int


def batches(blocks: Sequence[Offered], size: int) -> Iterator[Sequence[Offered]]:
    """The blocks, at most `size` at a time."""
    for start in range(0, len(blocks), size):
        yield blocks[start : start + size]
