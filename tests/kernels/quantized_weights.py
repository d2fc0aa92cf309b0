"""Random weights in float8, quantized as checkpoints are."""

from __future__ import annotations

import torch

from pd_kernels.quantized import BLOCK, MOST, QuantizedWeight


def quantize_weight(weight: torch.Tensor, *, is_blocks: bool) -> QuantizedWeight:
    """`weight` [..., out, in] in blocks or channels, with the least scales that the values can hold."""
    height, width = (BLOCK, BLOCK) if is_blocks else (1, weight.shape[-1])
    *_, num_rows, size = weight.shape
    padded = torch.nn.functional.pad(weight.float(), (0, -size % width, 0, -num_rows % height))
    shape = *padded.shape[:-2], padded.shape[-2] // height, height, padded.shape[-1] // width, width
    blocks = padded.view(shape)
    scales = blocks.abs().amax((-3, -1)).clamp(min=1e-9) / MOST
    values = (blocks / scales[..., :, None, :, None]).clamp(-MOST, MOST).to(torch.float8_e4m3fn)
    whole = values.flatten(-4, -3).flatten(-2)[..., :num_rows, :size]
    return QuantizedWeight(whole.contiguous(), scales, is_blocks)


def random_quantized(*shape: int, is_blocks: bool, seed: int = 0) -> QuantizedWeight:
    """N(0, 1 / in), rows of different magnitudes."""
    random = torch.Generator().manual_seed(seed)
    weight = torch.randn(shape, generator=random) * shape[-1] ** -0.5
    return quantize_weight(weight * torch.rand(*shape[:-1], 1, generator=random).exp(), is_blocks=is_blocks)
