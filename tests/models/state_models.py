"""Tiny random models that keep states, in transformers' format."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from pd_cluster.models.directory import read_json
from pd_cluster.models.registry import build_model, resolve_spec
from pd_cluster.models.weights import load_weights
from pd_kernels.backends import TORCH, Kernels

if TYPE_CHECKING:
    from pathlib import Path

    from pd_cluster.models.model import Model
    from pd_cluster.models.model_share import ModelShare

_DELTA = {
    "num_hidden_layers": 5, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "eos_token_id": 2,
    "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 16, "linear_value_head_dim": 24,
    "initializer_range": 0.07,  # so that float32 is near to float64
}  # fmt: skip
_EXPERTS = {
    "num_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 24, "shared_expert_intermediate_size": 40,
}  # fmt: skip
_MROPE = {
    "rope_type": "default", "rope_theta": 1e5, "partial_rotary_factor": 0.5, "mrope_section": [2, 1, 1],
    "mrope_interleaved": True,
}  # fmt: skip
STATE_MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen3-next": ("Qwen3Next", {**_DELTA, **_EXPERTS, "mlp_only_layers": [1]}),
    "qwen3.5": ("Qwen3_5", {**_DELTA, "rope_parameters": _MROPE, "linear_num_value_heads": 6}),
    "qwen3.5-experts": (  # the shared expert has the others' size
        "Qwen3_5Moe",
        {**_DELTA, **_EXPERTS, "linear_conv_kernel_dim": 3, "shared_expert_intermediate_size": 24},
    ),
}


def load(
    directory: Path, share: ModelShare | None = None, kernels: Kernels = TORCH, dtype: torch.dtype = torch.float32
) -> Model:
    """The model of a checkpoint, or one rank's share of it."""
    spec = resolve_spec(directory, read_json(directory / "config.json"))
    model = build_model(spec, kernels, 512, dtype, torch.device("cpu"), share)
    load_weights(model, directory, spec.tied_embeddings, lambda line: None)
    model.finish_loading()
    return model
