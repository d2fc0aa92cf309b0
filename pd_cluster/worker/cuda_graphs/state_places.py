"""Where a captured step with prompts has the inputs of its states, and how many pieces a step of its size may touch.

The host computes where pieces begin, because it knows all lengths before the launch. So they come with the step's other
inputs in one copy, and the graph only makes int32 of them. Programs of pieces and sequences that a step does not have
return at once.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from pd_kernels.state import NONE, PIECE, Prompts, StatePlan

if TYPE_CHECKING:
    from pd_kernels.values import StepSize

_ALIGNED = 4  # int32 of a part begin at multiples of 16 bytes: kernels are compiled for each alignment of a pointer


class StatePlaces(NamedTuple):
    """Parts of a step's array, as StepPlaces are; StatePlan says what they mean. S: the size's num_seqs.

    Sequences that the step does not have are empty: they have a slot that no sequence has, and no piece.
    """

    whole: Any  # all of the parts
    sources: Any  # [S]
    slots: Any  # [S]
    positions: Any  # [S]
    piece_starts: Any  # [S + 1]
    saves: Any  # [most pieces]
    num_decodes: Any  # [1]: sequences at the front that have one token each


@dataclass(frozen=True, slots=True)
class StateRoom:
    """The states of captured steps of one size that has chunks."""

    num_seqs: int
    no_slot: int  # the slot that no sequence has
    most_prompts: int
    prompt_pieces: int  # the most that these touch
    bounds: tuple[tuple[int, int], ...]  # start and end of each part in the array that `places` divides
    length: int  # of this array

    @classmethod
    def of(cls, size: StepSize, no_slot: int) -> StateRoom:
        pieces = most_pieces(size.num_tokens, size.num_chunks)
        most = size.num_seqs - size.num_chunks + pieces
        counts = (*[size.num_seqs] * 3, size.num_seqs + 1, most, 1)
        *begins, length = accumulate((-(-count // _ALIGNED) * _ALIGNED for count in counts), initial=0)
        bounds = tuple((begin, begin + count) for begin, count in zip(begins, counts, strict=True))
        return cls(size.num_seqs, no_slot, size.num_chunks, pieces, bounds, length)

    def places(self, whole: Any) -> StatePlaces:
        """Divide `whole` [length] into views."""
        return StatePlaces(whole, *(whole[begin:end] for begin, end in self.bounds))

    def pad(self, places: StatePlaces) -> None:
        """Turn zeroed places into a step without sequences."""
        places.sources[:] = places.saves[:] = NONE
        places.slots[:] = self.no_slot

    def plan(self, places: StatePlaces, query_starts: torch.Tensor) -> StatePlan:
        """Plan the states. `query_starts`: int64, from MixedPlaces."""
        _, sources, slots, positions, piece_starts, saves, first = self.places(places.whole.to(torch.int32))
        starts = query_starts[: self.num_seqs + 1].to(torch.int32)
        prompts = Prompts(first, self.most_prompts, self.prompt_pieces)
        return StatePlan(sources, slots, starts, positions, saves, piece_starts, prompts=prompts)


def most_pieces(num_tokens: int, num_chunks: int) -> int:
    """The most pieces that chunks of so many tokens touch: one of n tokens touches at most (n + 126) // 64."""
    return (num_tokens + 2 * (PIECE - 1) * num_chunks) // PIECE
