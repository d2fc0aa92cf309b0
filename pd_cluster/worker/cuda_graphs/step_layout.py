"""Where the inputs of a captured step lie in the one array that the host buffer moves to a fixed place."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Mapping

    from pd_kernels.attention import Replayable
    from pd_kernels.chunk_tiles import ChunkTiles
    from pd_kernels.values import StepSize


class StepPlaces(NamedTuple):
    """A step's parts: numpy views on the host, torch views on the device. T, S: its size's num_tokens, num_seqs."""

    rows: Any  # [T]: each token's row in InputBatch
    token_ids: Any  # [T], or LATE
    positions: Any  # [T]
    slots: Any  # [T]
    owners: Any  # [S]: rows in InputBatch of the sequences that sample
    sampled: Any  # [S]: places of their last tokens among the T
    temperatures: Any  # float32 in the first half of [S]; 0 where the row is drawn outside the graph
    seeds: Any  # [S]: see Draws, as for `lengths`
    lengths: Any  # [S]
    decode_lens: Any  # [S], [0] without decodes: see StepOnDevice, as for the rest
    seq_lens: Any  # [S + 1]
    query_starts: Any  # [S + 2]
    tiles: Mapping[ChunkTiles, Any]  # [2, count] of each that some KV group has


@dataclass(frozen=True, slots=True)
class StepLayout:
    """The parts' places in steps of one size."""

    size: StepSize
    replayables: tuple[Replayable, ...]  # by KV group

    @property
    def length(self) -> int:
        """Length of the array."""
        return sum(self._lengths)

    @property
    def _lengths(self) -> tuple[int, ...]:
        num_tokens, num_seqs = self.size.num_tokens, self.size.num_seqs
        num_decodes = num_seqs if self.size.has_decodes else 0
        return (
            *[num_tokens] * 4, *[num_seqs] * 5, num_decodes, num_seqs + 1, num_seqs + 2,
            *(2 * tiles.count for tiles in self._tiles),
        )  # fmt: skip

    @property
    def _tiles(self) -> tuple[ChunkTiles, ...]:
        """Those of the groups, each once."""
        return tuple(dict.fromkeys(replayable.tiles for replayable in self.replayables))

    def places(self, fields: Any) -> StepPlaces:
        """Views into `fields` [1, length]."""
        ends = (0, *accumulate(self._lengths))
        parts, kinds = [fields[0, start:end] for start, end in pairwise(ends)], self._tiles
        places = [part.reshape(2, -1) for part in parts[-len(kinds) :]]
        return StepPlaces._make((*parts[: -len(kinds)], dict(zip(kinds, places, strict=True))))
