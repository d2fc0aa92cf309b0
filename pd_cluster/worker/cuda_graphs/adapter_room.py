"""Where a captured step has the rows of adapters (LoRA): those of all tokens, and of the tokens that sample."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch

from pd_kernels.lora import NO_SLOT, NO_TILE, AdapterRows, cut_tiles, most_tiles, tile_rows

if TYPE_CHECKING:
    from pd_cluster.models.adapter_slots import AdapterSlots
    from pd_kernels.values import Ints, StepSize


class RowPlaces(NamedTuple):
    """Parts of a step's array, as StepPlaces are; AdapterRows says what they mean."""

    order: Any  # [rows]
    tiles: Any  # [most tiles, 3]

    def put(self, slots: Ints) -> None:
        """Write the rows, of which the first have these slots and the others none."""
        order, tiles = cut_tiles(slots, len(self.order))
        self.order[:], self.tiles[:, 0], self.tiles[: len(tiles)] = order, NO_TILE, tiles

    def on_device(self) -> AdapterRows:
        order, tiles = (part.to(torch.int32) for part in self)
        return AdapterRows(order, tiles, tile_rows(len(order)))


class AdaptedRows(NamedTuple):
    tokens: RowPlaces
    tail: RowPlaces | None  # None: all tokens sample

    def put(self, slots: Ints, sampled: Ints | None) -> None:
        """Write the rows. `slots`: of the first tokens; others are padding. `sampled`: see MixedPlaces."""
        self.tokens.put(slots)
        if self.tail is not None and sampled is not None:
            padded = np.full(len(self.tokens.order), NO_SLOT)
            padded[: len(slots)] = slots
            self.tail.put(padded[sampled])

    def on_device(self) -> AdapterRows:
        """The graph captures this."""
        return self.tokens.on_device()._replace(tail=None if self.tail is None else self.tail.on_device())


@dataclass(frozen=True, slots=True)
class AdapterRoom:
    """The adapters of captured steps of one size."""

    counts: tuple[int, ...]  # of rows: tokens, and those that sample, if these are other rows
    num_slots: int

    @classmethod
    def of(cls, size: StepSize, slots: AdapterSlots | None) -> AdapterRoom | None:
        """None: no row of this size has an adapter."""
        if not size.has_adapters or slots is None:
            return None
        return cls((size.num_tokens, size.num_rows) if size.num_chunks else (size.num_tokens,), slots.num_slots)

    @property
    def length(self) -> int:
        """Of the array that `places` divides."""
        return sum(count + 3 * most_tiles(count, self.num_slots) for count in self.counts)

    def places(self, whole: Any) -> AdaptedRows:
        """Divide `whole` [length] into views."""
        found = list[RowPlaces]()
        for count in self.counts:
            end = count + 3 * most_tiles(count, self.num_slots)
            found.append(RowPlaces(whole[:count], whole[count:end].reshape(-1, 3)))
            whole = whole[end:]
        return AdaptedRows(found[0], found[1] if len(found) > 1 else None)
