"""The functions of the forward pass as torch library calls: any device, any dtype, tuned for CPU.

The functions have the meaning and the arguments of `reference`. Attention is in `torch_attention`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F

from pd_kernels.checks import check_write
from pd_kernels.fp8_cache import indexable, stored

if TYPE_CHECKING:
    from pd_kernels.values import KeysValues, NewTokens


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """See reference.rms_norm."""
    if x.dtype in (torch.float16, torch.bfloat16):  # the definition rounds before it multiplies by the weight
        return (F.rms_norm(x.float(), weight.shape, None, eps).to(weight.dtype) * weight).to(x.dtype)
    return F.rms_norm(x, weight.shape, weight, eps)


def add_rms_norm(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """See reference.add_rms_norm. Overwrites `residual`."""
    residual += x if x.dim() == 2 else x.sum(0).to(residual.dtype)
    return rms_norm(residual, weight, eps), residual


def rope(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """See reference.rope. `cos`, `sin` have the dtype of `x`."""
    cos, sin = cos.unsqueeze(1), sin.unsqueeze(1)
    half = cos.shape[-1]
    end = 2 * half
    first, second = x[..., :half], x[..., half:end]
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    torch.mul(first, cos, out=out[..., :half]).addcmul_(second, sin, value=-1)
    torch.mul(second, cos, out=out[..., half:end]).addcmul_(first, sin)
    if end < x.shape[-1]:
        out[..., end:] = x[..., end:]
    return out


def silu_and_mul(x: torch.Tensor) -> torch.Tensor:
    """See reference.silu_and_mul."""
    half = x.shape[-1] // 2
    return F.silu(x[..., :half]).mul_(x[..., half:])


def sigmoid_and_mul(x: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:
    """See reference.sigmoid_and_mul."""
    return x * gate.sigmoid()


def write_cache(key: torch.Tensor, value: torch.Tensor, cache: KeysValues, slot_mapping: torch.Tensor) -> None:
    """See reference.write_cache."""
    check_write(key, value, cache, slot_mapping)
    keys = cache.keys
    _, num_kv_heads, block_size, head_dim = keys.shape
    # One row of a (block, head, token) each; index_copy_ of rows takes a quarter of the time of an indexed assignment
    blocks = torch.div(slot_mapping, block_size, rounding_mode="floor")
    first = blocks * (keys.stride(0) // head_dim - block_size) + slot_mapping
    heads = torch.arange(num_kv_heads, device=first.device) * (keys.stride(1) // head_dim)
    rows = (first[:, None] + heads).flatten()
    for part, update in zip(cache, (key, value), strict=True):
        flat = part.as_strided((_num_rows(part), head_dim), (head_dim, 1), part.storage_offset())
        indexable(flat).index_copy_(0, rows, indexable(stored(update.reshape(-1, head_dim), flat.dtype)))


def norm_rope_write(heads: torch.Tensor, new: NewTokens, cache: KeysValues) -> torch.Tensor:
    """See reference.norm_rope_write. `cos`, `sin` have the dtype of `heads`."""
    norms, cos, sin, slot_mapping = new
    num_kv_heads = cache.keys.shape[1]
    num_rotated = heads.shape[1] - num_kv_heads
    num_heads = num_rotated - num_kv_heads
    rotated = heads[:, :num_rotated]
    if norms is not None:
        query = rms_norm(rotated[:, :num_heads], norms.query, norms.eps)
        rotated = torch.cat((query, rms_norm(rotated[:, num_heads:], norms.key, norms.eps)), dim=1)
    rotated = rope(rotated, cos, sin)
    write_cache(rotated[:, num_heads:], heads[:, num_rotated:], cache, slot_mapping)
    return rotated[:, :num_heads]


def _num_rows(cache: torch.Tensor) -> int:
    """Tokens of one head that a flat view from the layer's first to its last one spans."""
    num_blocks, num_kv_heads, block_size, head_dim = cache.shape
    return ((num_blocks - 1) * cache.stride(0) + (num_kv_heads - 1) * cache.stride(1)) // head_dim + block_size


def copy_blocks(source: torch.Tensor, target: torch.Tensor, pairs: torch.Tensor) -> None:
    """See reference.copy_blocks."""
    source, target = indexable(source), indexable(target)
    target.index_copy_(
        0, pairs[:, 1].to(target.device), source.index_select(0, pairs[:, 0].to(source.device)).to(target.device)
    )
