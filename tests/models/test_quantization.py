"""What `quantization_config` may say, and where its tensors go."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.shapes import CONFIGS
from pd_cluster.config import SchedulerConfig
from pd_cluster.errors import StartupError
from pd_cluster.models.fingerprint import fingerprint
from pd_cluster.models.quantization import MODELOPT_FILE, QuantizationSpec, Scales
from pd_cluster.models.registry import build_model, resolve_spec
from pd_cluster.models.slot import Slot
from pd_cluster.models.weights import fill_at_random
from pd_cluster.worker.capacity import MemoryEstimate
from pd_kernels.backends import TORCH
from tests.worker.quantized_models import BLOCKS, TENSOR, compressed

BLOCK_WEIGHTS = compressed("block")["config_groups"]["group_0"]["weights"]
CHANNELS = compressed(ignore=("re:.*lm_head", "re:.*mlp.gate$"))
MODELOPT = {"quant_method": "modelopt", "quant_algo": "FP8", "exclude_modules": ["lm_head", "*.o_proj"]}
QWEN3_EXPERTS = {
    **CONFIGS["tiny"], "architectures": ["Qwen3MoeForCausalLM"], "num_experts": 4, "num_experts_per_tok": 2,
    "moe_intermediate_size": 128, "hidden_size": 128, "head_dim": 64, "mlp_only_layers": [1],
}  # fmt: skip

MINIMAX_M2 = {
    "architectures": ["MiniMaxM2ForCausalLM"], "head_dim": 128, "hidden_act": "silu", "hidden_size": 3072,
    "intermediate_size": 1536, "max_position_embeddings": 196608, "num_attention_heads": 48, "num_experts_per_tok": 8,
    "num_hidden_layers": 62, "num_key_value_heads": 8, "num_local_experts": 256, "num_mtp_modules": 3,
    "qk_norm_type": "per_layer", "rms_norm_eps": 1e-6, "rope_theta": 5000000, "rotary_dim": 64,
    "scoring_func": "sigmoid", "shared_intermediate_size": 0, "tie_word_embeddings": False, "use_mtp": True,
    "use_qk_norm": True, "use_routing_bias": True, "vocab_size": 200064,
    "quantization_config": {
        **BLOCKS, "fmt": "float8_e4m3fn", "modules_to_not_convert": ["gate", "e_score_correction_bias", "lm_head"],
    },
}  # fmt: skip
"""As on the hub: without a dtype."""


def read(settings: object) -> QuantizationSpec | None:
    return resolve_spec(Path("model"), {**CONFIGS["tiny"], "quantization_config": settings}).quantization


def channels(path: str, value: object) -> dict[str, Any]:
    """Settings of channels with another value at `path`; "group.": config_groups.group_0."""
    settings: dict[str, Any] = json.loads(json.dumps(CHANNELS))
    inner = settings
    *outer, last = path.replace("group.", "config_groups.group_0.").split(".")
    for name in outer:
        inner = inner[name]
    inner[last] = value
    return settings


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        (None, None),
        ({}, None),
        (BLOCKS, QuantizationSpec(Scales.BLOCKS, ("lm_head",), "weight_scale_inv")),
        (
            {**BLOCKS, "modules_to_not_convert": ["a.gate", "b", "b"], "fmt": "float8_e4m3fn"},
            QuantizationSpec(Scales.BLOCKS, ("a.gate", "b", "lm_head"), "weight_scale_inv"),
        ),
        ({**BLOCKS, "scale_fmt": "ue8m0"}, read(BLOCKS)),  # DeepSeek-V3.1's
        ({**TENSOR, "weight_block_size": None}, QuantizationSpec(Scales.TENSOR, ("lm_head", "lm_head"))),
        (CHANNELS, QuantizationSpec(Scales.CHANNELS, ("re:.*lm_head", "re:.*mlp.gate$"))),
        (compressed("tensor", dynamic=False), QuantizationSpec(Scales.TENSOR, ())),
        (compressed("block", ignore=("lm_head",)), QuantizationSpec(Scales.BLOCKS, ("lm_head",))),
        (MODELOPT, QuantizationSpec(Scales.TENSOR, ("lm_head", "*.o_proj"))),
        (
            {**MODELOPT, "kv_cache_quant_algo": "FP8", "kv_cache_scheme": {"num_bits": 8, "type": "float"}},
            QuantizationSpec(Scales.TENSOR, ("lm_head", "*.o_proj")),
        ),
        ({**TENSOR, "kv_cache_scheme": "static"}, read(TENSOR)),
        (channels("kv_cache_scheme", {"num_bits": 8, "type": "float", "strategy": "tensor"}), read(CHANNELS)),
    ],
)
def test_formats_that_are_served(settings: object, expected: QuantizationSpec | None) -> None:
    assert read(settings) == expected


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        *(
            ({"quant_method": method}, f"quant_method = '{method}' cannot be served; served: fp8, compressed-tensors")
            for method in ("awq", "gptq", "bitsandbytes", "fbgemm_fp8", "quark")
        ),
        ({"quant_method": "mxfp4"}, "cannot be served: mxfp4 is served in gpt-oss only"),
        ({"load_in_8bit": True}, "quant_method = None cannot be served"),
        ({"quant_method": ["fp8"]}, r"quant_method = \['fp8'\] cannot be served"),
        ("fp8", "quantization_config must be an object, not 'fp8'"),
        ({**BLOCKS, "weight_block_size": [64, 128]}, r"weight_block_size = \[64, 128\] .*; served: \[128, 128\]"),
        ({**BLOCKS, "weight_block_size": [1, 128]}, r"weight_block_size = \[1, 128\] cannot be served"),
        ({**BLOCKS, "fmt": "e5m2"}, "fmt = 'e5m2' cannot be served; served: e4m3, float8_e4m3fn"),
        ({**BLOCKS, "scale_fmt": "ue5m3"}, "scale_fmt = 'ue5m3' cannot be served; served: float, ue8m0$"),
        ({**TENSOR, "kv_cache_scheme": "dynamic"}, "kv_cache_scheme = 'dynamic' cannot be served; served: static$"),
        ({**TENSOR, "activation_scheme": "none"}, "activation_scheme = 'none' cannot be served; served: dynamic"),
        ({**BLOCKS, "modules_to_not_convert": "lm_head"}, "modules_to_not_convert must be a list of names, not 'lm_"),
        ({**BLOCKS, "modules_to_not_convert": [1]}, r"must be a list of names, not \[1\]"),
        (channels("ignore", ["re:("]), r"quantization_config: 're:\(' is not a regular expression: .*missing \)"),
        (channels("ignore", ["re:a{4294967296}"]), "is not a regular expression: the repetition number is too large"),
        (channels("format", "pack-quantized"), "format = 'pack-quantized' cannot be served; served: float-quantized"),
        (channels("format", "int-quantized"), "format = 'int-quantized' cannot be served"),
        (channels("format", "nvfp4-pack-quantized"), "format = 'nvfp4-pack-quantized' cannot be served"),
        (channels("kv_cache_scheme", {"num_bits": 4}), r"kv_cache_scheme.num_bits = 4 cannot be served; served: 8$"),
        (channels("sparsity_config.format", "sparse-24-bitmask"), "sparsity_config.format = 'sparse-24"),
        (channels("transform_config", {"R1": 1}), r"transform_config = \{'R1': 1\} cannot be served"),
        (channels("config_groups", {}), "config_groups cannot be served: it has 0 groups, one is expected"),
        (channels("config_groups.group_1", {}), "config_groups cannot be served: it has 2 groups"),
        (channels("group.targets", ["re:.*mlp"]), r"group_0.targets = \['re:.*mlp'\] .*served: \['Lin"),
        (channels("group.weights.num_bits", 4), "weights.num_bits = 4 cannot be served; served: 8$"),
        (channels("group.weights.type", "int"), "weights.type = 'int' cannot be served; served: float"),
        (channels("group.weights.strategy", "block"), r"weights.block_structure = None .*served: \[128, 128\]$"),
        (channels("group.weights", BLOCK_WEIGHTS), "input_activations.strategy = 'token' cannot be served; served: gr"),
        (channels("group.weights", {**BLOCK_WEIGHTS, "block_structure": [1, 128]}), r"block_structure = \[1, 128\]"),
        (channels("group.weights.strategy", "group"), "weights.strategy = 'group' .*channel, tensor, block$"),
        (channels("group.weights.symmetric", False), "weights.symmetric = False cannot be served"),
        (channels("group.input_activations", None), "input_activations.num_bits = None cannot be served"),
        (channels("group.input_activations.strategy", "group"), "input_activations.strategy = 'group'"),
        (channels("group.input_activations.dynamic", "local"), "input_activations.dynamic = 'local'"),
        (channels("group.output_activations", {"num_bits": 8}), "output_activations = .* cannot be served"),
        ({**MODELOPT, "quant_algo": "NVFP4"}, "quant_algo = 'NVFP4' cannot be served; served: FP8$"),
        ({**MODELOPT, "kv_cache_quant_algo": "NVFP4"}, "kv_cache_quant_algo = 'NVFP4' cannot be served; served: FP8$"),
    ],
)  # fmt: skip
def test_other_formats_are_refused_by_name(settings: object, message: str) -> None:
    with pytest.raises(StartupError, match=message) as refused:
        read(settings)
    assert str(refused.value).startswith("model/config.json: quantization_config")


def test_modelopts_own_file_is_read_where_the_config_names_no_quantization(tmp_path: Path) -> None:
    file = tmp_path / MODELOPT_FILE

    def read_beside(content: object, **changes: Any) -> QuantizationSpec | None:
        file.write_text(json.dumps(content))
        return resolve_spec(tmp_path, {**CONFIGS["tiny"], **changes}).quantization

    settings = {"quant_algo": "FP8", "kv_cache_quant_algo": "FP8", "exclude_modules": ["lm_head", "*.o_proj"]}
    own = {"producer": {"name": "modelopt", "version": "0.29.0"}, "quantization": settings}
    assert read_beside(own) == read(MODELOPT)
    assert read_beside(own, quantization_config=BLOCKS) == read(BLOCKS)
    for content, message in (
        ({"quantization": {**settings, "quant_algo": "NVFP4"}}, "quantization.quant_algo = 'NVFP4' cannot be served"),
        ({"quantization": "FP8"}, "quantization must be an object, not 'FP8'"),
        ({}, "quantization must be an object, not None"),
        ([], "does not hold a JSON object"),
    ):
        with pytest.raises(StartupError, match=message) as refused:
            read_beside(content)
        assert str(refused.value).startswith(str(file))


@pytest.mark.parametrize(
    ("excluded", "module", "is_quantized"),
    [
        ((), "model.layers.0.mlp.gate_proj", True),
        (("gate",), "model.layers.0.mlp.gate", False),
        (("gate",), "model.layers.0.mlp.gate_proj", True),
        (("model.layers.1",), "model.layers.10.mlp.gate_proj", True),
        (("model.layers.1",), "model.layers.1.mlp.gate_proj", False),
        (("layers.1.mlp.gate_proj",), "model.layers.1.mlp.gate_proj", False),
        (("lm_head",), "lm_head", False),
        (("re:.*mlp.gate$",), "model.layers.0.mlp.gate", False),
        (("re:.*mlp.gate$",), "model.layers.0.mlp.gate_proj", True),
        (("re:layers.*",), "model.layers.0.mlp.gate_proj", True),  # a match begins at the name's beginning
        (("*.mlp.*",), "model.layers.0.mlp.gate_proj", False),
        (("layers.*",), "model.layers.0.mlp.gate_proj", True),
        (("model.layers.*.self_attn",), "model.layers.11.self_attn.q_proj", False),
        (("model.layers.*.self_attn",), "model.layers.11.self_attn_norm", True),
        (("model.layers.*.self_attn",), "model.layers.11.mlp.gate_proj", True),
        (("model.layers.0.self_attn*",), "model.layers.0.self_attn.q_proj", False),
        (("model.layers.0.self_attn*",), "model.layers.10.self_attn.q_proj", True),
        (("re:.*self_attn$",), "model.layers.0.self_attn.q_proj", True),
    ],
)
def test_modules_that_are_left_out(excluded: tuple[str, ...], module: str, is_quantized: bool) -> None:
    assert QuantizationSpec(Scales.BLOCKS, excluded).selector()(module) == is_quantized


PUBLISHED = {
    "gpt-oss": ("model.layers.*.self_attn", "model.layers.*.mlp.router", "model.embed_tokens", "lm_head"),
    "Qwen3-30B-A3B-FP8": (
        "lm_head", "model.layers.0.input_layernorm", "model.layers.0.mlp.gate",
        "model.layers.0.post_attention_layernorm", "model.layers.1.mlp.gate",
    ),
    "Qwen3-Next-FP8": (
        "lm_head", "model.layers.0.linear_attn.conv1d", "model.layers.0.linear_attn.in_proj_ba",
        "model.layers.0.mlp.shared_expert_gate", "mtp.fc",
    ),
    "MiniMax-M2": ("gate", "e_score_correction_bias", "lm_head"),
}  # fmt: skip
MODULES = [
    "lm_head", "model.embed_tokens", "mtp.fc", "model.norm",
    *(
        f"model.layers.{layer}.{part}"
        for layer in (0, 1, 10, 11)
        for part in (
            "self_attn.q_proj", "self_attn.o_proj", "mlp.gate", "mlp.gate_proj", "mlp.router", "mlp.experts.0.up_proj",
            "mlp.shared_expert_gate", "mlp.shared_expert.gate_proj", "block_sparse_moe.gate", "mlp.experts",
            "block_sparse_moe.experts.3.w1", "linear_attn.in_proj_ba", "linear_attn.in_proj_qkvz", "input_layernorm",
        )
    ),
]  # fmt: skip


@pytest.mark.parametrize("name", list(PUBLISHED))
def test_published_lists_leave_out_what_transformers_leaves_out(name: str) -> None:
    from transformers.quantizers.quantizers_utils import should_convert_module

    is_quantized = QuantizationSpec(Scales.BLOCKS, PUBLISHED[name]).selector()
    # There the end of a word counts too: "gate" of MiniMax-M2, which has no shared expert
    modules = [module for module in MODULES if "shared" not in module or name != "MiniMax-M2"]
    found = [module for module in modules if not is_quantized(module)]
    assert found == [module for module in modules if not should_convert_module(module, list(PUBLISHED[name]))]
    assert len(found) > 2


def test_a_published_config_without_dtype_means_bfloat16() -> None:
    """In float32 the KV cache would take twice the memory."""
    spec = resolve_spec(Path(), MINIMAX_M2)
    assert spec.dtype == "bfloat16"
    assert resolve_spec(Path(), {**MINIMAX_M2, "quantization_config": None}).dtype == "float32"
    for name in ("dtype", "torch_dtype"):
        assert resolve_spec(Path(), {**MINIMAX_M2, name: "float16"}).dtype == "float16"
    assert spec.weight_bytes(2) == pytest.approx(230e9, rel=0.01)
    shallow = resolve_spec(Path(), {**MINIMAX_M2, "num_hidden_layers": 1})
    slots = build_model(shallow, TORCH, 64, torch.bfloat16, torch.device("meta")).slots
    layer = "model.layers.0"
    assert {
        name: slots[f"{layer}.{name}"].shape
        for name in (
            "self_attn.q_norm.weight",
            "self_attn.k_proj.weight_scale_inv",
            "block_sparse_moe.e_score_correction_bias",
            "block_sparse_moe.gate.weight",
            "block_sparse_moe.experts.255.w1.weight_scale_inv",
            "block_sparse_moe.experts.255.w2.weight_scale_inv",
        )
    } == {
        "self_attn.q_norm.weight": (6144,),
        "self_attn.k_proj.weight_scale_inv": (8, 24),
        "block_sparse_moe.e_score_correction_bias": (256,),
        "block_sparse_moe.gate.weight": (256, 3072),
        "block_sparse_moe.experts.255.w1.weight_scale_inv": (12, 24),
        "block_sparse_moe.experts.255.w2.weight_scale_inv": (24, 12),
    }
    assert sum(name.endswith("weight_scale_inv") for name in slots) == 4 + 3 * 256
    routers = [slot.tensor.dtype for name, slot in slots.items() if name.endswith(("_bias", ".gate.weight"))]
    assert routers == [torch.float32] * 2, "a rounded bias chooses other experts"


def test_only_quantized_models_say_so_in_their_fingerprint() -> None:
    plain, blocks, tensor = (
        resolve_spec(Path(), {**CONFIGS["tiny"], "quantization_config": settings})
        for settings in (None, BLOCKS, TENSOR)
    )
    assert "quantization" not in plain.semantic()
    assert json.loads(json.dumps(blocks.semantic()))["quantization"] == {
        "scales": "block", "excluded": ["lm_head"], "tensor_name": "weight_scale_inv",
    }  # fmt: skip
    assert len({fingerprint(spec, "dummy") for spec in (plain, blocks, tensor)}) == 3
    assert replace(blocks, quantization=None) == plain


def test_quantized_weights_count_one_byte() -> None:
    plain, blocks = (resolve_spec(Path(), {**CONFIGS["8b"], "quantization_config": kind}) for kind in (None, BLOCKS))
    estimates = [MemoryEstimate(SchedulerConfig(), spec, 2, 100e9, 2) for spec in (plain, blocks)]
    assert [round(estimate.weight_bytes / 1e9, 2) for estimate in estimates] == [16.06, 9.08]
    assert estimates[1].room - estimates[0].room == plain.layer_parameters


@pytest.mark.parametrize("settings", [BLOCKS, CHANNELS, TENSOR], ids=["blocks", "channels", "tensor"])
@pytest.mark.parametrize(
    "config", [CONFIGS["tiny"] | {"num_key_value_heads": 8, "num_attention_heads": 8}, QWEN3_EXPERTS]
)
def test_dummy_weights_are_spread_as_plain_ones(config: dict[str, Any], settings: dict[str, Any]) -> None:
    spec = resolve_spec(Path(), {**config, "quantization_config": settings})
    models = [build_model(spec, TORCH, 64, torch.float32, torch.device("cpu")) for _ in range(3)]
    for model, seed in zip(models, (0, 0, 1), strict=True):
        fill_at_random(model, seed)
    first, again, other = ([slot.tensor.float() for slot in model.slots.values()] for model in models)
    assert all(map(torch.equal, first, again))
    assert spec.quantization is not None
    kinds = {name: slot.tensor.dtype for name, slot in models[0].slots.items()}
    quantized = [name for name, dtype in kinds.items() if dtype is torch.float8_e4m3fn]
    assert len(quantized) == sum("_proj" in name and name.endswith(".weight") for name in kinds) > 10
    for name, values, others in zip(kinds, first, other, strict=True):
        if name in quantized:
            scale = models[0].slots[name.replace(".weight", f".{spec.quantization.tensor_name}")].tensor
            assert (values * scale.mean()).std().item() == pytest.approx(0.02, rel=0.05)
            assert (values == 0).float().mean() < 1e-3
            assert not torch.equal(values, others)


def blocks_of(dim: int, start: int, size: int) -> Slot:
    """The slot of the scales of a part of a weight [400, 300]."""
    shape = [400, 300]
    shape[dim] = size
    part = Slot(torch.empty(shape), (400, 300), dim, start)
    return part.of_scales("up", torch.empty(-(-shape[0] // 128), -(-shape[1] // 128)), Scales.BLOCKS)


@pytest.mark.parametrize(("dim", "start", "size"), [(0, 128, 128), (0, 256, 144), (1, 256, 44), (1, 0, 300)])
def test_scales_are_cut_with_their_weight(dim: int, start: int, size: int) -> None:
    whole = torch.arange(12.0).view(4, 3)
    slot = blocks_of(dim, start, size)
    slot.fill(lambda index: whole[index])
    assert slot.fits((4, 3))
    assert torch.equal(slot.tensor, whole.narrow(dim, start // 128, -(-size // 128)))


@pytest.mark.parametrize(("dim", "start", "size"), [(0, 64, 128), (0, 0, 200), (1, 128, 100)])
def test_a_cut_through_blocks_is_refused_by_name(dim: int, start: int, size: int) -> None:
    with pytest.raises(StartupError, match=rf"^up cannot be cut at {start} and {start + size}: .* 128 x 128$"):
        blocks_of(dim, start, size)


def test_scales_of_channels_and_tensors_are_cut_too() -> None:
    rows, columns = Slot(torch.empty(2, 6), (4, 6), 0, 2), Slot(torch.empty(4, 3), (4, 6), 1, 3)
    scales = torch.arange(4.0).view(4, 1)
    for part, expected in ((rows, scales[2:]), (columns, scales)):
        slot = part.of_scales("up", torch.empty(len(expected), 1), Scales.CHANNELS)
        slot.fill(lambda index: scales[index])
        assert torch.equal(slot.tensor, expected)
        one = part.of_scales("up", torch.empty(len(expected), 1), Scales.TENSOR)
        one.fill(lambda index: torch.tensor([3.0])[index])
        assert torch.equal(one.tensor, torch.full_like(expected, 3.0))
        assert (one.fits(()), one.fits((1,)), one.fits((4, 1)), slot.fits((1,))) == (True, True, False, False)
