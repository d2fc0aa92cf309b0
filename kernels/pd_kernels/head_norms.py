"""The norms that some models (Qwen3) put on every query and key head."""

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
