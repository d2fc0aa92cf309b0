"""A slot: the place that a tensor of the checkpoint fills, or a part of it."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from pd_cluster.errors import StartupError
from pd_cluster.models.quantization import Scales
from pd_kernels.quantized import BLOCK

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    import torch

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
    repeats: bool = False  # the checkpoint's tensor is one number, () or [1], that fills the whole parameter
    rest: tuple[Slot, ...] = ()  # further parts of the same tensor, which lie elsewhere in it or in the parameter

    @classmethod
    def of_parts(cls, parts: Sequence[Slot]) -> Slot:
        """One slot of all `parts` of a tensor."""
        return replace(parts[0], rest=tuple(parts[1:]))

    def fits(self, shape: tuple[int, ...]) -> bool:
        """Whether the checkpoint's tensor may have `shape`."""
        return shape == self.shape or (self.repeats and shape == (1,))

    @property
    def index(self) -> Index:
        """The index of the part in the checkpoint's tensor; (): all of it."""
        if self.repeats or tuple(self.tensor.shape) == self.shape:
            return ()
        end = self.start + self.tensor.shape[self.dim]
        return (*(slice(None),) * self.dim, slice(self.start, end))

    def fill(self, read: Callable[[Index], torch.Tensor]) -> None:
        """Copy into `tensor` the part that `read` returns for `index`, converted to its dtype; then fill the `rest`.

        Nothing is read for an empty part: of an expert or a bias that only other ranks have.
        """
        for part in (self, *self.rest):
            if not part.tensor.numel():
                continue
            part.tensor.copy_(read(part.index))
            if part.offset:
                part.tensor.add_(part.offset)

    def of_scales(self, name: str, scales: torch.Tensor, kind: Scales) -> Slot:
        """The slot that fills `scales`, those of this part of a weight [out, in]; see QuantizedWeight.

        `name`: the checkpoint's module, for errors. Raises StartupError if the part begins or ends inside a block.
        """
        num_rows, num_columns = self.shape
        if kind is Scales.TENSOR:
            return Slot(scales, (), repeats=True)
        if kind is Scales.CHANNELS:
            return Slot(scales, (num_rows, 1), start=0 if self.dim else self.start)
        end, size = self.start + self.tensor.shape[self.dim], self.shape[self.dim]
        if self.start % BLOCK or (end % BLOCK and end != size):
            raise StartupError(f"{name} cannot be cut at {self.start} and {end}: its scales are of {BLOCK} x {BLOCK}")
        return Slot(scales, (-(-num_rows // BLOCK), -(-num_columns // BLOCK)), self.dim, self.start // BLOCK)
