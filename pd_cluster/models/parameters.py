"""Makes a decoder's weights: tensors, the slots that fill them, and the linears that multiply with them."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch

from pd_cluster.errors import StartupError
from pd_cluster.models.linear import Linear
from pd_cluster.models.linear_part import LinearPart
from pd_cluster.models.model_share import ModelShare
from pd_cluster.models.quantization import BLOCKS_SUFFIX, SCALES_SUFFIX, QuantizationSpec, Scales
from pd_cluster.models.quantized_linear import QuantizedLinear
from pd_cluster.models.shard import Cut, RowRuns
from pd_cluster.models.slot import Slot
from pd_kernels.quantized import BLOCK, QuantizedWeight
from pd_kernels.weight_forms import FORMS, PackedWeight

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from pd_kernels.backends import Kernels
    from pd_kernels.biased_experts import ExpertsWeight
    from pd_kernels.quantized import Weight


class Stacks(NamedTuple):
    """Modules of the checkpoint that are parts of one weight [experts, out, in]."""

    plain: Sequence[Sequence[str]]  # the parts of each expert, one below the other
    joined: Sequence[str]  # the parts of `num_joined` further experts, which lie beside each other in these modules
    num_joined: int
    dim: int  # along which they lie: 0 rows, 1 inputs


class Parameters:
    """Makes a decoder's weights and notes which tensors of the checkpoint fill them."""

    def __init__(
        self,
        kernels: Kernels,
        dtype: torch.dtype,
        device: torch.device,
        *,
        offset_norms: bool = False,
        wide_norms: bool = False,
        quantization: QuantizationSpec | None = None,
        share: ModelShare | None = None,
    ) -> None:
        """`offset_norms`: the checkpoint stores the weight of each norm minus 1, and the slots add 1.

        The weights of norms are float32 or wider with it, or with `wide_norms`. `quantization`: that of the checkpoint.
        `share`: the rank that has these weights; None: the only one.
        """
        self.slots: dict[str, Slot] = {}  # by the name of the checkpoint's tensor
        self.linears: dict[str, list[Linear]] = {}  # by kind; those of one kind have one shape
        self.parts: dict[str, LinearPart] = {}  # of the linears, by the name of the checkpoint's module
        self._to_widen: list[tuple[QuantizedWeight, range, torch.Tensor]] = []  # read, rows of it, to be filled
        self._kernels = kernels
        self._dtype, self._device = dtype, device
        self._offset_norms, self._wide_norms = offset_norms, wide_norms or offset_norms
        self._share = share or ModelShare()
        self._quantization = quantization or QuantizationSpec(Scales.CHANNELS, ())
        self._is_quantized = quantization.selector() if quantization else lambda name: False

    def tensor(self, name: str, *shape: int, wide: bool = False, own: range | RowRuns | None = None) -> torch.Tensor:
        """Allocate a weight of `shape` that the checkpoint's tensor `name` fills.

        `wide`: in float32 or more, whatever the model's dtype. `own`: the parts of the first dimension that this rank
        has; None: all.
        """
        dtype = torch.promote_types(self._dtype, torch.float32) if wide else self._dtype
        runs = own.parts if isinstance(own, RowRuns) else (range(shape[0]) if own is None else own,)
        tensor = torch.empty((sum(map(len, runs)), *shape[1:]), dtype=dtype, device=self._device)
        places = torch.split(tensor, [len(run) for run in runs])
        parts = [Slot(place, shape, start=run.start) for place, run in zip(places, runs, strict=True)]
        self.slots[name] = Slot.of_parts(parts)
        return tensor

    def merged(self, parts: Mapping[str, int], size: int) -> torch.Tensor:
        """Allocate [all rows, size] in float32 or more, which the checkpoint's tensors `parts` (name -> rows) fill."""
        dtype = torch.promote_types(self._dtype, torch.float32)
        tensor = torch.empty((sum(parts.values()), size), dtype=dtype, device=self._device)
        for (name, rows), place in zip(parts.items(), torch.split(tensor, list(parts.values())), strict=True):
            self.slots[name] = Slot(place, (rows, size))
        return tensor

    def are_alike(self, names: Iterable[str]) -> bool:
        """Whether the checkpoint quantizes all of its modules `names`, or none."""
        return len({self._is_quantized(name) for name in names}) == 1

    def can_divide(self, name: str, size: int) -> bool:
        """Whether the module `name` can be several of `size` rows or inputs: no scale may be of numbers of two."""
        return not self._is_quantized(name) or (self._quantization.scales is Scales.BLOCKS and not size % BLOCK)

    def fused(self, name: str, shape: tuple[int, int, int], own: range, form: str) -> ExpertsWeight:
        """[len(own), out, in] of experts that are one tensor of the checkpoint: packed in a form, or else [E, in, out].

        `shape`: [E, out, in]. `form`: a row of FORMS, or "". Raises StartupError if a row is no multiple of its groups.
        """
        num_experts, num_outputs, num_inputs = shape
        if not form:
            weight = torch.empty((len(own), num_outputs, num_inputs), dtype=self._dtype, device=self._device)
            self.slots[name] = Slot(weight.transpose(1, 2), (num_experts, num_inputs, num_outputs), start=own.start)
            return weight
        packing = FORMS[form]
        if num_inputs % packing.group:
            raise StartupError(f"{name}: {num_inputs} inputs are no multiple of {packing.group}, which share a scale")
        has_room = self._kernels.needs_room(packing, self._dtype, self._device)
        packed = PackedWeight.empty(packing, (len(own), num_outputs, num_inputs), self._device, has_room=has_room)
        for suffix, part in ((BLOCKS_SUFFIX, packed.blocks), (SCALES_SUFFIX, packed.scales)):
            self.slots[f"{name}{suffix}"] = Slot(part, (num_experts, *part.shape[1:]), start=own.start)
        return packed

    def norm(self, name: str, size: int | Cut) -> torch.Tensor:
        """Allocate the weight [size] of the norm `name`."""
        cut = Cut.of(size)
        dtype = torch.promote_types(self._dtype, torch.float32) if self._wide_norms else self._dtype
        tensor = torch.empty(len(cut), dtype=dtype, device=self._device)
        offset = 1.0 if self._offset_norms else 0.0
        self.slots[name] = Slot(tensor, (cut.total,), start=cut.part.start, offset=offset)
        return tensor

    def linear(
        self,
        kind: str,
        parts: Mapping[str, int | Cut | RowRuns],
        num_inputs: int | Cut,
        *,
        bias: bool = False,
        activate: Callable[[torch.Tensor], torch.Tensor] | None = None,
        adds: bool = False,
    ) -> Linear:
        """Allocate a Linear merged from the checkpoint's `parts` (name without ".weight" -> rows), in this order.

        With a part of the inputs the Linear leaves a partial sum, to which rank 0 adds the bias. `kind`: a name for the
        linears of this shape, one in each layer. `activate`, `adds`: see Linear. Raises StartupError if the checkpoint
        quantizes some of the parts, or blocks of a part do not fit the merged weight.
        """
        rows = {name: size if isinstance(size, RowRuns) else Cut.of(size) for name, size in parts.items()}
        inputs = Cut.of(num_inputs)
        num_rows = sum(map(len, rows.values()))
        weight = self._allocate(parts, num_rows, len(inputs))
        reduce = self._share.reduce if inputs.is_part else None
        has_bias = bias and (reduce is None or not self._share.shard.rank)
        offsets = self._empty(num_rows) if has_bias else None
        start, index = 0, len(self.linears.get(kind, ()))
        for name, cut in rows.items():
            self.parts[name] = LinearPart(kind, index, start, cut, inputs)
            self._place(name, weight, start, cut.cuts if isinstance(cut, RowRuns) else (cut,), inputs)
            if bias:
                assert isinstance(cut, Cut), "no model has a bias in runs"
                part = self._empty(0) if offsets is None else offsets[start : start + len(cut)]
                self.slots[f"{name}.bias"] = Slot(part, (cut.total,), start=cut.part.start)
            start += len(cut)
        if isinstance(weight, QuantizedWeight):
            quantized = QuantizedLinear(weight, offsets, self._kernels, self._dtype, activate, adds=adds, reduce=reduce)
            return self._add(kind, quantized)
        return self._add(kind, Linear(weight, offsets, self._kernels, activate, adds=adds, reduce=reduce))

    def widened(self, name: str, rows: Cut, num_inputs: int) -> torch.Tensor:
        """[len(rows), num_inputs] of the module `name`, in the model's dtype also if the checkpoint quantizes it.

        Then this rank reads all rows, because a cut may lie inside a block, and `finish` fills the tensor.
        """
        tensor = self._empty(len(rows), num_inputs)
        weight = self._allocate((name,), rows.total, num_inputs) if self._is_quantized(name) else tensor
        whole = rows if weight is tensor else Cut.of(rows.total)
        self._place(name, weight, 0, (whole,), Cut.of(num_inputs))
        if isinstance(weight, QuantizedWeight):
            self._to_widen.append((weight, rows.part, tensor))
        return tensor

    def finish(self) -> None:
        """Widen what is to be widened, and forget the slots: they are filled."""
        self.slots.clear()
        while self._to_widen:
            weight, rows, tensor = self._to_widen.pop()
            tensor.copy_(weight.widened(tensor.dtype)[rows.start : rows.stop])

    def stacked(
        self,
        stacks: Stacks,
        own: range,
        num_rows: int,
        num_inputs: int,
        fused: tuple[str, int] = ("", 0),
    ) -> Weight:
        """[len(own) + joined, parts * num_rows, num_inputs] of modules [num_rows, num_inputs].

        `own`: the plain stacks that this rank has. `fused`: a tensor of so many first stacks, which a checkpoint may
        have in place of their plain parts; see `fused_slots`. Raises StartupError as `linear` does.
        """
        parts = [name for names in stacks.plain for name in names]
        joined = stacks.joined if stacks.num_joined else ()
        weight = self._allocate(
            (*parts, *joined), len(own) + stacks.num_joined, len(stacks.plain[0]) * num_rows, num_inputs
        )
        if fused[0]:
            self._place_fused(fused[0], fused[1], own.start, weight)
        for number, names in enumerate(stacks.plain):
            place = number - own.start if number in own else 0
            rows = Cut(num_rows, range(num_rows if number in own else 0))
            expert = weight[place] if isinstance(weight, torch.Tensor) else weight.expert(place)
            for index, name in enumerate(names):
                self._place(name, expert, index * num_rows, (rows,), Cut.of(num_inputs))
        for index, name in enumerate(joined):
            self._place_joined(name, weight, stacks, index * num_rows, Cut.of(num_rows), Cut.of(num_inputs))
        return weight

    def _place_joined(self, name: str, weight: Weight, stacks: Stacks, start: int, rows: Cut, inputs: Cut) -> None:
        """Note that the module `name` fills `rows` from `start` on of the last experts of `weight`."""
        values, scales = list[Slot](), list[Slot]()
        for number in range(stacks.num_joined):
            place = number - stacks.num_joined
            expert = weight[place] if isinstance(weight, torch.Tensor) else weight.expert(place)
            cuts = [rows, inputs]
            size = len(cuts[stacks.dim])
            cuts[stacks.dim] = Cut.of_things(range(number, number + 1), stacks.num_joined, size)
            found = self._slots_of(name, expert, start, cuts[:1], cuts[1])
            values += found[0]
            scales += found[1]
        self._note(name, values, scales)

    def _place_fused(self, name: str, count: int, start: int, weight: Weight) -> None:
        """Note that a tensor `name` of `count` experts may fill those of `weight`, quantized with a scale an expert."""
        if isinstance(weight, torch.Tensor):
            self.slots[name] = Slot(weight[: count - start], (count, *weight.shape[1:]), start=start)
        elif self._quantization.scales is Scales.TENSOR:
            values, scales = weight.values[: count - start], weight.scales[: count - start]
            self.slots[name] = Slot(values, (count, *values.shape[1:]), start=start)
            self.slots[f"{name}_scale"] = Slot(scales, (count, 1, 1), start=start)

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

    def _place(self, name: str, weight: Weight, start: int, runs: Sequence[Cut], inputs: Cut) -> None:
        """Note that `runs` of rows of the checkpoint's module `name` fill `weight` [out, in] from row `start` on.

        The rows are whole, or all `inputs` are there.
        """
        self._note(name, *self._slots_of(name, weight, start, runs, inputs))

    def _slots_of(
        self, name: str, weight: Weight, start: int, runs: Sequence[Cut], inputs: Cut
    ) -> tuple[list[Slot], list[Slot]]:
        """The slots of the values and of the scales of `_place`."""
        values, scales = list[Slot](), list[Slot]()
        for rows in runs:
            shape = rows.total, inputs.total
            dim, cut = (1, inputs) if inputs.is_part else (0, rows)
            end = start + len(rows)
            if isinstance(weight, torch.Tensor):
                values.append(Slot(weight[start:end], shape, dim, cut.part.start))
            else:
                if weight.is_blocks and start % BLOCK:
                    place = f"{name} begins at row {start} of its product"
                    raise StartupError(f"{place}, inside of a quantized block of {BLOCK}")
                part = weight.rows(start, end)
                values.append(Slot(part.values, shape, dim, cut.part.start))
                scales.append(values[-1].of_scales(name, part.scales, self._quantization.scales))
            start = end
        return values, scales

    def _note(self, name: str, values: Sequence[Slot], scales: Sequence[Slot]) -> None:
        self.slots[f"{name}.weight"] = Slot.of_parts(values)
        if scales:
            self.slots[f"{name}.{self._quantization.tensor_name}"] = Slot.of_parts(scales)

    def _empty(self, *shape: int) -> torch.Tensor:
        return torch.empty(shape, dtype=self._dtype, device=self._device)
