"""Where a tensor of the checkpoint goes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from collections.abc import Callable

Index = tuple[slice, ...]  # of a checkpoint's tensor; (): all of it


@dataclass(frozen=True, slots=True)
class Slot:
    """A parameter, or a part of one, and the part of the checkpoint's tensor that fills it.

    The part is `tensor.shape[dim]` long and begins at `start`: a rank of several reads no bytes but its own.
    """

    tensor: torch.Tensor
    shape: tuple[int, ...]  # of the checkpoint's tensor
    dim: int = 0
    start: int = 0
    offset: float = 0.0  # added to what is read: norms of some families store their weight less 1

    @property
    def index(self) -> Index:
        """The part to read."""
        if tuple(self.tensor.shape) == self.shape:
            return ()
        end = self.start + self.tensor.shape[self.dim]
        return (*(slice(None),) * self.dim, slice(self.start, end))

    def fill(self, read: Callable[[Index], torch.Tensor], scale: torch.Tensor | None = None) -> None:
        """Copy the part that `read` returns for an index, converting dtype.

        `scale`: of a quantized tensor, of this part and broadcast over it; multiplied in float32.
        """
        part = read(self.index)
        self.tensor.copy_(part if scale is None else part.to(torch.float32) * scale)
        if self.offset:
            self.tensor.add_(self.offset)
