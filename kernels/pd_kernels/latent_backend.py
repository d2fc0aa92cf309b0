"""The backend of latent attention for GPUs. Triton is imported when the backend is used: the import takes seconds."""

from __future__ import annotations

import importlib.util
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from pd_kernels.latent_attention import LatentAttention, refusal

if TYPE_CHECKING:
    import torch

    from pd_kernels.attention import AttentionShape


@dataclass(frozen=True, slots=True)
class TritonLatentBackend:
    """The AttentionBackend of latent groups for GPUs. It captures decodes, with and without drafts."""

    name: ClassVar[str] = "latent-triton"

    def why_not(self, shape: AttentionShape, device: torch.device) -> str:
        """See AttentionBackend."""
        if device.type != "cuda":
            return "needs a GPU"
        if importlib.util.find_spec("triton") is None:
            return "needs the package triton"
        reason, dims = refusal(shape), shape.latent
        if reason or dims is None:
            return reason
        first = 1 << dims.nope.bit_length() - 1  # keys are read in one or in two parts
        sizes = (dims.rank, dims.rope, dims.value, first, dims.nope - first or 16)
        fits = all(size >= 16 and not size & (size - 1) for size in sizes)
        return "" if fits else f"takes sizes of powers of two from 16 on, not {', '.join(map(str, dims))}"

    def attention(self, shape: AttentionShape, device: torch.device) -> LatentAttention:
        """See AttentionBackend."""
        from pd_kernels.triton_latent import TritonLatent

        return LatentAttention(shape, TritonLatent.of(shape.dtype))
