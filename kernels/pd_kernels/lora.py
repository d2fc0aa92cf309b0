"""Adapters (LoRA) of a step's rows: what they are given as, and what adds them, in torch.

A row with an adapter gets B A x more than the weight gives it. Rows are sorted by slot and cut into tiles of one slot.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from pd_kernels.torch_ops import silu_and_mul
from pd_kernels.values import HalfNormed

if TYPE_CHECKING:
    from collections.abc import Callable

    import torch

    from pd_kernels.values import Ints

RANK_STEP = 16  # a slot's matrices have a multiple of so many ranks, those after the adapter's own are 0
# Rows of a step up to which tiles are small, and shrinks run beside products. A layer of 512 rows takes 307 us (8B, one
# H200), and 49 more with such tiles, 96 with large ones; one of 2,048 takes 1,059, and 133 or 163 more
FEW = 2048
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
        return a.view(self.num_parts, rank, self.num_inputs), b.view(self.bounds[-1], rank)


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


def shrink(x: torch.Tensor | HalfNormed, matrices: AdapterMatrices, rows: AdapterRows) -> torch.Tensor:
    """A x of the rows that have an adapter, for `expand`. `x` [T, in]."""
    x = x.normed() if isinstance(x, HalfNormed) else x
    low = x.new_zeros(len(rows.order), matrices.num_parts, matrices.max_rank)
    for slot, start, end in rows.tiles.tolist():
        if slot >= 0:
            a, _ = matrices.of(matrices.memory[slot], rank := int(matrices.ranks[slot]))
            part = x[rows.order[start:end].long()] @ a.flatten(0, 1).T
            low[start:end, :, :rank] = part.view(len(part), len(a), rank)
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
