"""The attention backend for Hopper GPUs: Triton's kernels, and a Gluon kernel for large tiles of prompts."""

from __future__ import annotations

import importlib.util
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

import torch

from pd_kernels.attention import NO_LATENT

if TYPE_CHECKING:
    from pd_kernels.attention import AttentionShape, GroupAttention

_DTYPES = (torch.bfloat16, torch.float16)
_HEAD_DIMS = (64, 128)
_ROWS = 64  # rows of a warpgroup, and keys of one copy


@dataclass(frozen=True, slots=True)
class HopperBackend:
    """The AttentionBackend for Hopper GPUs.

    It does what TritonBackend does, and is faster for steps with enough chunks to occupy the GPU.
    """

    name: ClassVar[str] = "hopper"

    def why_not(self, shape: AttentionShape, device: torch.device) -> str:
        """See AttentionBackend. Compiles the kernel."""
        if not _is_hopper(device):
            return "needs a Hopper GPU"
        if importlib.util.find_spec("triton") is None:
            return "needs the package triton"
        return refusal(shape) or self._compiler_refusal(shape)

    def attention(self, shape: AttentionShape, device: torch.device) -> GroupAttention:
        """See AttentionBackend."""
        from pd_kernels.hopper_prefill import HopperPrefill
        from pd_kernels.triton_plan import TritonAttention

        return TritonAttention.of(shape, device, large_tiles=HopperPrefill.of(shape))

    def _compiler_refusal(self, shape: AttentionShape) -> str:
        from pd_kernels.hopper_prefill import HopperPrefill, compiled

        return "" if compiled(HopperPrefill.of(shape)) is not None else "the kernel does not compile with this Triton"


def refusal(shape: AttentionShape) -> str:
    """Why the Gluon kernel does not support the shape of a group; "" if it does."""
    if shape.latent is not None:
        return NO_LATENT
    if shape.window:
        return "has no windows"
    if shape.dtype not in _DTYPES:
        return f"has no {str(shape.dtype).removeprefix('torch.')}"
    if shape.head_dim not in _HEAD_DIMS:
        return f"has no heads of {shape.head_dim}"
    if shape.block_size % _ROWS:
        return f"needs blocks of a multiple of {_ROWS} tokens, not {shape.block_size}"
    if _ROWS % shape.heads_per_kv_head:
        return f"{shape.heads_per_kv_head} query heads share a KV head, which does not divide {_ROWS}"
    return ""


def _is_hopper(device: torch.device) -> bool:
    return device.type == "cuda" and torch.cuda.get_device_capability(device) == (9, 0)
