"""The attention backend for GPUs. Triton is imported when the backend is used: the import takes seconds."""

from __future__ import annotations

import importlib.util
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

import torch

from pd_kernels.attention import NO_LATENT

if TYPE_CHECKING:
    from pd_kernels.attention import AttentionShape, GroupAttention


@dataclass(frozen=True, slots=True)
class TritonBackend:
    """The AttentionBackend for GPUs. It serves decodes, chunks of any size, windows and captured steps."""

    name: ClassVar[str] = "triton"

    def why_not(self, shape: AttentionShape, device: torch.device) -> str:
        """See AttentionBackend."""
        if device.type != "cuda":
            return "needs a GPU"
        if importlib.util.find_spec("triton") is None:
            return "needs the package triton"
        if shape.latent is not None:
            return NO_LATENT
        most = 32 if shape.dtype is torch.float32 else 64  # rows of the smallest tile of `prefill_tiling`
        if shape.heads_per_kv_head > most:
            return f"{shape.heads_per_kv_head} query heads share a KV head, at most {most} may"
        return ""

    def attention(self, shape: AttentionShape, device: torch.device) -> GroupAttention:
        """See AttentionBackend."""
        from pd_kernels.triton_plan import TritonAttention

        return TritonAttention.of(shape, device)
