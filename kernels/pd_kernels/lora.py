"""Adapters (LoRA) of a step's rows: what they are given as, and what adds them, in torch.

A row with an adapter gets B A x more than the weight gives it. Rows are sorted by slot and cut into tiles of one slot.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch

from pd_kernels.torch_ops import silu_and_mul
from pd_kernels.values import HalfNormed

if TYPE_CHECKING:
    from collections.abc import Callable

    from pd_kernels.values import Ints

RANK_STEP = 16  # a slot's matrices have a multiple of so many ranks, those after the adapter's own are 0
FEW = 256  # rows of a step up to which tiles are small
FEW_IN_LINE = 32  # up to which kernels start early, one after another; then shrinks run beside products up to FEW
NO_SLOT, NO_TILE = -1, -2
LAST = 1 << 30  # in place of no slot, to sort by


class AdapterRows(NamedTuple):
    """The rows of a step of which some have adapters."""

    order: torch.Tensor  # int32: rows, by slot, those without one last
    tiles: torch.Tensor  # int32 [n, 3]: slot or NO_SLOT or NO_TILE, first place in `order`, and the one after the last
    most: int  # rows of a tile
    tail: AdapterRows | None = None  # of the rows that sample, where only these are computed; None: none has an adapter

    @classmethod
    def of(cls, slots: Ints, sampled: Ints | None, move: Callable[[Ints], torch.Tensor]) -> AdapterRows | None:
        """Those of a step; None: no row has an adapter. `slots`: of each token. `sampled`: tokens that sample."""
        if (slots == NO_SLOT).all():
            return None
        order, tiles = (move(part.astype(np.int32)) for part in cut_tiles(slots, len(slots)))
        tail = None if sampled is None else cls.of(slots[sampled], None, move)
        return cls(order, tiles, tile_rows(len(slots)), tail)


@dataclass(frozen=True, slots=True)
class AdapterMatrices:
    """Those of one product [T, in] -> [T, out], in all slots. The product has up to three parts: runs of its outputs.

    A slot with rank r has A [parts * r, in] from element `start * r` on, then B [out, r].
    """

    memory: torch.Tensor  # [slots, elements]
    ranks: torch.Tensor  # int32 [slots]
    max_rank: int
    start: int
    num_inputs: int
    bounds: tuple[int, ...]  # of the parts: 0, the first row of the second, ..., out

    @property
    def num_parts(self) -> int:
        return len(self.bounds) - 1

    @property
    def size(self) -> int:
        """Elements for each rank."""
        return self.num_parts * self.num_inputs + self.bounds[-1]

    def of(self, memory: torch.Tensor, rank: int) -> tuple[torch.Tensor, torch.Tensor]:
        """A [parts, rank, in] and B [out, rank] in the memory of one slot."""
        start, middle = self.start * rank, (self.start + self.num_parts * self.num_inputs) * rank
        a, b = memory[start:middle], memory[middle : (self.start + self.size) * rank]
        return a.view(self.num_parts, rank, self.num_inputs), b.view(-1, rank)


def tile_rows(num_rows: int) -> int:
    """Rows of a tile in a step of so many rows."""
    return 16 if num_rows <= FEW else 64


def most_tiles(num_rows: int, num_slots: int) -> int:
    """That a step may have: of slots, and of rows without one."""
    return min(num_rows, num_rows // tile_rows(num_rows) + num_slots + 1)


def cut_tiles(slots: Ints, num_rows: int) -> tuple[Ints, Ints]:
    """The `order` and `tiles` of AdapterRows. `slots`: of each row; `num_rows`: of the step, with its padding."""
    keys = np.full(num_rows, LAST)
    keys[: len(slots)][slots >= 0] = slots[slots >= 0]
    order = np.argsort(keys, kind="stable")
    used, starts = np.unique(keys[order], return_index=True)
    most, ends = tile_rows(num_rows), [*starts[1:], num_rows]
    tiles = [
        (NO_SLOT if key == LAST else key, first, min(first + most, end))
        for key, start, end in zip(used, starts, ends, strict=True)
        for first in range(start, end, most)
    ]
    return order, np.array(tiles, np.int64).reshape(-1, 3)


def put_rows(places: tuple[Any, Any], slots: Ints, num_rows: int) -> None:
    """Write what `cut_tiles` gives where a captured step reads it."""
    order, tiles = cut_tiles(slots, num_rows)
    places[0][:], places[1][:, 0], places[1][: len(tiles)] = order, NO_TILE, tiles


def placed_rows(places: tuple[torch.Tensor, torch.Tensor] | None) -> AdapterRows | None:
    """What `put_rows` has put there, on the device."""
    if places is None:
        return None
    order, tiles = (part.to(torch.int32) for part in places)
    return AdapterRows(order, tiles, tile_rows(len(order)))


def shrink(x: torch.Tensor | HalfNormed, matrices: AdapterMatrices, rows: AdapterRows) -> torch.Tensor:
    """A x of the rows that have an adapter, for `expand`. `x` [T, in]."""
    x = x.normed() if isinstance(x, HalfNormed) else x
    low = x.new_zeros(len(rows.order), matrices.num_parts, matrices.max_rank)
    for slot, start, end in rows.tiles.tolist():
        if slot >= 0:
            a, _ = matrices.of(matrices.memory[slot], rank := int(matrices.ranks[slot]))
            low[start:end, :, :rank] = (x[rows.order[start:end].long()] @ a.flatten(0, 1).T).view(-1, len(a), rank)
    return low


def expand(
    low: torch.Tensor, y: torch.Tensor, matrices: AdapterMatrices, rows: AdapterRows, is_gated: bool = False
) -> torch.Tensor:
    """Add B A x to `y` [T, out], in place. `low`: of `shrink`. -> y.

    `is_gated`: the parts of y are gates and ups -> silu_and_mul of the sum, of all rows. y may change.
    """
    for slot, start, end in rows.tiles.tolist():
        if slot >= 0:
            _, b = matrices.of(matrices.memory[slot], rank := int(matrices.ranks[slot]))
            for part, (first, last) in enumerate(pairwise(matrices.bounds)):
                y[rows.order[start:end].long(), first:last] += low[start:end, part, :rank] @ b[first:last].T
    return silu_and_mul(y) if is_gated else y
