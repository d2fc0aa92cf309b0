"""Makes a decoder's weights: tensors, the slots that fill them, and the linears that multiply with them."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from pd_cluster.errors import StartupError
from pd_cluster.models.linear import Linear
from pd_cluster.models.quantization import QuantizationSpec, Scales
from pd_cluster.models.quantized_linear import QuantizedLinear
from pd_cluster.models.slot import Slot
from pd_kernels.quantized import BLOCK, QuantizedWeight

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from pd_kernels.backends import Kernels
    from pd_kernels.quantized import Weight


class Parameters:
    """Makes a decoder's weights and notes which tensors of the checkpoint fill them."""

    def __init__(
        self,
        kernels: Kernels,
        dtype: torch.dtype,
        device: torch.device,
        *,
        offset_norms: bool = False,
        quantization: QuantizationSpec | None = None,
    ) -> None:
        """`offset_norms`: the checkpoint stores the weight of each norm minus 1.

        The slots add 1, and these weights are float32 or wider. `quantization`: that of the checkpoint.
        """
        self.slots: dict[str, Slot] = {}  # by the name of the checkpoint's tensor
        self.linears: dict[str, list[Linear]] = {}  # by kind; those of one kind have one shape
        self._kernels = kernels
        self._dtype, self._device = dtype, device
        self._offset_norms = offset_norms
        self._quantization = quantization or QuantizationSpec(Scales.CHANNELS, ())
        self._is_quantized = quantization.selector() if quantization else lambda name: False

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

        `kind`: a name for the linears of this shape, one in each layer. `activate`, `adds`: see Linear. Raises
        StartupError if the checkpoint quantizes some of the parts, or blocks of a part do not fit the merged weight.
        """
        num_rows = sum(parts.values())
        weight = self._allocate(parts, num_rows, num_inputs)
        offsets = self._empty(num_rows) if bias else None
        start = 0
        for name, rows in parts.items():
            self._place(name, weight, start, rows)
            if offsets is not None:
                self.slots[f"{name}.bias"] = Slot(offsets[start : start + rows], (rows,))
            start += rows
        if isinstance(weight, QuantizedWeight):
            quantized = QuantizedLinear(weight, offsets, self._kernels, self._dtype, activate, adds=adds)
            return self._add(kind, quantized)
        return self._add(kind, Linear(weight, offsets, self._kernels, activate, adds=adds))

    def stacked(self, stacks: Sequence[Sequence[str]], num_rows: int, num_inputs: int) -> Weight:
        """[len(stacks), parts * num_rows, num_inputs]: each stack names its parts, modules [num_rows, num_inputs].

        Raises StartupError as `linear` does.
        """
        parts = [name for names in stacks for name in names]
        weight = self._allocate(parts, len(stacks), len(stacks[0]) * num_rows, num_inputs)
        for number, names in enumerate(stacks):
            expert = weight[number] if isinstance(weight, torch.Tensor) else weight.expert(number)
            for index, name in enumerate(names):
                self._place(name, expert, index * num_rows, num_rows)
        return weight

    def tied_linear(self, kind: str, weight: torch.Tensor) -> Linear:
        """Make a Linear with a weight that another part of the model has allocated."""
        return self._add(kind, Linear(weight, None, self._kernels))

    def _add(self, kind: str, linear: Linear) -> Linear:
        self.linears.setdefault(kind, []).append(linear)
        return linear

    def _allocate(self, names: Iterable[str], *shape: int) -> Weight:
        """Allocate the weight [..., out, in] of the checkpoint's modules `names`, quantized if they are."""
        quantized = {name: self._is_quantized(name) for name in names}
        if not any(quantized.values()):
            return self._empty(*shape)
        if not all(quantized.values()):
            plain, other = (next(name for name, value in quantized.items() if value is kind) for kind in (False, True))
            raise StartupError(
                f"quantization_config leaves out {plain}, but not {other}: they are one product, quantized or not"
            )
        *experts, rows, size = shape
        is_blocks = self._quantization.scales is Scales.BLOCKS
        of_each = (-(-rows // BLOCK), -(-size // BLOCK)) if is_blocks else (rows, 1)
        values = torch.empty(shape, dtype=torch.float8_e4m3fn, device=self._device)
        scales = torch.empty((*experts, *of_each), dtype=torch.float32, device=self._device)
        return QuantizedWeight(values, scales, is_blocks)

    def _place(self, name: str, weight: Weight, start: int, rows: int) -> None:
        """Note that the checkpoint's module `name` fills `rows` rows of `weight` [out, in] from row `start` on."""
        if isinstance(weight, torch.Tensor):
            self.slots[f"{name}.weight"] = Slot(weight[start : start + rows], (rows, weight.shape[1]))
            return
        if weight.is_blocks and start % BLOCK:
            raise StartupError(f"{name} begins at row {start} of its product, inside of a quantized block of {BLOCK}")
        part = weight.rows(start, start + rows)
        slot = self.slots[f"{name}.weight"] = Slot(part.values, tuple(part.shape))
        of_scales = slot.of_scales(name, part.scales, self._quantization.scales)
        self.slots[f"{name}.{self._quantization.tensor_name}"] = of_scales

    def _empty(self, *shape: int) -> torch.Tensor:
        return torch.empty(shape, dtype=self._dtype, device=self._device)
