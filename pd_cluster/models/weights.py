"""Fill a model's slots: from safetensors files, or at random from a seed."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from safetensors import SafetensorError, safe_open

from pd_cluster.errors import StartupError
from pd_cluster.models.checkpoint_files import read_header, some, weight_files
from pd_cluster.models.quantization import SCALE_NAMES, SCALES_SUFFIX
from pd_cluster.models.tensor_names import HEAD, fused_slots, match_slots, slot_name
from pd_kernels.quantized import MOST

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from pd_cluster.models.model import Model
    from pd_cluster.models.slot import Index, Slot

_DUMMY_STD = 0.02
_DUMMY_SCALE = 0.0002  # of quantized weights: their values are N(0, 100), so that hardly any becomes 0 or is cut at 448
_DTYPES = ("F64", "F32", "F16", "BF16")  # safetensors' names of the dtypes that a weight may have
_OTHER_DTYPES = {torch.float8_e4m3fn: ("F8_E4M3",), torch.uint8: ("U8",)}  # of slots of these dtypes
_POWER_DTYPES = ("F8_E8M0", "U8")  # a scale that is a power of two may be stored as its exponent, plus 127
_DUMMY_EXPONENTS = (119, 122)  # of packed weights, the latter excluded: e2m1's codes then give about N(0, 0.02)


def load_weights(model: Model, directory: Path, tied_embeddings: bool, progress: Callable[[str], None]) -> None:
    """Copy every tensor of the checkpoint into its slot, converting dtype.

    `progress` is called with "weights 3/12" for each file. Raises StartupError naming tensors that are missing,
    unknown, stored twice, or of another shape or dtype.
    """
    stored = {file: list(read_header(file)[1]) for file in weight_files(directory)}
    slots, problems = match_slots([name for names in stored.values() for name in names], model.slots, tied_embeddings)
    if any(problems.values()):
        named = "; ".join(f"{kind}: {some(names)}" for kind, names in problems.items() if names)
        raise StartupError(f"the weights in {directory} do not fit its config.json; {named}")
    for number, (file, names) in enumerate(stored.items(), 1):
        try:
            with safe_open(file, framework="pt") as tensors:
                for name in names:
                    if name in slots:
                        _fill(file, name, model.slots[slots[name]], tensors)
        except (SafetensorError, OSError) as error:
            raise StartupError(f"cannot read {file}: {error}") from error
        progress(f"weights {number}/{len(stored)}")


def fill_at_random(model: Model, seed: int) -> None:
    """Fill the slots with dummy weights: matrices and biases N(0, 0.02), norms 1.

    A quantized matrix has values N(0, 100) and equal scales that give N(0, 0.02); packed weights are random codes with
    a deviation of about 0.02. A seed gives the same weights on one kind of device: each rank draws every tensor whole,
    and keeps its part.
    """
    generators: dict[torch.device, torch.Generator] = {}
    for name in sorted(set(model.slots) - set(fused_slots(model.slots))):
        slot = model.slots[name]
        tensor = slot.tensor
        if tensor.device not in generators:
            generators[tensor.device] = torch.Generator(tensor.device).manual_seed(seed)
        generator = generators[tensor.device]
        if name.endswith("norm.weight"):
            tensor.fill_(1.0)
        elif name.endswith(SCALE_NAMES):
            for part in (slot, *slot.rest):
                part.tensor.fill_(_DUMMY_SCALE)
        elif tensor.dtype is torch.float8_e4m3fn:
            whole = torch.randn(slot.shape, device=tensor.device, generator=generator)
            slot.fill(whole.mul_(_DUMMY_STD / _DUMMY_SCALE).clamp_(-MOST, MOST).__getitem__)
        elif tensor.dtype is torch.uint8:
            least, end = _DUMMY_EXPONENTS if name.endswith(SCALES_SUFFIX) else (0, 256)
            whole = torch.empty(slot.shape, dtype=torch.uint8, device=tensor.device) if slot.index else tensor
            tensor.copy_(whole.random_(least, end, generator=generator)[slot.index])
        elif slot.index or not tensor.is_contiguous():
            whole = torch.empty(slot.shape, dtype=tensor.dtype, device=tensor.device)
            slot.fill(whole.normal_(0.0, _DUMMY_STD, generator=generator).__getitem__)
        else:
            tensor.normal_(0.0, _DUMMY_STD, generator=generator)


def stores_head(directory: Path) -> bool:
    """Whether the checkpoint has an output head of its own. Raises StartupError."""
    return any(slot_name(name) == HEAD for file in weight_files(directory) for name in read_header(file)[1])


def _fill(file: Path, name: str, slot: Slot, tensors: Any) -> None:
    """Fill a slot from an open safetensors file, of which only the slot's part is read."""
    part = tensors.get_slice(name)
    shape, dtype = part.get_shape(), part.get_dtype()
    if not slot.fits(tuple(shape)):
        raise StartupError(f"{file}: {name} is {list(shape)}, config.json implies {list(slot.shape)}")
    expected: tuple[str, ...] = _OTHER_DTYPES.get(slot.tensor.dtype, _DTYPES)
    powers = _POWER_DTYPES if name.endswith(SCALE_NAMES) else ()
    expected += powers
    if dtype not in expected:
        raise StartupError(f"{file}: {name} is stored as {dtype}, config.json implies {' or '.join(expected)}")

    def read(index: Index) -> torch.Tensor:
        tensor: torch.Tensor = part[index] if index else tensors.get_tensor(name)
        return tensor.view(torch.float8_e8m0fnu).float() if dtype in powers else tensor

    slot.fill(read)
