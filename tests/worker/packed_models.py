"""Checkpoints of gpt-oss with experts in MXFP4, as they are published, beside transformers' model of their numbers."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import torch
from safetensors.torch import load_file, save_file

if TYPE_CHECKING:
    from pathlib import Path

CONFIG = {
    "quant_method": "mxfp4",
    "modules_to_not_convert": [
        "model.layers.*.self_attn",
        "model.layers.*.mlp.router",
        "model.embed_tokens",
        "lm_head",
    ],
}  # fmt: skip


def number(code: int) -> float:
    """The number of 4 bits: a sign, 2 bits of an exponent of bias 1, and one of the mantissa (OCP MX, 5.3.3)."""
    sign, exponent, half = 1 - 2 * (code >> 3), code >> 1 & 3, code & 1
    return sign * (2.0 ** (exponent - 1) * (1 + half / 2) if exponent else half / 2)


def unpacked(blocks: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """float32 [..., out, in] of blocks [..., out, in / 32, 16] and scales [..., out, in / 32], by arithmetic alone."""
    numbers = [number(code & 15) for code in range(256)], [number(code >> 4) for code in range(256)]
    low, high = (torch.tensor(half)[blocks.long()] for half in numbers)
    wide = torch.stack((low, high), -1).flatten(-2).double() * torch.pow(2.0, scales.double() - 127)[..., None]
    return wide.flatten(-2).float()


def save_packed(model: Any, directory: Path) -> None:
    """Save the model with random experts, and give it the same ones."""
    random, packed = torch.Generator().manual_seed(1), dict[str, torch.Tensor]()
    for layer, module in enumerate(model.model.layers):
        for part in ("gate_up_proj", "down_proj"):
            weight, name = getattr(module.mlp.experts, part), f"model.layers.{layer}.mlp.experts.{part}"
            num_experts, num_inputs, num_outputs = weight.shape
            of_scales = (num_experts, num_outputs, num_inputs // 32)
            blocks = torch.randint(0, 256, (*of_scales, 16), dtype=torch.uint8, generator=random)
            scales = torch.randint(121, 125, of_scales, dtype=torch.uint8, generator=random)
            weight.data.copy_(unpacked(blocks, scales).transpose(1, 2))
            packed |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
    model.save_pretrained(directory)
    file, config = directory / "model.safetensors", directory / "config.json"
    others = {name: one for name, one in load_file(file).items() if not name.endswith(("gate_up_proj", "down_proj"))}
    save_file({**others, **packed}, file, {"format": "pt"})
    config.write_text(json.dumps(json.loads(config.read_text()) | {"quantization_config": CONFIG}))
