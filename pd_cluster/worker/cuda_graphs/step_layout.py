"""Where the numbers of a captured step lie, in one array that staging moves to a fixed place."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from pd_kernels.backends import Replayable
    from pd_kernels.values import StepSize


class StepPlaces(NamedTuple):
    """A step's parts, as numpy's views on the host or torch's on the device. T, S: of its StepSize."""

    rows: Any  # [T]: of InputBatch, each token's sequence
    token_ids: Any  # [T], or LATE
    positions: Any  # [T]
    slots: Any  # [T]
    owners: Any  # [S]: of InputBatch, the sequences that sample
    sampled: Any  # [S]: their tokens
    temperatures: Any  # float32 in the first half of [S], as are the next two: see Draws; 0 where that does not say all
    seeds: Any  # [S]
    lengths: Any  # [S]
    decode_lens: Any  # [S], as are the rest: see StepOnDevice; [0] without decodes
    seq_lens: Any  # [S + 1]
    query_starts: Any  # [S + 2]
    tiles: Any  # [2, num_tiles]


@dataclass(frozen=True, slots=True)
class StepLayout:
    """Of steps of one size."""

    size: StepSize
    attention: Replayable

    @property
    def length(self) -> int:
        """Numbers in all."""
        return sum(self._lengths)

    @property
    def _lengths(self) -> tuple[int, ...]:
        num_tokens, num_seqs = self.size.num_tokens, self.size.num_seqs
        num_decodes = num_seqs if self.size.has_decodes else 0
        return (
            *[num_tokens] * 4, *[num_seqs] * 5, num_decodes, num_seqs + 1, num_seqs + 2, 2 * self.attention.num_tiles
        )  # fmt: skip

    def places(self, fields: Any) -> StepPlaces:
        """Views into `fields` [1, length]."""
        ends = (0, *accumulate(self._lengths))
        *parts, tiles = (fields[0, start:end] for start, end in pairwise(ends))
        return StepPlaces._make((*parts, tiles.reshape(2, -1)))
