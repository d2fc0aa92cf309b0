"""Which slots of the STATE group the worker's rows read and write."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from pd_kernels.state import NONE, PIECE, StatePlan
from pd_kernels.values import leading_ones

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    import numpy.typing as npt
    import torch

    from pd_cluster.scheduling.batch import NewBlocks, SequenceChunk
    from pd_cluster.worker.cuda_graphs.state_places import StatePlaces
    from pd_kernels.values import Ints


class StateRows:
    """The slot of each row. A row begins with zeros, unless its first chunk names a source."""

    def __init__(self, num_rows: int, group: int) -> None:
        """`group`: index of the STATE group, which is the last one."""
        self.group = group
        self._slots, self._sources = np.full((2, num_rows), NONE, np.int64)

    def start(self, row: int, tables: Sequence[NewBlocks]) -> None:
        """Begin a row: `tables`, by group, names its slot, or none before its first chunk does."""
        ids = tables[self.group].block_ids
        self._slots[row], self._sources[row] = (ids[-1] if ids else NONE), NONE

    def copy(self, to: Ints, of: Ints) -> None:
        """Set the rows `to` to the rows `of`, as they were before."""
        self._slots[to], self._sources[to] = self._slots[of], self._sources[of]

    def step(self, chunks: tuple[SequenceChunk, ...], rows: Ints) -> npt.NDArray[np.int64]:
        """The sources and slots [2, chunks] of a step, and what its rows go on from."""
        sources, slots = self._sources[rows], self._slots[rows]
        for index, chunk in enumerate(chunks):
            if chunk.states is not None:
                sources[index], slots[index] = chunk.states.source, chunk.states.slot
        self._slots[rows] = self._sources[rows] = slots
        return np.stack((sources, slots))

    def plan(
        self, chunks: tuple[SequenceChunk, ...], rows: Ints, lens: Ints, ends: Ints,
        move: Callable[[npt.NDArray[np.int32]], torch.Tensor],
    ) -> StatePlan:  # fmt: skip
        """The plan of a step of chunks of `lens` tokens up to `ends`."""
        positions, places = ends - lens, self.step(chunks, rows)
        piece_starts = piece_starts_of(positions, ends)
        saves = saves_of(chunks, piece_starts[:-1] - positions // PIECE, piece_starts[-1])
        starts = np.concatenate(([0], np.cumsum(lens)))
        fields = (*places, starts, positions, piece_starts)
        sources, slots, starts_, positions_, pieces = (move(one.astype(np.int32)) for one in fields)
        saved = None if saves is None else move(saves)
        return StatePlan(sources, slots, starts_, positions_, saved, pieces, is_decode=bool((lens == 1).all()))

    def fill(self, places: Ints, chunks: tuple[SequenceChunk, ...], rows: Ints, positions: Ints) -> None:
        """Write the sources, slots and saves [3, S] of a captured step of decodes at `positions`."""
        places[:2, : len(rows)] = self.step(chunks, rows)
        saves = saves_of(chunks, np.arange(len(rows)) - positions // PIECE, len(rows))
        if saves is not None:
            places[2, : len(rows)] = saves

    def fill_pieces(
        self, places: StatePlaces, chunks: tuple[SequenceChunk, ...], rows: Ints, lens: Ints, ends: Ints
    ) -> None:
        """Write the inputs of a captured step with prompts: what `plan` has for the same step."""
        count, positions = len(rows), ends - lens
        piece_starts = piece_starts_of(positions, ends)
        num_pieces = piece_starts[-1]
        assert num_pieces <= len(places.saves), "the size has no room for so many pieces"
        places.sources[:count], places.slots[:count] = self.step(chunks, rows)
        places.positions[:count], places.num_decodes[:] = positions, leading_ones(lens)
        places.piece_starts[: count + 1], places.piece_starts[count + 1 :] = piece_starts, num_pieces
        saves = saves_of(chunks, piece_starts[:-1] - positions // PIECE, num_pieces)
        if saves is not None:
            places.saves[:num_pieces] = saves


def piece_starts_of(positions: Ints, ends: Ints) -> Ints:
    """Where the pieces of each chunk [position, end) begin among those of the step, and their number [n + 1]."""
    return np.concatenate(([0], np.cumsum((ends - 1) // PIECE + 1 - positions // PIECE)))


def saves_of(chunks: tuple[SequenceChunk, ...], first_pieces: Ints, num_pieces: int) -> npt.NDArray[np.int32] | None:
    """The slots that get the states at the ends of a step's pieces; None: there are none.

    `first_pieces`: by chunk, where piece 0 of its sequence would be.
    """
    saves = None
    for index, chunk in enumerate(chunks):
        for num_tokens, slot in chunk.states.saves if chunk.states is not None else ():
            saves = np.full(num_pieces, NONE, np.int32) if saves is None else saves
            saves[first_pieces[index] + num_tokens // PIECE - 1] = slot
    return saves
