"""Models that keep states: what their published configs say, and the room of their states."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from pd_cluster.errors import StartupError
from pd_cluster.models.fingerprint import fingerprint
from pd_cluster.models.registry import resolve_spec
from pd_cluster.models.spec import ModelSpec, RopeSpec, StateSpec
from pd_cluster.models.state_views import state_caches
from pd_cluster.models.tensor_names import match_slots
from pd_connectors.protocol.layout import BlockLayout, KVKind
from pd_connectors.protocol.slices import plan_slices

_ROPE = {
    "rope_type": "default", "rope_theta": 10000000, "partial_rotary_factor": 0.25, "mrope_interleaved": True,
    "mrope_section": [11, 11, 10],
}  # fmt: skip
_HEADS = {
    "linear_num_key_heads": 16, "linear_num_value_heads": 32, "linear_key_head_dim": 128, "linear_value_head_dim": 128,
    "linear_conv_kernel_dim": 4,
}  # fmt: skip
_TEXT = {
    "model_type": "qwen3_5_moe_text", "hidden_size": 2048, "num_hidden_layers": 40, "num_attention_heads": 16,
    "num_key_value_heads": 2, "head_dim": 256, "vocab_size": 248320, "num_experts": 256, "num_experts_per_tok": 8,
    "moe_intermediate_size": 512, "shared_expert_intermediate_size": 512, "max_position_embeddings": 262144,
    "full_attention_interval": 4, "attn_output_gate": True, "output_gate_type": "swish", "mamba_ssm_dtype": "float32",
    "rope_parameters": _ROPE, "dtype": "bfloat16", **_HEADS,
}  # fmt: skip
FP8 = {"quant_method": "fp8", "weight_block_size": [128, 128], "fmt": "e4m3", "activation_scheme": "dynamic"}
QWEN36_35B = {"architectures": ["Qwen3_5MoeForConditionalGeneration"], "text_config": _TEXT, "quantization_config": FP8}
QWEN38_27B = {
    "architectures": ["Qwen3_5ForConditionalGeneration"], "quantization_config": FP8,
    "text_config": {
        **_TEXT, "hidden_size": 5120, "num_hidden_layers": 64, "num_attention_heads": 24, "num_key_value_heads": 4,
        "intermediate_size": 17408, "linear_num_value_heads": 48,
    },
}  # fmt: skip
QWEN3_NEXT = {
    **_TEXT, "architectures": ["Qwen3NextForCausalLM"], "num_hidden_layers": 48, "vocab_size": 151936,
    "num_experts": 512, "num_experts_per_tok": 10, "intermediate_size": 5120, "rope_theta": 10000000,
    "partial_rotary_factor": 0.25, "rope_parameters": None, "decoder_sparse_step": 1, "mlp_only_layers": [],
    "norm_topk_prob": True, "quantization_config": FP8,
}  # fmt: skip
PUBLISHED: dict[str, tuple[dict[str, Any], float, float, int]] = {
    "35B": (QWEN36_35B, 35.7, 64.4, 30),
    "27B": (QWEN38_27B, 29.4, 153.9, 48),
    "Next": (QWEN3_NEXT, 80.2, 77.3, 36),
}


def spec_of(config: dict[str, Any], **changes: Any) -> ModelSpec:
    """Of the text model, with `changes`."""
    text = {**config.get("text_config", config), **changes}
    return resolve_spec(Path(), {**config, "text_config": text} if "text_config" in config else text)


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_sizes(name: str) -> None:
    config, weights_gb, state_mb, num_states = PUBLISHED[name]
    spec = spec_of(config)
    full, state = spec.kv_groups(16, "bfloat16")
    assert (state.kind, state.block_size, full.kind) == (KVKind.STATE, 64, KVKind.FULL)
    assert state.block_bytes / 1e6 == pytest.approx(state_mb, abs=0.06)
    assert len(state.layers) == num_states == 3 * len(full.layers)
    assert spec.weight_bytes(2) / 1e9 == pytest.approx(weights_gb, abs=0.15)
    assert (spec.rope, spec.rotary_dim, spec.head_dim) == (RopeSpec(1e7), 64, 256)
    attending = replace(spec, state=None, windows=(1,) * num_states + (0,) * len(full.layers))
    assert spec.keys_per_token == pytest.approx(attending.keys_per_token, rel=0.5), "of a fourth of the layers"
    assert spec.kv_groups(48, "bfloat16")[1].block_size == 192


def test_what_a_config_leaves_out_has_the_defaults_of_transformers() -> None:
    optional = ("linear_", "num_key", "head_dim", "rope", "max_position", "full_attention", "norm_topk", "attn_output")
    config = {name: value for name, value in QWEN3_NEXT.items() if not name.startswith(optional)}
    spec, whole = spec_of(config), spec_of(QWEN3_NEXT)
    assert (spec.state, spec.experts, spec.num_kv_heads, spec.rotary_dim) == (whole.state, whole.experts, 2, 64)
    assert (spec.rope, spec.max_len) == (RopeSpec(1e4), 32768)
    kinds = ["linear_attention"] * 3 + ["full_attention"]
    assert spec_of(QWEN36_35B, layer_types=kinds * 10, full_attention_interval=None) == spec_of(QWEN36_35B)
    assert spec_of(QWEN36_35B, layer_types=["full_attention"] * 40).state is None


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"attn_output_gate": False}, "attn_output_gate = False cannot be served: in this architecture the output"),
        ({"output_gate_type": "sigmoid"}, "output_gate_type = 'sigmoid' cannot be served: only swish is"),
        ({"layer_types": ["linear_attention"] * 40}, "a model without attention has no keys"),
        ({"layer_types": ["full_attention"] * 39}, "there are 40 layers"),
        ({"layer_types": ["sliding_attention"] * 40}, "a list of linear_attention and full_attention is expected"),
        (
            {"linear_num_value_heads": 40},
            "linear_num_value_heads = 40 cannot be served: they cannot share 16 key heads",
        ),
        ({"linear_conv_kernel_dim": 1}, "linear_conv_kernel_dim must be an integer of at least 2, not 1"),
        ({"hidden_act": "gelu"}, "only silu is served"),
        ({"attention_bias": True}, "attention_bias = True cannot be served: in this model type only models without it"),
        ({"mlp_only_layers": [1]}, "mlp_only_layers = .* cannot be served: in this architecture every layer has exp"),
        ({"decoder_sparse_step": 2}, "decoder_sparse_step = 2 cannot be served: in this architecture every layer has"),
    ],
)
def test_what_is_another_model_is_refused_by_name(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(StartupError, match=message):
        spec_of(QWEN36_35B, **changes)


@pytest.mark.parametrize("value", [{}, {"intermediate_size": None}], ids=["left out", "null"])
def test_only_models_without_dense_layers_need_no_size_of_them(value: dict[str, Any]) -> None:
    """Qwen3-Next has a default in transformers, which no published config uses."""
    assert "intermediate_size" not in _TEXT
    assert spec_of(QWEN36_35B, **value, mlp_only_layers=[], decoder_sparse_step=1) == spec_of(QWEN36_35B)
    named = {name: setting for name, setting in QWEN3_NEXT.items() if name != "intermediate_size"}
    with pytest.raises(StartupError, match="intermediate_size must be a positive integer, not None"):
        spec_of(named, **value)


def test_the_fingerprint_has_the_shape_of_a_state() -> None:
    others: list[dict[str, Any]] = [
        {"linear_num_key_heads": 32}, {"linear_num_value_heads": 64}, {"linear_key_head_dim": 64},
        {"linear_value_head_dim": 64}, {"linear_conv_kernel_dim": 5}, {"full_attention_interval": 8},
    ]  # fmt: skip
    prints = {fingerprint(spec_of(QWEN36_35B, **changes), "dummy") for changes in ({}, *others)}
    assert len(prints) == 1 + len(others)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_every_number_of_a_state_has_a_place_of_its_own(dtype: torch.dtype) -> None:
    """Of 5 layers, 3 value heads a key head: the heads of a key head have the inputs of 2, 2 and 1 layers."""
    spec = StateSpec((0, 1, 2, 4, 5), key_heads=2, value_heads=6, key_dim=4, value_dim=6, width=4)
    blocks = torch.zeros(3, 6, spec.head_floats(dtype.itemsize))
    caches = state_caches(spec, blocks, dtype)
    assert list(caches) == list(spec.layers)
    for number, cache in enumerate(caches.values(), 1):
        assert (*cache.conv.shape, *cache.recurrent.shape) == (3, 2, 26, 3, 3, 6, 4, 6)
        cache.recurrent.fill_(number)
        cache.conv.fill_(-number)
    for number, cache in enumerate(caches.values(), 1):
        assert (cache.recurrent == number).all()
        assert (cache.conv == -number).all()
    caches[0].recurrent[1] = torch.nan
    caches[5].conv[2] = torch.nan
    assert [bool(block.isnan().any()) for block in blocks.view(dtype)] == [False, True, True]


@pytest.mark.parametrize(("theirs", "ours"), [(1, 2), (2, 1), (4, 2), (2, 4)])
def test_a_handoff_between_unequal_degrees_moves_whole_key_heads(theirs: int, ours: int) -> None:
    """Of the states of 35B with 16 key heads of 2 value heads each, in the model's dtype and float32."""
    groups = spec_of(QWEN36_35B).kv_groups(16, "bfloat16")
    group, head_bytes = groups[-1], groups[-1].block_bytes // 32
    for part in plan_slices(BlockLayout(groups, theirs), BlockLayout(groups, ours)):
        if part.group == 1:
            assert part.num_bytes % (2 * head_bytes) == part.remote_offset % (2 * head_bytes) == 0
            assert group.heads_of(part.remote_rank, theirs).start * head_bytes + part.remote_offset == (
                group.heads_of(part.local_rank, ours).start * head_bytes + part.local_offset
            )


def test_experts_of_one_tensor_and_single_ones_are_told_apart() -> None:
    block, single = "model.layers.0.mlp.experts", []
    single = [f"{block}.{expert}.{part}_proj.weight" for expert in (0, 1) for part in ("gate", "up", "down")]
    fused = [f"{block}.gate_up_proj", f"{block}.down_proj"]
    slots = {*single, *fused}
    for stored in (single, fused):
        assert not any(match_slots(stored, slots, tied_embeddings=False)[1].values())
    assert match_slots(fused[:1], slots, tied_embeddings=False)[1]["missing"] == {
        f"{block}.{expert}.down_proj.weight" for expert in (0, 1)
    }
    wrapped = [name.replace("model.", "model.language_model.") for name in fused]
    assert match_slots(wrapped, slots, tied_embeddings=False)[0] == dict(zip(wrapped, fused, strict=True))
    assert match_slots([*single, fused[0]], slots, tied_embeddings=False)[1]["stored twice"] == {*single} - {
        f"{block}.{expert}.down_proj.weight" for expert in (0, 1)
    }
