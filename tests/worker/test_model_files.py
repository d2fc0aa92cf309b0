"""Configs, weights and fingerprints: what is read, what is refused, and with which words."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from pd_cluster.errors import StartupError
from pd_cluster.models.directory import model_directory, read_json
from pd_cluster.models.end_tokens import read_end_tokens
from pd_cluster.models.fingerprint import fingerprint
from pd_cluster.models.registry import ARCHITECTURES, resolve_spec
from pd_cluster.models.rope import rope_frequencies
from pd_cluster.models.spec import ExpertsSpec, ModelSpec, RopeSpec
from tests.models.state_models import STATE_MODELS
from tests.worker.conftest import MODELS, ModelStore
from tests.worker.driver import Driver, make_executor

if TYPE_CHECKING:
    from pathlib import Path

CONFIG = {
    "architectures": ["LlamaForCausalLM"], "vocab_size": 100, "hidden_size": 64, "intermediate_size": 96,
    "num_hidden_layers": 4, "num_attention_heads": 4,
}  # fmt: skip
QWEN3_EXPERTS = {
    "architectures": ["Qwen3MoeForCausalLM"], "num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 24,
}  # fmt: skip
QWEN2_EXPERTS = {
    **QWEN3_EXPERTS, "architectures": ["Qwen2MoeForCausalLM"], "num_key_value_heads": 2,
    "shared_expert_intermediate_size": 40,
}  # fmt: skip
MIXTRAL = {
    "architectures": ["MixtralForCausalLM"], "num_local_experts": 8, "num_experts_per_tok": 2, "num_key_value_heads": 2,
}  # fmt: skip
GLM4_MOE = {
    "architectures": ["Glm4MoeForCausalLM"], "n_routed_experts": 8, "num_experts_per_tok": 2,
    "moe_intermediate_size": 24, "num_key_value_heads": 2,
}  # fmt: skip
GPT_OSS = {**MIXTRAL, "architectures": ["GptOssForCausalLM"]}
FP8 = {"quant_method": "fp8", "weight_block_size": [128, 128]}
MINIMAX_M2 = {**MIXTRAL, "architectures": ["MiniMaxM2ForCausalLM"], "head_dim": 32}


def spec_of(tmp_path: Path, **changes: Any) -> ModelSpec:
    return resolve_spec(tmp_path, {**CONFIG, **changes})


def test_defaults_of_a_bare_config(tmp_path: Path) -> None:
    spec = spec_of(tmp_path)
    assert (spec.num_kv_heads, spec.head_dim, spec.norm_eps, spec.max_len) == (4, 16, 1e-6, 2048)
    assert (spec.rope, spec.windows) == (RopeSpec(10000.0), (0, 0, 0, 0))
    assert not any((spec.qkv_bias, spec.out_bias, spec.mlp_bias, spec.qk_norm, spec.tied_embeddings))


@pytest.mark.parametrize(
    ("architecture", "changes", "windows"),
    [
        ("Llama", {"sliding_window": 8}, (0, 0, 0, 0)),
        ("Mistral", {"num_key_value_heads": 2}, (4096,) * 4),
        ("Mistral", {"num_key_value_heads": 2, "sliding_window": None}, (0,) * 4),
        ("Qwen2", {"num_key_value_heads": 2, "sliding_window": 8}, (0,) * 4),
        ("Qwen2", {"num_key_value_heads": 2, "sliding_window": 8, "use_sliding_window": True}, (0,) * 4),
        (
            "Qwen3",
            {"num_key_value_heads": 2, "sliding_window": 8, "use_sliding_window": True, "max_window_layers": 3},
            (0, 0, 0, 8),
        ),
        (
            "Qwen3",
            {
                "num_key_value_heads": 2,
                "sliding_window": 8,
                "use_sliding_window": True,
                "layer_types": ["sliding_attention", "full_attention"] * 2,
            },
            (8, 0, 8, 0),
        ),
    ],
)
def test_windows(tmp_path: Path, architecture: str, changes: dict[str, Any], windows: tuple[int, ...]) -> None:
    assert spec_of(tmp_path, architectures=[f"{architecture}ForCausalLM"], **changes).windows == windows


def test_experts_of_a_bare_config(tmp_path: Path) -> None:
    qwen3 = spec_of(tmp_path, **QWEN3_EXPERTS)
    assert qwen3.experts == ExpertsSpec(8, 2, 24, normalized=False)
    assert spec_of(tmp_path, **QWEN3_EXPERTS, qkv_bias=False) == qwen3, "a setting of Qwen2's only"
    assert spec_of(tmp_path, **QWEN3_EXPERTS, norm_topk_prob=True).experts == ExpertsSpec(8, 2, 24, normalized=True)
    assert spec_of(tmp_path, **QWEN2_EXPERTS).experts == ExpertsSpec(8, 2, 24, normalized=False, shared_size=40)
    mixtral = spec_of(tmp_path, **MIXTRAL)
    assert mixtral.experts == ExpertsSpec(8, 2, 96, normalized=True)
    assert (mixtral.windows, mixtral.norm_eps, mixtral.rope) == ((0,) * 4, 1e-5, RopeSpec(1e6))


def test_sigmoid_routing_of_a_bare_config_and_of_all_settings(tmp_path: Path) -> None:
    glm = spec_of(tmp_path, **GLM4_MOE)
    bare = ExpertsSpec(
        8, 2, 24, normalized=True, shared_size=24, dense_layers=(0,), shared_gated=False, is_sigmoid=True
    )
    assert glm.experts == bare
    assert (glm.rotary_dim, glm.qk_norm, glm.norms_heads_together, glm.norm_eps) == (8, False, False, 1e-5)
    settings = {"n_group": 4, "topk_group": 2, "n_shared_experts": 2, "first_k_dense_replace": 3}
    others = {"norm_topk_prob": False, "routed_scaling_factor": 2.5}
    expected = ExpertsSpec(8, 2, 24, False, 48, (0, 1, 2), False, True, factor=2.5, num_groups=4, groups_chosen=2)
    assert spec_of(tmp_path, **GLM4_MOE, **settings, **others).experts == expected
    without = spec_of(tmp_path, **GLM4_MOE, n_shared_experts=0, first_k_dense_replace=0).experts
    assert without is not None
    assert (without.shared_size, without.dense_layers) == (0, ())
    biases = spec_of(tmp_path, **GLM4_MOE, attention_bias=True, use_qk_norm=True)
    assert (biases.qkv_bias, biases.out_bias, biases.qk_norm) == (True, False, True)
    minimax = spec_of(tmp_path, **MINIMAX_M2, scoring_func="sigmoid")
    assert minimax.experts == ExpertsSpec(8, 2, 96, normalized=True, shared_gated=False, is_sigmoid=True)
    assert (minimax.qk_norm, minimax.norms_heads_together, minimax.rotary_dim) == (True, True, None)
    assert minimax.rope == RopeSpec(5e6)


def test_settings_of_gpt_oss_mean_what_they_mean_in_transformers(tmp_path: Path) -> None:
    """It has windows whatever `use_sliding_window` says, and biases unless the config has none."""
    spec = spec_of(tmp_path, **GPT_OSS)
    assert (spec.qkv_bias, spec.out_bias, spec.windows) == (True, True, (128, 0, 128, 0))
    assert spec_of(tmp_path, **GPT_OSS, use_sliding_window=True) == spec
    assert spec_of(tmp_path, **GPT_OSS, use_sliding_window=False) == spec
    assert spec_of(tmp_path, **GPT_OSS, attention_bias=True) == spec
    bare = spec_of(tmp_path, **GPT_OSS, attention_bias=False)
    assert (bare.qkv_bias, bare.out_bias) == (False, False)


@pytest.mark.parametrize(
    ("model", "old", "new"),
    [
        (QWEN3_EXPERTS, {}, {"num_experts": None, "num_local_experts": 8}),
        (GLM4_MOE, {}, {"n_routed_experts": None, "num_local_experts": 8}),
        (GLM4_MOE, {"partial_rotary_factor": 0.25}, {"rope_parameters": {"partial_rotary_factor": 0.25}}),
        (MINIMAX_M2, {"rotary_dim": 8}, {"partial_rotary_factor": 0.25}),
        (MINIMAX_M2, {"rotary_dim": 32}, {}),
        (MINIMAX_M2, {}, {"num_local_experts": None, "num_experts": 8}),
    ],
)
def test_both_spellings_of_a_setting_mean_the_same(
    tmp_path: Path, model: dict[str, Any], old: dict[str, Any], new: dict[str, Any]
) -> None:
    assert spec_of(tmp_path, **{**model, **old}) == spec_of(tmp_path, **{**model, **new})


@pytest.mark.parametrize(
    ("changes", "dense"),
    [
        ({"mlp_only_layers": [1, 3]}, (1, 3)),
        ({"decoder_sparse_step": 2}, (0, 2)),
        ({"decoder_sparse_step": 2, "mlp_only_layers": [1, 9]}, (0, 1, 2)),
    ],
)
def test_layers_without_experts(tmp_path: Path, changes: dict[str, Any], dense: tuple[int, ...]) -> None:
    spec = spec_of(tmp_path, **QWEN3_EXPERTS, **changes)
    assert spec.experts is not None
    assert spec.experts.dense_layers == dense


def test_parameters_count_all_experts_and_keys_per_token_those_that_are_chosen(tmp_path: Path) -> None:
    attention, dense, expert = 64 * 16 * 4 * 4, 3 * 64 * 96, 3 * 64 * 24
    heads = {"num_key_value_heads": 4, "mlp_only_layers": [0]}
    spec = spec_of(tmp_path, **{**QWEN2_EXPERTS, **heads})
    assert spec.layer_parameters == 4 * attention + dense + 3 * (8 * expert + 3 * 64 * 40)
    all_chosen = spec_of(tmp_path, **{**QWEN2_EXPERTS, **heads, "num_experts_per_tok": 8})
    ratio = (4 * attention + dense + 3 * (2 * expert + 3 * 64 * 40)) / spec.layer_parameters
    assert spec.keys_per_token == pytest.approx(ratio * all_chosen.keys_per_token, rel=0.01)


def test_both_spellings_of_rope_settings_mean_the_same(tmp_path: Path) -> None:
    scaling = {"factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 2.0, "original_max_position_embeddings": 32}
    new = spec_of(tmp_path, rope_parameters={"rope_type": "llama3", "rope_theta": 500.0, **scaling})
    old = spec_of(tmp_path, rope_theta=500.0, rope_scaling={"type": "llama3", **scaling})
    assert new == old
    assert new.rope == RopeSpec(500.0, "llama3", 4.0, 1.0, 2.0, 32)


@pytest.mark.parametrize(
    "name",
    ["llama-llama3-rope-biases", "llama-mha-linear-rope-tied", "qwen3-yarn", "glm4-experts", "glm4-air", "minimax-m2"],
)
def test_rope_frequencies_equal_transformers(models: ModelStore, name: str) -> None:
    saved = models.get(name)
    spec = resolve_spec(saved.directory, read_json(saved.directory / "config.json"))
    found = rope_frequencies(spec.rope, spec.rotary_dim or spec.head_dim)
    assert torch.allclose(found, saved.model.model.rotary_emb.inv_freq, rtol=1e-6)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"architectures": ["GPT2LMHeadModel"]},
            "GPT2LMHeadModel is not served; served are Llama.*Mistral.*Qwen2.*Qwen3",
        ),
        ({"architectures": None}, "architecture none named is not served"),
        ({"hidden_act": "gelu"}, "hidden_act = 'gelu' cannot be served: only silu"),
        ({"rope_scaling": {"type": "longrope", "factor": 2.0}}, "RoPE of type longrope; served: default, linear, "),
        ({"rope_parameters": {"full_attention": {"rope_type": "default"}}}, "per layer type"),
        ({"rope_scaling": {"type": "linear"}}, r"rope_scaling\.factor must be a positive number, not None"),
        (
            {"rope_scaling": {"type": "llama3", "factor": 2.0}},
            r"rope_scaling\.low_freq_factor must be a positive number, not None",
        ),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor = 0.5 cannot be served: .* heads rotate as a whole"),
        ({"rope_scaling": {"partial_rotary_factor": 0.5}}, "heads rotate as a whole"),
        ({**GLM4_MOE, "partial_rotary_factor": "half"}, "partial_rotary_factor must be a positive number, not 'half'"),
        ({**GLM4_MOE, "partial_rotary_factor": float("nan")}, "partial_rotary_factor must be a positive number, not n"),
        ({**GLM4_MOE, "routed_scaling_factor": "2"}, "routed_scaling_factor must be a positive number, not '2'"),
        ({"rms_norm_eps": 0}, "rms_norm_eps must be a positive number, not 0"),
        ({"rope_theta": 10**400}, "rope_theta must be a positive number, not 1000"),
        ({"rope_scaling": "linear"}, "rope_scaling must be an object, not 'linear'"),
        ({"rope_parameters": {"rope_theta": "x"}}, r"rope_parameters\.rope_theta must be a positive number, not 'x'"),
        ({**MIXTRAL, "sliding_window": -1}, "sliding_window must be an integer of at least 0, not -1"),
        ({"head_dim": "64"}, "head_dim must be a positive integer, not '64'"),
        ({"num_key_value_heads": 0}, "num_key_value_heads must be a positive integer, not 0"),
        ({"max_position_embeddings": 2048.5}, "max_position_embeddings must be a positive integer, not 2048.5"),
        ({"architectures": "LlamaForCausalLM"}, "architecture none named is not served"),
        ({**GLM4_MOE, "partial_rotary_factor": 0.2}, "3 of 16 dimensions cannot rotate"),
        ({**GLM4_MOE, "partial_rotary_factor": 1.5}, "24 of 16 dimensions cannot rotate"),
        (
            {**GPT_OSS, "quantization_config": FP8},
            "quantization_config = .* cannot be served: float8 weights of gpt-oss",
        ),
        ({**MIXTRAL, "use_sliding_window": True}, "use_sliding_window = True cannot be served: sliding windows"),
        ({**MINIMAX_M2, "rotary_dim": 64}, "64 of 32 dimensions cannot rotate"),
        ({**MINIMAX_M2, "scoring_func": "softmax"}, "scoring_func = 'softmax' cannot be served: .* only sigmoid"),
        ({**GLM4_MOE, "n_group": 3}, "n_group = 3 cannot be served: there are 8 experts"),
        ({**GLM4_MOE, "n_group": 8, "topk_group": 2}, "n_group = 8 cannot be served: a group's rank is the sum"),
        ({**GLM4_MOE, "n_group": 4, "topk_group": 5}, "topk_group = 5 cannot be served: there are 4 groups"),
        ({**GLM4_MOE, "n_group": 4, "num_experts_per_tok": 3}, "topk_group = None cannot be served: 3 experts are"),
        ({**GLM4_MOE, "n_shared_experts": -1}, "n_shared_experts must be an integer of at least 0, not -1"),
        ({**GLM4_MOE, "n_routed_experts": None}, "num_local_experts must be a positive integer, not None"),
        (
            {"quantization_config": {"quant_method": "gptq"}},
            "quantization_config.quant_method = 'gptq' cannot be served",
        ),
        ({"num_key_value_heads": 3}, "4 heads cannot share 3"),
        ({"vocab_size": None}, "vocab_size must be a positive integer, not None"),
        ({"num_hidden_layers": "4"}, "num_hidden_layers must be a positive integer, not '4'"),
        (
            {
                "architectures": ["Qwen3ForCausalLM"],
                "num_key_value_heads": 2,
                "use_sliding_window": True,
                "layer_types": ["linear"],
            },
            "linear layers are not served",
        ),
        (
            {"architectures": ["MistralForCausalLM"], "num_key_value_heads": 2, "layer_types": ["full_attention"] * 4},
            "every layer has the same window",
        ),
        ({**QWEN3_EXPERTS, "use_sliding_window": True}, "use_sliding_window = True cannot be served: sliding windows"),
        ({**QWEN3_EXPERTS, "num_experts_per_tok": 9}, "num_experts_per_tok = 9 cannot be served: there are 8 experts"),
        ({**QWEN3_EXPERTS, "num_experts_per_tok": True}, "num_experts_per_tok must be a positive integer, not True"),
        ({**QWEN3_EXPERTS, "mlp_only_layers": 1}, "mlp_only_layers = 1 cannot be served: a list of layers is expected"),
        ({**QWEN3_EXPERTS, "num_experts": None}, "num_local_experts must be a positive integer, not None"),
        ({**QWEN3_EXPERTS, "moe_intermediate_size": None}, "moe_intermediate_size must be a positive integer"),
        ({**QWEN2_EXPERTS, "qkv_bias": False}, "qkv_bias = False cannot be served"),
        ({**QWEN2_EXPERTS, "shared_expert_intermediate_size": None}, "shared_expert_intermediate_size must be"),
    ],
)
def test_what_cannot_be_served_is_refused_by_name(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(StartupError, match=message):
        spec_of(tmp_path, **changes)


def test_eos_ids_come_from_both_files(tmp_path: Path) -> None:
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [5, 6]}')
    assert read_end_tokens(tmp_path, {"eos_token_id": 2}).ids == {2, 5, 6}
    assert read_end_tokens(tmp_path / "none", {"eos_token_id": None}).ids == frozenset()


@pytest.mark.parametrize("model", ["no/such/place", "./nowhere", "/nowhere", "plainname"])
def test_a_model_that_is_nowhere_is_a_startup_error(model: str) -> None:
    with pytest.raises(StartupError, match="neither a directory nor a hub id"):
        model_directory(model)


@pytest.mark.parametrize(
    ("content", "message"), [(None, "has no config.json"), ("{", "cannot read"), ("[]", "JSON object")]
)
def test_bad_config_files(tmp_path: Path, content: str | None, message: str) -> None:
    if content is not None:
        (tmp_path / "config.json").write_text(content)
    with pytest.raises(StartupError, match=message):
        make_executor(tmp_path)


def copy_model(models: ModelStore, target: Path, name: str = "qwen2") -> dict[str, torch.Tensor]:
    """The model's config in `target`; its tensors."""
    source = models.get(name).directory
    (target / "config.json").write_text((source / "config.json").read_text())
    tensors: dict[str, torch.Tensor] = load_file(source / "model.safetensors")
    return tensors


