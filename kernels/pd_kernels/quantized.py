"""Weights and rows in float8 (e4m3fn), with the scales that give back their values."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeAlias, Union

if TYPE_CHECKING:
    import torch

BLOCK = 128  # rows and columns of a block that shares a scale (DeepSeek-V3, arXiv 2412.19437, section 3.3.2)
MOST = 448.0  # the greatest value of e4m3fn: the greatest number of a group becomes this value
LEAST = 1e-12  # a group is scaled as if its greatest number were at least this: the scale of zeros is not 0


@dataclass(frozen=True, slots=True)
class QuantizedWeight:
    """A weight [..., out, in], or one of each expert. Number = value * its scale.

    There are two kinds. Blocks: 128 x 128 numbers share a scale, blocks at the end are smaller. Channels: a row has one
    scale. A weight with one scale for the whole tensor is a weight of channels with equal scales.
    """

    values: torch.Tensor  # float8_e4m3fn [..., out, in]
    scales: torch.Tensor  # float32; blocks: [..., ceil(out / 128), ceil(in / 128)]; channels: [..., out, 1]
    is_blocks: bool

    @property
    def shape(self) -> torch.Size:
        return self.values.shape

    @property
    def device(self) -> torch.device:
        return self.values.device

    @property
    def group(self) -> int:
        """Inputs of a row that share a scale when the row is quantized for a product with this weight."""
        return BLOCK if self.is_blocks else self.values.shape[-1]

    def to(self, device: torch.device) -> QuantizedWeight:
        """The same weight on another device."""
        return QuantizedWeight(self.values.to(device), self.scales.to(device), self.is_blocks)

    def expert(self, number: int) -> QuantizedWeight:
        """The weight [out, in] of one expert."""
        return QuantizedWeight(self.values[number], self.scales[number], self.is_blocks)

    def widened(self, dtype: torch.dtype) -> torch.Tensor:
        """The numbers, of a weight [out, in]."""
        scales, (num_outputs, num_inputs) = self.scales, self.values.shape
        if self.is_blocks:
            scales = scales.repeat_interleave(BLOCK, 0)[:num_outputs].repeat_interleave(BLOCK, 1)[:, :num_inputs]
        return self.values.float().mul_(scales).to(dtype)

    def rows(self, start: int, end: int) -> QuantizedWeight:
        """The rows from `start` to `end`. Raises ValueError if `start` is inside a block."""
        height = BLOCK if self.is_blocks else 1
        if start % height:
            raise ValueError(f"row {start} is not the first of a block of {height} rows")
        scales = self.scales[..., start // height : -(-end // height), :]
        return QuantizedWeight(self.values[..., start:end, :], scales, self.is_blocks)


@dataclass(frozen=True, slots=True)
class QuantizedRows:
    """Rows [T, in], quantized when they are computed. Number = value * its scale."""

    values: torch.Tensor  # float8_e4m3fn [T, in]
    scales: torch.Tensor  # float32 [T, ceil(in / group)]
    group: int  # inputs that share a scale: 128, or all

    def widened(self, dtype: torch.dtype) -> torch.Tensor:
        """The numbers."""
        scales = self.scales.repeat_interleave(self.group, 1)[:, : self.values.shape[1]]
        return self.values.float().mul_(scales).to(dtype)


@dataclass(frozen=True, slots=True)
class RowsTwice:
    """Rows [T, in] of a norm: a mixture's router reads plain rows, the experts quantized ones."""

    plain: torch.Tensor
    quantized: QuantizedRows


Weight: TypeAlias = Union["torch.Tensor", QuantizedWeight]
