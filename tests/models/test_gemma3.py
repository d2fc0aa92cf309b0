"""Gemma 3: what its configs say, in both spellings, and its roundings in bfloat16."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from pd_cluster.errors import StartupError
from pd_cluster.models.fingerprint import fingerprint
from pd_cluster.models.registry import resolve_spec
from pd_cluster.models.spec import ModelSpec, RopeSpec
from pd_cluster.protocol.sampling_params import SamplingParams
from tests.worker.conftest import ModelStore, SavedModel
from tests.worker.driver import Driver, make_executor, random_prompts

HUB = {  # of gemma-3-1b-it, with the longer context of its larger relatives
    "architectures": ["Gemma3ForCausalLM"], "model_type": "gemma3_text", "vocab_size": 262144, "hidden_size": 1152,
    "intermediate_size": 6912, "num_hidden_layers": 26, "num_attention_heads": 4, "num_key_value_heads": 1,
    "head_dim": 256, "hidden_activation": "gelu_pytorch_tanh", "max_position_embeddings": 32768,
    "query_pre_attn_scalar": 256, "rms_norm_eps": 1e-6, "sliding_window": 512, "sliding_window_pattern": 6,
    "rope_local_base_freq": 10000, "rope_theta": 1000000, "rope_scaling": {"factor": 8.0, "rope_type": "linear"},
    "attn_logit_softcapping": None, "final_logit_softcapping": None, "torch_dtype": "bfloat16",
}  # fmt: skip
NESTED = {
    "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1000000.0},
    "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
}


def spec_of(**changes: Any) -> ModelSpec:
    config = {**HUB, **changes}
    return resolve_spec(Path(), {name: value for name, value in config.items() if value != "absent"})


def test_the_hub_spelling_is_read() -> None:
    spec = spec_of()
    assert spec.rope == RopeSpec(1e6, "linear", 8.0)
    assert spec.window_rope == RopeSpec(1e4)
    assert spec.windows == ((512,) * 5 + (0,)) * 4 + (512, 512)
    assert spec.attention_scale == 1 / 16
    assert spec.tied_embeddings
    assert spec.qk_norm


def test_the_spelling_of_transformers_5_means_the_same() -> None:
    layers = [f"{'full' if layer % 6 == 5 else 'sliding'}_attention" for layer in range(26)]
    flat = ("rope_theta", "rope_local_base_freq", "rope_scaling", "sliding_window_pattern")
    assert spec_of(rope_parameters=NESTED, layer_types=layers, **dict.fromkeys(flat, "absent")) == spec_of()


def test_what_a_config_leaves_out_has_the_defaults_of_transformers() -> None:
    left_out = ("head_dim", "num_key_value_heads", "query_pre_attn_scalar", "rope_theta", "rope_local_base_freq",
                "sliding_window", "sliding_window_pattern", "max_position_embeddings", "rope_scaling")  # fmt: skip
    spec = spec_of(**dict.fromkeys(left_out, "absent"))
    assert (spec.head_dim, spec.num_kv_heads, spec.max_len, spec.attention_scale) == (256, 4, 131072, 1 / 16)
    assert (spec.rope, spec.window_rope, spec.windows[:6]) == (RopeSpec(1e6), RopeSpec(1e4), (4096,) * 5 + (0,))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"final_logit_softcapping": 30.0}, "final_logit_softcapping = 30.0 cannot be served: a soft cap on logits"),
        ({"attn_logit_softcapping": 50.0}, "a soft cap on scores is not served"),
        ({"use_bidirectional_attention": True}, "bidirectional attention is not served"),
        ({"hidden_activation": "silu"}, "hidden_activation = 'silu' cannot be served: only gelu_pytorch_tanh"),
        ({"rope_parameters": {"rope_type": "default"}}, "RoPE settings per layer type are expected"),
        ({"layer_types": ["full_attention"]}, "there are 26 layers"),
        ({"sliding_window_pattern": 0}, "sliding_window_pattern must be a positive integer, not 0"),
        ({"query_pre_attn_scalar": -1}, "query_pre_attn_scalar must be a positive integer, not -1"),
        ({"architectures": ["Gemma2ForCausalLM"]}, "Gemma2ForCausalLM is not served; served are .*Gemma3ForCausalLM"),
        ({"architectures": ["Gemma3ForConditionalGeneration"]}, "Generation needs a text_config, not None"),
    ],
)
def test_what_is_not_served_is_refused_by_name(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(StartupError, match=message):
        spec_of(**changes)


def test_the_fingerprint_has_all_that_changes_keys_and_values() -> None:
    others: list[dict[str, Any]] = [
        {"rope_local_base_freq": 20000}, {"rope_theta": 2e6}, {"query_pre_attn_scalar": 128}, {"sliding_window": 256},
        {"sliding_window_pattern": 5}, {"rope_scaling": None},
    ]  # fmt: skip
    prints = {fingerprint(spec_of(**changes), "dummy") for changes in ({}, *others)}
    assert len(prints) == 1 + len(others)
    assert fingerprint(spec_of(max_position_embeddings=1024), "dummy") in prints


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> SavedModel:
    return ModelStore(tmp_path_factory.mktemp("models")).get("gemma3")


@pytest.mark.long
def test_a_config_in_the_hub_spelling_gives_the_same_tokens(saved: SavedModel, tmp_path: Path) -> None:
    config = json.loads((saved.directory / "config.json").read_text())
    ropes = config.pop("rope_parameters")
    del config["layer_types"]
    config |= {
        "rope_theta": ropes["full_attention"].pop("rope_theta"), "rope_scaling": ropes["full_attention"],
        "rope_local_base_freq": ropes["sliding_attention"]["rope_theta"], "sliding_window_pattern": 6,
    }  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(config))
    (tmp_path / "model.safetensors").symlink_to(saved.directory / "model.safetensors")
    driver, prompt = Driver(make_executor(tmp_path), budget=32), random_prompts([60], 320)[0]
    driver.add(prompt)
    assert driver.run() == [saved.generate(prompt, 12)]


@pytest.mark.long
def test_bfloat16_is_as_near_to_float32_as_that_of_transformers(saved: SavedModel) -> None:
    """As a root mean square over the vocabulary, summed over prompts: roundings are at the same places."""
    executor = make_executor(saved.directory, dtype="bfloat16")
    seen: list[torch.Tensor] = []
    executor.watch_logits(lambda logits: seen.append(logits.float().clone()))
    short = type(saved.model).from_pretrained(saved.directory, dtype=torch.bfloat16).eval()
    ours = theirs = 0.0
    for prompt in random_prompts([5, 30, 60, 90], 320, seed=2):
        driver = Driver(executor)
        driver.add(prompt, SamplingParams(max_tokens=1, temperature=0.0))
        driver.run()
        with torch.inference_mode():
            exact, rounded = (model(torch.tensor([prompt])).logits[0, -1].float() for model in (saved.model, short))
        ours += float((seen[-1][0] - exact).norm())
        theirs += float((rounded - exact).norm())
    assert ours < 1.2 * theirs
