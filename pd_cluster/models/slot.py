"""A slot: the place that a tensor of the checkpoint fills, or a part of it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from collections.abc import Callable

Index = tuple[slice, ...]  # index into a tensor of the checkpoint; (): the whole tensor


@dataclass(frozen=True, slots=True)
class Slot:
    """A parameter, or a part of a parameter, and the part of the checkpoint's tensor that fills it.

    The part is `tensor.shape[dim]` long and begins at `start`. So each of several ranks reads only its own bytes.
    """

    tensor: torch.Tensor
    shape: tuple[int, ...]  # shape of the checkpoint's tensor
    dim: int = 0
    start: int = 0
    offset: float = 0.0  # added to the values: checkpoints of some families store a norm's weight minus 1

    @property
    def index(self) -> Index:
        """The index of the part in the checkpoint's tensor; (): all of it."""
        if tuple(self.tensor.shape) == self.shape:
            return ()
        end = self.start + self.tensor.shape[self.dim]
        return (*(slice(None),) * self.dim, slice(self.start, end))

    def fill(self, read: Callable[[Index], torch.Tensor], scale: torch.Tensor | None = None) -> None:
        """Copy into `tensor` the part that `read` returns for `index`, converted to the tensor's dtype.

        `scale`: the scale of a quantized tensor, for this part and broadcast over it. The product is computed in
        float32.
        """
        part = read(self.index)
        self.tensor.copy_(part if scale is None else part.to(torch.float32) * scale)
        if self.offset:
            self.tensor.add_(self.offset)
