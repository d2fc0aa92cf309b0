"""The rows of a step that have adapters, as its inputs."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from pd_kernels.lora import NO_SLOT, AdapterRows, cut_tiles, tile_rows

if TYPE_CHECKING:
    from collections.abc import Callable

    from pd_kernels.values import Ints


def adapter_rows(slots: Ints, sampled: Ints | None, move: Callable[[Any], torch.Tensor]) -> AdapterRows | None:
    """Of a step that is launched; None: no row has one. `slots`: of each token. `sampled`: those that sample."""
    if (slots == NO_SLOT).all():
        return None
    order, tiles = (move(part.astype(np.int32)) for part in cut_tiles(slots, len(slots)))
    tail = None if sampled is None else adapter_rows(slots[sampled], None, move)
    return AdapterRows(order, tiles, tile_rows(len(slots)), tail)


def fill_rows(places: tuple[Any, Any], slots: Ints) -> None:
    """Write the rows of a captured step into its `order` and padded `tiles`."""
    order, tiles = cut_tiles(slots, len(places[0]))
    places[0][: len(order)], places[1][: len(tiles)] = order, tiles


def placed_rows(places: tuple[torch.Tensor, torch.Tensor]) -> AdapterRows:
    """Of a captured step, in which every row samples."""
    order, tiles = (part.to(torch.int32) for part in places)
    return AdapterRows(order, tiles, tile_rows(len(order)))
