"""Adapters of the demo model, or of fewer of its layers, so strong that the answers of each are its own."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from tests.models.adapter_files import CONFIG, PREFIX, write

if TYPE_CHECKING:
    from pathlib import Path

SIZES = {"self_attn.q_proj": (256, 512), "self_attn.v_proj": (256, 256), "mlp.down_proj": (512, 256)}


def strong_adapter(directory: Path, seed: int, num_layers: int = 6) -> Path:
    """The directory."""
    rng, tensors = torch.Generator().manual_seed(seed), {}
    for layer in range(num_layers):
        for module, (num_in, num_out) in SIZES.items():
            name = f"{PREFIX}model.layers.{layer}.{module}"
            tensors[f"{name}.lora_A.weight"] = torch.randn(4, num_in, generator=rng) / 16
            tensors[f"{name}.lora_B.weight"] = torch.randn(num_out, 4, generator=rng) / 4
    return write(directory, CONFIG | {"target_modules": [name.rpartition(".")[2] for name in SIZES]}, tensors)