def save_sharded(tensors: dict[str, torch.Tensor], target: Path) -> None:
    names = sorted(tensors)
    weight_map = {}
    for shard in range(3):
        part = {name: tensors[name] for name in names[shard::3]}
        save_file(part, target / f"model-{shard}.safetensors")
        weight_map.update(dict.fromkeys(part, f"model-{shard}.safetensors"))
    (target / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))


def test_shards_load_like_one_file_and_have_its_fingerprint(models: ModelStore, tmp_path: Path) -> None:
    save_sharded(copy_model(models, tmp_path), tmp_path)
    executor, saved = make_executor(tmp_path), models.get("qwen2")
    driver = Driver(executor)
    driver.add([5, 6, 7, 8])
    assert driver.run() == [saved.generate([5, 6, 7, 8], 12)]
    assert executor.model.fingerprint == make_executor(saved.directory).model.fingerprint
    (tmp_path / "model-1.safetensors").unlink()
    with pytest.raises(StartupError, match=r"has no model-1\.safetensors"):
        make_executor(tmp_path)


def test_weights_that_do_not_fit_are_named(models: ModelStore, tmp_path: Path) -> None:
    tensors = copy_model(models, tmp_path)
    key = "model.layers.1.self_attn.k_proj.bias"
    value = tensors.pop(key)
    save_file({**tensors, "model.layers.1.self_attn.k_proj.bios": value}, tmp_path / "model.safetensors")
    with pytest.raises(StartupError, match=r"missing: model\.layers\.1\.self_attn\.k_proj\.bias; unknown: .*bios"):
        make_executor(tmp_path)
    save_file({**tensors, key: value[:-1].clone()}, tmp_path / "model.safetensors")
    with pytest.raises(StartupError, match=r"k_proj\.bias is \[15\], config\.json implies \[16\]"):
        make_executor(tmp_path)
    save_file({**tensors, key: value.to(torch.float8_e4m3fn)}, tmp_path / "model.safetensors")
    with pytest.raises(StartupError, match=r"k_proj\.bias is stored as F8_E4M3, config\.json implies F64"):
        make_executor(tmp_path)
    (tmp_path / "model.safetensors").write_bytes(b"\x10\0\0\0\0\0\0\0not a header at all")
    with pytest.raises(StartupError, match="not a safetensors file"):
        make_executor(tmp_path)
    (tmp_path / "model.safetensors").write_bytes(b"version https://git-lfs.github.com/spec/v1\noid sha256:0\n")
    with pytest.raises(StartupError, match="git-lfs pointer"):
        make_executor(tmp_path)
    (tmp_path / "model.safetensors").unlink()
    with pytest.raises(StartupError, match="safetensors files only"):
        make_executor(tmp_path)


