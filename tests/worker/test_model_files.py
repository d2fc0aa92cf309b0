"""Configs, weights and fingerprints: what is read, what is refused, and with which words."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from pd_cluster.errors import StartupError
from pd_cluster.models.directory import model_directory, read_json
from pd_cluster.models.fingerprint import fingerprint
from pd_cluster.models.hf_config import read_eos_token_ids
from pd_cluster.models.registry import ARCHITECTURES, resolve_spec
from pd_cluster.models.rope import rope_frequencies
from pd_cluster.models.spec import ExpertsSpec, ModelSpec, RopeSpec
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


def test_both_names_of_the_number_of_experts_mean_the_same(tmp_path: Path) -> None:
    hub = spec_of(tmp_path, **QWEN3_EXPERTS)
    assert spec_of(tmp_path, **{**QWEN3_EXPERTS, "num_experts": None}, num_local_experts=8) == hub


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


@pytest.mark.parametrize("name", ["llama-llama3-rope-biases", "llama-mha-linear-rope-tied", "qwen3"])
def test_rope_frequencies_equal_transformers(models: ModelStore, name: str) -> None:
    saved = models.get(name)
    spec = resolve_spec(saved.directory, read_json(saved.directory / "config.json"))
    assert torch.allclose(rope_frequencies(spec.rope, spec.head_dim), saved.model.model.rotary_emb.inv_freq, rtol=1e-6)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"architectures": ["GPT2LMHeadModel"]},
            "GPT2LMHeadModel is not served; served are Llama.*Mistral.*Qwen2.*Qwen3",
        ),
        ({"architectures": None}, "architecture none named is not served"),
        ({"hidden_act": "gelu"}, "hidden_act = 'gelu' cannot be served: only silu"),
        ({"rope_scaling": {"type": "yarn", "factor": 2.0}}, "RoPE of type yarn; served: default, linear, llama3"),
        ({"rope_parameters": {"full_attention": {"rope_type": "default"}}}, "per layer type"),
        ({"rope_scaling": {"type": "linear"}}, "factor is missing"),
        ({"rope_scaling": {"type": "llama3", "factor": 2.0}}, "low_freq_factor, high_freq_factor missing"),
        ({"partial_rotary_factor": 0.5}, "partial rotary"),
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
    assert read_eos_token_ids(tmp_path, {"eos_token_id": 2}) == {2, 5, 6}
    assert read_eos_token_ids(tmp_path / "none", {"eos_token_id": None}) == frozenset()


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
    assert {f"{kind}ForCausalLM" for kind, _ in MODELS.values()} == set(ARCHITECTURES)
