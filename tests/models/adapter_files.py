"""Adapters in PEFT's format: files of random matrices for a model's parts, or files made by hand."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import torch
from safetensors.torch import save

from pd_cluster.adapters.adapter_bytes import AdapterBytes, read_adapter
from pd_cluster.models.linear_part import LinearPart
from pd_cluster.models.shard import Cut

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from pathlib import Path

MAX_BYTES = 1 << 24
PREFIX = "base_model.model."
CONFIG: dict[str, Any] = {
    "peft_type": "LORA", "task_type": "CAUSAL_LM", "base_model_name_or_path": "some/base", "r": 4, "lora_alpha": 8,
    "lora_dropout": 0.05, "bias": "none", "target_modules": ["q_proj", "down_proj"], "inference_mode": True,
}  # fmt: skip
UNSLOTH: dict[str, Any] = {
    "alora_invocation_tokens": None, "alpha_pattern": {}, "arrow_config": None,
    "auto_mapping": {
        "base_model_class": "LlamaForCausalLM", "parent_library": "transformers.models.llama.modeling_llama",
        "unsloth_fixed": True,
    },
    "base_model_name_or_path": "unsloth/meta-llama-3.1-8b-instruct-unsloth-bnb-4bit", "bias": "none",
    "corda_config": None, "ensure_weight_tying": False, "eva_config": None, "exclude_modules": None,
    "fan_in_fan_out": False, "inference_mode": True, "init_lora_weights": True, "layer_replication": None,
    "layers_pattern": None, "layers_to_transform": None, "loftq_config": {}, "lora_alpha": 16, "lora_bias": False,
    "lora_dropout": 0, "megatron_config": None, "megatron_core": "megatron.core", "modules_to_save": None,
    "peft_type": "LORA", "peft_version": "0.18.0", "qalora_group_size": 16, "r": 4, "rank_pattern": {},
    "revision": None, "target_modules": (
        r"(?:.*?(?:language|text).*?(?:self_attn|attention|attn|mlp|feed_forward|ffn|dense).*?"
        r"(?:q_proj|down_proj).*?)|(?:\bmodel\.layers\.[\d]{1,}\.(?:self_attn|attention|attn|mlp|feed_forward|ffn|dense)"
        r"\.(?:(?:q_proj|down_proj)))"
    ),
    "target_parameters": None, "task_type": "CAUSAL_LM", "trainable_token_indices": None, "use_bdlora": None,
    "use_dora": False, "use_qalora": False, "use_rslora": False,
}  # fmt: skip
AXOLOTL: dict[str, Any] = {
    "alpha_pattern": {}, "auto_mapping": None, "base_model_name_or_path": "NousResearch/Meta-Llama-3-8B",
    "bias": "none", "eva_config": None, "exclude_modules": None, "fan_in_fan_out": None, "inference_mode": True,
    "init_lora_weights": True, "layer_replication": None, "layers_pattern": None, "layers_to_transform": None,
    "loftq_config": {}, "lora_alpha": 16, "lora_bias": False, "lora_dropout": 0.05, "megatron_config": None,
    "megatron_core": "megatron.core", "modules_to_save": None, "peft_type": "LORA", "r": 4, "rank_pattern": {},
    "revision": None, "target_modules": ["down_proj", "q_proj"], "task_type": "CAUSAL_LM", "use_dora": False,
    "use_rslora": False,
}  # fmt: skip
TRL = AXOLOTL | {
    "fan_in_fan_out": False, "use_rslora": True, "corda_config": None, "trainable_token_indices": None,
    "lora_ga_config": None, "peft_version": "0.19.1",
    "target_modules": ["model.layers.0.self_attn.q_proj", "q_proj", "down_proj"],
}  # fmt: skip
# A model of two layers, of one rank. It is small, so a header may say as much as the weights
PARTS: dict[str, LinearPart] = {
    f"model.layers.{layer}.{name}": LinearPart(kind, layer, start, Cut.of(rows), Cut.of(inputs))
    for layer in range(2)
    for name, kind, start, rows, inputs in (
        ("self_attn.q_proj", "qkv", 0, 12, 8), ("self_attn.k_proj", "qkv", 12, 6, 8),
        ("self_attn.o_proj", "out", 0, 8, 12), ("mlp.down_proj", "down", 0, 8, 20),
    )
}  # fmt: skip
Tensors = dict[str, torch.Tensor]


def pair(module: str, shape: tuple[int, int], rank: int = 4, prefix: str = PREFIX, seed: int = 0) -> Tensors:
    """A and B of one module, none of them zero."""
    random = torch.Generator().manual_seed(seed)
    sizes = {"A": (rank, shape[1]), "B": (shape[0], rank)}
    return {f"{prefix}{module}.lora_{one}.weight": torch.randn(size, generator=random) for one, size in sizes.items()}


def pairs(
    parts: Mapping[str, LinearPart], rank: Callable[[str], int] = lambda name: 4, prefix: str = PREFIX
) -> Tensors:
    """A and B of each module."""
    found: Tensors = {}
    for seed, (name, part) in enumerate(parts.items()):
        found |= pair(name, part.shape, rank(name), prefix, seed)
    return found


def named(*ends: str, parts: Mapping[str, LinearPart] = PARTS) -> dict[str, LinearPart]:
    """The parts of which names end so."""
    return {name: part for name, part in parts.items() if name.endswith(ends)}


def usual() -> Tensors:
    """What CONFIG names."""
    return pairs(named("q_proj", "down_proj"))


def write(directory: Path, config: Mapping[str, Any], tensors: Tensors) -> Path:
    """The directory."""
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "adapter_config.json").write_text(json.dumps(config))
    (directory / "adapter_model.safetensors").write_bytes(save(tensors, {"format": "pt"}))
    return directory


def written(directory: Path, config: Mapping[str, Any], tensors: Tensors) -> AdapterBytes:
    """Written, and read again."""
    return read_adapter(write(directory, config, tensors), MAX_BYTES)
