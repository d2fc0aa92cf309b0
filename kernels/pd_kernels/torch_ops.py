"""The forward pass's functions in library calls: any device, any dtype, tuned for CPU.

Same meaning and arguments as `reference`; attention takes a plan that is made once a step and shared by all layers.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from pd_kernels.checks import check_write


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """See reference.rms_norm."""
    if x.dtype in (torch.float16, torch.bfloat16):  # the definition rounds before it multiplies by the weight
        return F.rms_norm(x.float(), weight.shape, None, eps).to(x.dtype) * weight
    return F.rms_norm(x, weight.shape, weight, eps)


def add_rms_norm(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """See reference.add_rms_norm. Overwrites `residual`."""
    residual += x
    return rms_norm(residual, weight, eps), residual


def rope(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """See reference.rope. `cos`, `sin` have the dtype of `x`."""
    cos, sin = cos.unsqueeze(1), sin.unsqueeze(1)
    half = x.shape[-1] // 2
    first, second = x[..., :half], x[..., half:]
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    torch.mul(first, cos, out=out[..., :half]).addcmul_(second, sin, value=-1)
    torch.mul(second, cos, out=out[..., half:]).addcmul_(first, sin)
    return out


def silu_and_mul(x: torch.Tensor) -> torch.Tensor:
    """See reference.silu_and_mul."""
    half = x.shape[-1] // 2
    return F.silu(x[..., :half]).mul_(x[..., half:])


def write_cache(
    key: torch.Tensor,
    value: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
) -> None:
    """See reference.write_cache."""
    check_write(key, value, key_cache, value_cache, slot_mapping)
    block_size = key_cache.shape[2]
    blocks = torch.div(slot_mapping, block_size, rounding_mode="floor")
    offsets = slot_mapping - blocks * block_size
    key_cache[blocks, :, offsets] = key
    value_cache[blocks, :, offsets] = value


def copy_blocks(source: torch.Tensor, target: torch.Tensor, pairs: torch.Tensor) -> None:
    """See reference.copy_blocks."""
    target.index_copy_(
        0, pairs[:, 1].to(target.device), source.index_select(0, pairs[:, 0].to(source.device)).to(target.device)
    )