def test_a_tied_checkpoint_may_carry_its_head_and_old_buffers(models: ModelStore, tmp_path: Path) -> None:
    tensors = copy_model(models, tmp_path)
    extra = {
        "lm_head.weight": tensors["model.embed_tokens.weight"].clone(),
        "model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(4),
    }
    save_file({**tensors, **extra}, tmp_path / "model.safetensors")
    driver = Driver(make_executor(tmp_path))
    driver.add([5, 6, 7, 8])
    assert driver.run() == [models.get("qwen2").generate([5, 6, 7, 8], 12)]


def test_fingerprint_sees_weights_and_meaning_but_not_lengths_and_paths(models: ModelStore, tmp_path: Path) -> None:
    tensors = copy_model(models, tmp_path)
    spec = resolve_spec(tmp_path, read_json(tmp_path / "config.json"))
    save_file(tensors, tmp_path / "model.safetensors")
    original = fingerprint(spec, models.get("qwen2").directory)
    assert fingerprint(spec, tmp_path) == original
    longer = {**read_json(tmp_path / "config.json"), "max_position_embeddings": 4096}
    assert fingerprint(resolve_spec(tmp_path, longer), tmp_path) == original
    other_theta = {**longer, "rope_parameters": {"rope_type": "default", "rope_theta": 9999.0}}
    assert fingerprint(resolve_spec(tmp_path, other_theta), tmp_path) != original
    tensors["model.layers.2.mlp.down_proj.weight"][-1, -1] += 1e-3
    save_file(tensors, tmp_path / "model.safetensors")
    assert fingerprint(spec, tmp_path) != original
    assert len({original, fingerprint(spec, "dummy 0"), fingerprint(spec, "dummy 1")}) == 3


def test_every_family_has_a_model_in_these_tests() -> None:
    kinds = {kind for kind, _ in [*MODELS.values(), *STATE_MODELS.values()]}  # the latter: test_state_slots.py
    assert {f"{kind}ForCausalLM" for kind in kinds} == set(ARCHITECTURES)
