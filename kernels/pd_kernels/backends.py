"""Which implementation of each function runs where.

A new backend adds a row: a `Kernels` with the functions that it has, the others taken from `TORCH` with `replace`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from pd_kernels import sampling, torch_attention, torch_ops

if TYPE_CHECKING:
    from collections.abc import Callable

    import torch

    from pd_kernels.packed import PackedSequences


class AttentionPlan(Protocol):
    """What one step's attention needs besides the tensors of a layer."""

    def run(
        self, query: torch.Tensor, key_cache: torch.Tensor, value_cache: torch.Tensor, scale: float
    ) -> torch.Tensor:
        """`query` [T, H, D] over one layer's cache views [N, G, B, D] -> [T, H, D]."""


class PlanAttention(Protocol):
    """Makes a plan once a step for all layers with the same window."""

    def __call__(self, packed: PackedSequences, key_cache: torch.Tensor, window: int = 0) -> AttentionPlan: ...


@dataclass(frozen=True, slots=True)
class Kernels:
    """One implementation of every function; their meaning is in `reference` and `sampling`."""

    name: str
    rms_norm: Callable[[torch.Tensor, torch.Tensor, float], torch.Tensor]
    add_rms_norm: Callable[[torch.Tensor, torch.Tensor, torch.Tensor, float], tuple[torch.Tensor, torch.Tensor]]
    rope: Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
    silu_and_mul: Callable[[torch.Tensor], torch.Tensor]
    write_cache: Callable[[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor], None]
    plan_attention: PlanAttention
    copy_blocks: Callable[[torch.Tensor, torch.Tensor, torch.Tensor], None]
    gumbel_sample: Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
    truncated_sample: Callable[
        [torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor
    ]


TORCH = Kernels(
    name="torch",
    rms_norm=torch_ops.rms_norm,
    add_rms_norm=torch_ops.add_rms_norm,
    rope=torch_ops.rope,
    silu_and_mul=torch_ops.silu_and_mul,
    write_cache=torch_ops.write_cache,
    plan_attention=torch_attention.plan_attention,
    copy_blocks=torch_ops.copy_blocks,
    gumbel_sample=sampling.gumbel_sample,
    truncated_sample=sampling.truncated_sample,
)

BACKENDS: dict[str, Kernels] = {"cpu": TORCH, "cuda": TORCH}  # device type -> what runs there


def select_kernels(device: torch.device) -> Kernels:
    """The implementation for a device. Raises ValueError for a device type without one."""
    try:
        return BACKENDS[device.type]
    except KeyError:
        raise ValueError(f"no kernels for device {device}; there are some for {', '.join(BACKENDS)}") from None
