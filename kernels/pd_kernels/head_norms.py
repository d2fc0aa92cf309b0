"""Norms of every query and key head (Qwen3, Gemma 3)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, slots=True)
class HeadNorms:
    """RMSNorm weights, [head_dim] each, the same for all heads of a layer."""

    query: torch.Tensor
    key: torch.Tensor
    eps: float
