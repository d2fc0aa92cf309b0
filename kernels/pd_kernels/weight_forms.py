"""Weights of a few bits: the forms in which checkpoints store them, and what gives back their numbers.

A form is a row of FORMS. Its `take` unpacks a tile, so a product that widens its tiles serves every form.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import prod
from typing import TYPE_CHECKING

import torch

from pd_kernels.packed_room import ROOMS

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from typing import Self


@dataclass(frozen=True, slots=True)
class WeightForm:
    """How numbers are packed: `group` consecutive inputs of a row share `size` bytes and one scale."""

    name: str
    group: int
    size: int
    take: Callable[[torch.Tensor, torch.Tensor, torch.dtype], torch.Tensor]
    """`blocks` uint8 [..., groups, size] and `scales` uint8 [..., groups] -> numbers [..., groups * group]."""


@dataclass(frozen=True, slots=True)
class PackedWeight:
    """A weight [E, out, in] of each expert, packed in one form."""

    form: WeightForm
    blocks: torch.Tensor  # uint8 [E, out, in / group, size]
    scales: torch.Tensor  # uint8 [E, out, in / group]
    room: tuple[torch.Tensor, torch.Tensor] | None = None  # uint8: of ROOMS, both begin with blocks and scales

    @classmethod
    def empty(cls, form: WeightForm, shape: tuple[int, ...], device: torch.device, *, has_room: bool) -> Self:
        """Allocate a weight [E, out, in]. `has_room`: a kernel can put it into another layout in place."""
        of_scales = (*shape[:2], shape[2] // form.group)
        shapes = (*of_scales, form.size), of_scales
        sizes = [shape[0] * size for size in ROOMS[form.name](*shape[1:])] if has_room else map(prod, shapes)
        first, second = (torch.empty(size, dtype=torch.uint8, device=device) for size in sizes)
        blocks, scales = (room[: prod(part)].view(part) for room, part in zip((first, second), shapes, strict=True))
        return cls(form, blocks, scales, (first, second) if has_room else None)

    @property
    def shape(self) -> torch.Size:
        """[E, out, in]."""
        return torch.Size((*self.scales.shape[:2], self.scales.shape[2] * self.form.group))

    def expert(self, number: int, dtype: torch.dtype) -> torch.Tensor:
        """The weight [out, in] of one expert."""
        return self.form.take(self.blocks[number], self.scales[number], dtype)


_E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)  # the numbers of codes 0 to 7; bit 3 is the sign


def _take_mxfp4(blocks: torch.Tensor, scales: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """e2m1 numbers, of each byte the low half first, times 2 ** (scale - 127); scale 255 is NaN.

    Source: OCP Microscaling Formats (MX) Specification 1.0, sections 5.3.3 and 5.4.1. Exact in bfloat16.
    """
    table = torch.tensor((*_E2M1, *(-number for number in _E2M1)), dtype=torch.float32, device=blocks.device)
    codes = torch.stack((blocks & 15, blocks >> 4), dim=-1).flatten(-2)
    return (table[codes.int()] * scales.view(torch.float8_e8m0fnu).float()[..., None]).flatten(-2).to(dtype)


MXFP4 = WeightForm("mxfp4", group=32, size=16, take=_take_mxfp4)
FORMS: Mapping[str, WeightForm] = {form.name: form for form in (MXFP4,)}
