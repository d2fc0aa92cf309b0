"""Makes a decoder's weights: tensors, the slots that fill them, and the linears that multiply with them."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from pd_cluster.models.linear import Linear
from pd_cluster.models.slot import Slot

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from pd_kernels.backends import Kernels


class Parameters:
    """Makes a decoder's weights and notes which tensors of the checkpoint fill them."""

    def __init__(
        self, kernels: Kernels, dtype: torch.dtype, device: torch.device, *, offset_norms: bool = False
    ) -> None:
        """`offset_norms`: the checkpoint stores the weight of each norm minus 1.

        The slots add 1, and these weights are float32 or wider.
        """
        self.slots: dict[str, Slot] = {}  # by the name of the checkpoint's tensor
        self.linears: dict[str, list[Linear]] = {}  # by kind; those of one kind have one shape
        self._kernels = kernels
        self._dtype, self._device = dtype, device
        self._offset_norms = offset_norms

    def tensor(self, name: str, *shape: int, wide: bool = False) -> torch.Tensor:
        """Allocate a weight of `shape` that the checkpoint's tensor `name` fills.

        `wide`: in float32 or more, whatever the model's dtype.
        """
        dtype = torch.promote_types(self._dtype, torch.float32) if wide else self._dtype
        tensor = torch.empty(shape, dtype=dtype, device=self._device)
        self.slots[name] = Slot(tensor, shape)
        return tensor

    def norm(self, name: str, size: int) -> torch.Tensor:
        """Allocate the weight [size] of the norm `name`."""
        if not self._offset_norms:
            return self.tensor(name, size)
        dtype = torch.promote_types(self._dtype, torch.float32)
        tensor = torch.empty(size, dtype=dtype, device=self._device)
        self.slots[name] = Slot(tensor, (size,), offset=1.0)
        return tensor

    def linear(
        self,
        kind: str,
        parts: Mapping[str, int],
        num_inputs: int,
        *,
        bias: bool = False,
        activate: Callable[[torch.Tensor], torch.Tensor] | None = None,
        adds: bool = False,
    ) -> Linear:
        """Allocate a Linear merged from the checkpoint's `parts` (name without ".weight" -> rows), in this order.

        `kind`: a name for the linears of this shape, one in each layer. `activate`, `adds`: see Linear.
        """
        num_rows = sum(parts.values())
        weight = self._empty(num_rows, num_inputs)
        offsets = self._empty(num_rows) if bias else None
        start = 0
        for name, rows in parts.items():
            self.slots[f"{name}.weight"] = Slot(weight[start : start + rows], (rows, num_inputs))
            if offsets is not None:
                self.slots[f"{name}.bias"] = Slot(offsets[start : start + rows], (rows,))
            start += rows
        return self._add(kind, Linear(weight, offsets, self._kernels, activate, adds=adds))

    def stacked(self, stacks: Sequence[Sequence[str]], num_rows: int, num_inputs: int) -> torch.Tensor:
        """[len(stacks), parts * num_rows, num_inputs]: each stack names its parts, tensors [num_rows, num_inputs]."""
        tensor = self._empty(len(stacks), len(stacks[0]) * num_rows, num_inputs)
        for stack, names in zip(tensor, stacks, strict=True):
            for name, part in zip(names, stack.split(num_rows), strict=True):
                self.slots[name] = Slot(part, (num_rows, num_inputs))
        return tensor

    def tied_linear(self, kind: str, weight: torch.Tensor) -> Linear:
        """Make a Linear with a weight that another part of the model has allocated."""
        return self._add(kind, Linear(weight, None, self._kernels))

    def _add(self, kind: str, linear: Linear) -> Linear:
        self.linears.setdefault(kind, []).append(linear)
        return linear

    def _empty(self, *shape: int) -> torch.Tensor:
        return torch.empty(shape, dtype=self._dtype, device=self._device)
