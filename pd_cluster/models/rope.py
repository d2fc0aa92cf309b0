"""Rotary position embedding: the angles of every position."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from pd_cluster.models.spec import RopeSpec


@dataclass(slots=True)
class RopeTable:
    """cos and sin of positions' angles, each [positions, rotary_dim / 2]."""

    cos: torch.Tensor
    sin: torch.Tensor

    def at(self, positions: torch.Tensor) -> RopeTable:
        """The rows of `positions` (int64 [T])."""
        return RopeTable(self.cos.index_select(0, positions), self.sin.index_select(0, positions))


def make_rope_table(
    spec: RopeSpec, rotary_dim: int, max_len: int, dtype: torch.dtype, device: torch.device
) -> RopeTable:
    """Make the table of `max_len` positions on the device, in `dtype`. `rotary_dim`: dimensions of a head that rotate.

    The angles are computed on the CPU in float32 and then moved, so that every device has the same numbers.
    """
    angles = torch.outer(torch.arange(max_len, dtype=torch.float32), rope_frequencies(spec, rotary_dim))
    return RopeTable(angles.cos().to(device, dtype), angles.sin().to(device, dtype))


def rope_frequencies(spec: RopeSpec, rotary_dim: int) -> torch.Tensor:
    """Angle per position of each pair of dimensions, float32 [rotary_dim / 2].

    `linear` divides all by `factor`. `llama3` (Llama 3.1 model card) divides only those with a wavelength above the
    original context over `low_freq_factor`, blending linearly up to `high_freq_factor`.
    """
    plain = 1.0 / spec.theta ** (torch.arange(0, rotary_dim, 2, dtype=torch.float32) / rotary_dim)
    if spec.kind == "default":
        return plain
    if spec.kind == "linear":
        return plain / spec.factor
    periods = spec.original_max_len * plain / (2 * math.pi)  # periods within the original context
    blend = ((periods - spec.low_freq_factor) / (spec.high_freq_factor - spec.low_freq_factor)).clamp(0, 1)
    return (1 - blend) * plain / spec.factor + blend * plain
