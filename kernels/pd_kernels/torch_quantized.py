"""Products with weights in float8 in library calls: any device. Same meaning and arguments as `reference`."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F

from pd_kernels.quantized import BLOCK, LEAST, MOST, QuantizedRows, RowsTwice
from pd_kernels.torch_ops import add_rms_norm, sigmoid_and_mul, silu_and_mul

if TYPE_CHECKING:
    from pd_kernels.quantized import QuantizedWeight

MOST_WIDENED = 1 << 24  # weights that are widened to float32 at a time: 64 MiB beside the model, whatever its size


def quantize(x: torch.Tensor, group: int) -> QuantizedRows:
    """See reference.quantize."""
    num_rows, size = x.shape
    groups = F.pad(x.float(), (0, -size % group)).reshape(num_rows, -(-size // group), group)
    scales = groups.abs().amax(-1).clamp_(min=LEAST)
    scales /= scales.new_full((1,), MOST)  # on a GPU, torch multiplies by 1 / MOST instead of dividing by a number
    values = (groups / scales[..., None]).clamp_(-MOST, MOST).to(torch.float8_e4m3fn)
    return QuantizedRows(values.flatten(1)[:, :size].contiguous(), scales, group)


def add_rms_norm_quantized(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float, group: int
) -> tuple[QuantizedRows, torch.Tensor]:
    """See reference.add_rms_norm_quantized. Overwrites `residual`."""
    normed, total = add_rms_norm(x, residual, weight, eps)
    return quantize(normed, group), total


def add_rms_norm_twice(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float, group: int
) -> tuple[RowsTwice, torch.Tensor]:
    """`add_rms_norm_quantized` that returns the norm too, as it was before. Overwrites `residual`."""
    normed, total = add_rms_norm(x, residual, weight, eps)
    return RowsTwice(normed, quantize(normed, group)), total


def silu_and_mul_quantized(x: torch.Tensor, group: int) -> QuantizedRows:
    """See reference.silu_and_mul_quantized."""
    return quantize(silu_and_mul(x), group)


def sigmoid_and_mul_quantized(x: torch.Tensor, gate: torch.Tensor, group: int) -> QuantizedRows:
    """`sigmoid_and_mul`, then `quantize`."""
    return quantize(sigmoid_and_mul(x, gate), group)


def quantized_product(rows: QuantizedRows, weight: QuantizedWeight, dtype: torch.dtype) -> torch.Tensor:
    """See reference.quantized_product. Widens a part of the weight at a time."""
    x = _widened(rows.values, rows.scales, rows.group)
    num_outputs, num_inputs = weight.shape
    step = max(1, MOST_WIDENED // (num_inputs * BLOCK)) * BLOCK
    products = []
    for start in range(0, num_outputs, step):
        part = weight.rows(start, min(start + step, num_outputs))
        scales = part.scales
        if part.is_blocks:
            scales = scales.repeat_interleave(BLOCK, 0)[: len(part.values)]
        products.append((x @ _widened(part.values, scales, part.group).t()).to(dtype))
    return products[0] if len(products) == 1 else torch.cat(products, dim=-1)


def multiply_quantized(x: torch.Tensor, weight: QuantizedWeight) -> torch.Tensor:
    """`x` [T, in], quantized as the weight asks, times `weight` [out, in] transposed. -> [T, out], dtype of `x`."""
    return quantized_product(quantize(x, weight.group), weight, x.dtype)


def _widened(values: torch.Tensor, scales: torch.Tensor, group: int) -> torch.Tensor:
    """`values` [rows, size] times `scales` [rows, ceil(size / group)], in float32."""
    size = values.shape[1]
    return values.float().mul_(scales if group >= size else scales.repeat_interleave(group, 1)[:, :size])
