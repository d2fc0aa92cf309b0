"""The bytes that an expert's packed weight needs on a device: of the largest layout of a kernel. Imports no torch."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

MXFP4_TILE = 192, 192  # outputs and inputs of a tile of `mxfp4_tiles`: 2,880 and 5,760 are multiples of 192


def _mxfp4_room(num_outputs: int, num_inputs: int) -> tuple[int, int]:
    lines, step = MXFP4_TILE
    num_tiles = -(-num_outputs // lines) * -(-num_inputs // step)
    return num_tiles * lines * step // 2, num_tiles * lines * step // 32


ROOMS: Mapping[str, Callable[[int, int], tuple[int, int]]] = {"mxfp4": _mxfp4_room}
"""By a form's name: outputs and inputs -> bytes of the blocks and of the scales, at least those of the form itself."""
