"""Tiny random models in float8, as the hub has them, and transformers' models that compute the same numbers."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file

from pd_kernels import reference
from pd_kernels.quantized import MOST, QuantizedWeight
from tests.kernels.quantized_weights import quantize_weight
from tests.worker.conftest import SavedModel, as_released, save_model

if TYPE_CHECKING:
    from pathlib import Path

BLOCKS = {"quant_method": "fp8", "weight_block_size": [128, 128], "activation_scheme": "dynamic", "fmt": "e4m3"}
TENSOR = {"quant_method": "fp8", "activation_scheme": "static", "ignored_layers": ["lm_head"]}
# Mistral Small 4's: scales that are named as those of blocks, and experts in one tensor
MISTRAL = {
    "quant_method": "fp8", "weight_block_size": None, "activation_scheme": "static",
    "modules_to_not_convert": ["model.vision_tower", "model.multi_modal_projector", "lm_head"],
}  # fmt: skip
_FLOAT8 = {"num_bits": 8, "type": "float", "symmetric": True, "group_size": None, "block_structure": None}


def compressed(strategy: str = "channel", *, dynamic: bool = True, ignore: tuple[str, ...] = ()) -> dict[str, Any]:
    """The settings of compressed-tensors, with those that mean nothing here."""
    inputs = {**_FLOAT8, "dynamic": dynamic, "strategy": "token" if dynamic else "tensor"}
    weights = {**_FLOAT8, "dynamic": False, "strategy": strategy, "observer": "minmax"}
    if strategy == "block":
        inputs |= {"strategy": "group", "group_size": 128}
        weights |= {"block_structure": [128, 128]}
    group = {"targets": ["Linear"], "weights": weights, "input_activations": inputs, "output_activations": None}
    return {
        "quant_method": "compressed-tensors", "format": "float-quantized", "quantization_status": "compressed",
        "config_groups": {"group_0": group}, "ignore": list(ignore), "kv_cache_scheme": None,
        "sparsity_config": {"format": "dense", "global_sparsity": 0.1}, "transform_config": {}, "version": "0.12",
    }  # fmt: skip


@dataclass(frozen=True)
class QuantizedCase:
    """A model and its quantization. `plain`: a pattern of the modules that are not quantized."""

    kind: str
    settings: dict[str, Any]
    plain: str = "lm_head"
    options: dict[str, Any] = field(default_factory=dict)


_ODD = {
    "hidden_size": 192,
    "intermediate_size": 128,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
}
_WHOLE = {**_ODD, "hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2}
_EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "norm_topk_prob": True, "moe_intermediate_size": 128}
_LEFT_OUT = ["model.layers.1.mlp", "model.layers.0.self_attn.o_proj", "lm_head"]
CASES = {
    "llama-blocks": QuantizedCase("Llama", BLOCKS, options=_WHOLE),
    "qwen3-blocks-odd": QuantizedCase(
        "Qwen3",
        {**BLOCKS, "modules_to_not_convert": _LEFT_OUT},
        r"lm_head|model\.layers\.1\.mlp|model\.layers\.0\.self_attn\.o_proj",
        _ODD,
    ),
    "qwen2-tensor": QuantizedCase("Qwen2", TENSOR),  # biases
    "llama-channels-head": QuantizedCase("Llama", compressed(), "none", {"attention_bias": True, "mlp_bias": True}),
    "qwen3-modelopt": QuantizedCase(
        "Qwen3", {"quant_method": "modelopt", "quant_algo": "FP8", "ignore": ["lm_head", "*layers.0.mlp*"]},
        r"lm_head|model\.layers\.0\.mlp", {"head_dim": 16},
    ),
    "qwen3-compressed-blocks": QuantizedCase("Qwen3", compressed("block", ignore=("lm_head",)), options=_WHOLE),
    "gemma3-channels": QuantizedCase("Gemma3", compressed(ignore=("re:.*lm_head",)), options={"head_dim": 16}),
    "qwen3-experts-blocks": QuantizedCase(
        "Qwen3Moe",
        {**BLOCKS, "modules_to_not_convert": ["lm_head", "model.layers.0.mlp.gate", "mlp.gate"]},
        r"lm_head|.*mlp\.gate$",
        {**_ODD, **_EXPERTS, "num_hidden_layers": 2, "mlp_only_layers": [1]},
    ),
    "mixtral-channels": QuantizedCase(
        "Mixtral",
        compressed(ignore=("re:.*lm_head", "re:.*block_sparse_moe.gate$")),
        r"lm_head|.*block_sparse_moe\.gate$",
        {"num_local_experts": 5, "num_experts_per_tok": 2, "sliding_window": 24},
    ),
    "qwen2-shared-expert-tensor": QuantizedCase(
        "Qwen2Moe",
        compressed("tensor", dynamic=False, ignore=("re:.*lm_head", "re:.*mlp.gate$", "re:.*shared_expert_gate$")),
        r"lm_head|.*mlp\.gate$|.*shared_expert_gate$",
        {**_EXPERTS, "head_dim": 16, "moe_intermediate_size": 24, "shared_expert_intermediate_size": 40},
    ),
}  # fmt: skip


def save_quantized(case: QuantizedCase, directory: Path, seed: int = 0) -> SavedModel:
    """A quantized model in `directory`, and transformers' model of the dequantized weights, with rows as we round them.

    Linears that fill one product have scales of their own.
    """
    plain = directory / "plain"
    saved = save_model(case.kind, plain, case.options, seed)
    tensors = load_file(plain / "model.safetensors")
    stored, dequantized, groups = dict(tensors), dict(tensors), dict[str, int]()
    for name, tensor in tensors.items():
        module = name.removesuffix(".weight")
        if tensor.dim() == 2 and not re.match(f"{case.plain}|model.embed_tokens", module):
            weight = _quantized(tensor, case.settings)
            groups[module] = weight.group
            stored |= _as_stored(module, weight, case.settings)
            dequantized[name] = reference.dequantize(weight)
        elif tensor.dim() == 3 and case.settings == MISTRAL:
            scale = tensor.abs().amax((1, 2), keepdim=True) / MOST
            stored[name] = (tensor / scale).to(torch.float8_e4m3fn)
            stored |= {f"{name}_scale_inv": scale, f"{name}_activation_scale": torch.ones(len(tensor))}
            dequantized[name] = stored[name].float() * scale
    save_file(stored, directory / "model.safetensors")
    config = json.loads((plain / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps({**config, "quantization_config": case.settings}))
    save_file(dequantized, plain / "model.safetensors", {"format": "pt"})
    model = as_released(type(saved.model).from_pretrained(plain, dtype=torch.float32).eval())
    _round_rows(model, groups)
    return SavedModel(directory, model)


def _quantized(tensor: torch.Tensor, settings: dict[str, Any]) -> QuantizedWeight:
    if settings.get("weight_block_size") or '"block"' in json.dumps(settings):
        return quantize_weight(tensor, is_blocks=True)
    if "channel" in json.dumps(settings):
        return quantize_weight(tensor, is_blocks=False)
    scale = tensor.abs().max() / MOST
    return QuantizedWeight((tensor / scale).to(torch.float8_e4m3fn), scale.repeat(len(tensor), 1), is_blocks=False)


def _as_stored(module: str, weight: QuantizedWeight, settings: dict[str, Any]) -> dict[str, torch.Tensor]:
    found = {f"{module}.weight": weight.values}
    if weight.is_blocks:
        name = "weight_scale_inv" if settings.get("weight_block_size") else "weight_scale"
        return {**found, f"{module}.{name}": weight.scales}
    if "channel" in json.dumps(settings):
        return {**found, f"{module}.weight_scale": weight.scales}
    scale = weight.scales[0] if "config_groups" in settings else weight.scales[0, 0]  # [1], or ()
    if settings == MISTRAL:
        return {**found, **{f"{module}.{name}": scale.clone() for name in ("weight_scale_inv", "activation_scale")}}
    unused = ["input_scale", *(["k_scale"] if module.endswith("k_proj") else [])]  # of rows, of an FP8 KV cache
    return {**found, **{f"{module}.{name}": scale.clone() for name in ("weight_scale", *unused)}}


def _round_rows(model: torch.nn.Module, groups: dict[str, int]) -> None:
    """Make the inputs of quantized products the numbers that float8 holds."""

    def rounded(x: torch.Tensor, group: int) -> torch.Tensor:
        return reference.dequantize(reference.quantize(x.reshape(-1, x.shape[-1]), group)).view(x.shape)

    for name, module in model.named_modules():
        if name in groups:
            group = groups[name]
            module.register_forward_pre_hook(lambda _, inputs, group=group: (rounded(inputs[0], group),))
        elif name.endswith(".experts"):
            group = 128 if 128 in groups.values() else 1 << 30
            module.forward = _experts_forward(module, group, rounded)


def _experts_forward(experts: Any, group: int, rounded: Any) -> Any:
    """transformers' experts, one after the other, with rounded rows."""

    def forward(x: torch.Tensor, chosen: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        total, x = torch.zeros_like(x), rounded(x, min(group, x.shape[-1]))
        for expert in set(chosen.flatten().tolist()):
            tokens, places = torch.where(chosen == expert)
            gate, up = F.linear(x[tokens], experts.gate_up_proj[expert]).chunk(2, dim=-1)
            activated = experts.act_fn(gate) * up
            result = F.linear(rounded(activated, min(group, activated.shape[-1])), experts.down_proj[expert])
            total.index_add_(0, tokens, result * scores[tokens, places, None])
        return total

    return forward
