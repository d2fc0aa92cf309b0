"""Random experts with biases in MXFP4."""

from __future__ import annotations

import torch

from pd_kernels.biased_experts import BiasedExperts
from pd_kernels.weight_forms import MXFP4, PackedWeight


def random_packed(
    *shape: int, seed: int, scales: tuple[int, int] = (118, 122), device: torch.device | str = "cpu"
) -> PackedWeight:
    """A weight [E, out, in] of random codes, and of scales from the first to before the second."""
    random, (experts, outputs, inputs) = torch.Generator(device).manual_seed(seed), shape
    size = experts, outputs, inputs // 32
    blocks = torch.randint(256, (*size, 16), dtype=torch.uint8, generator=random, device=device)
    return PackedWeight(MXFP4, blocks, torch.randint(*scales, size, dtype=torch.uint8, generator=random, device=device))


def random_experts(num_experts: int, hidden: int, size: int, dtype: torch.dtype, device: torch.device) -> BiasedExperts:
    """Weights around 1 / 64."""
    random = torch.Generator().manual_seed(2)
    gate_up = random_packed(num_experts, 2 * size, hidden, seed=0, device=device)
    down = random_packed(num_experts, hidden, size, seed=1, device=device)
    biases = (torch.randn(num_experts, count, generator=random).to(device, dtype) for count in (2 * size, hidden))
    return BiasedExperts(gate_up, next(biases), down, next(biases), 7.0, 1.702)
