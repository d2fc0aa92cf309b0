"""A decoder's weights while they are made: tensors, the slots that fill them, and the linears over them."""

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
        """`offset_norms`: the checkpoint has the weights of norms less 1. Here they are whole, in float32 or more."""
        self.slots: dict[str, Slot] = {}  # by the name of the checkpoint's tensor
        self.linears: dict[str, list[Linear]] = {}  # by kind; those of one kind have one shape
        self._kernels = kernels
        self._dtype, self._device = dtype, device
        self._offset_norms = offset_norms

    def tensor(self, name: str, *shape: int, wide: bool = False) -> torch.Tensor:
        """A weight that is a tensor of the checkpoint. `wide`: in float32 or more, whatever the model's dtype."""
        dtype = torch.promote_types(self._dtype, torch.float32) if wide else self._dtype
        tensor = torch.empty(shape, dtype=dtype, device=self._device)
        self.slots[name] = Slot(tensor, shape)
        return tensor

    def norm(self, name: str, size: int) -> torch.Tensor:
        """The weight of a norm, [size]."""
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
        """A product merged from the checkpoint's `parts` (name without ".weight" -> rows), in this order."""
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
        """A product with a weight that another part of the model has made."""
        return self._add(kind, Linear(weight, None, self._kernels))

    def _add(self, kind: str, linear: Linear) -> Linear:
        self.linears.setdefault(kind, []).append(linear)
        return linear

    def _empty(self, *shape: int) -> torch.Tensor:
        return torch.empty(shape, dtype=self._dtype, device=self._device)
