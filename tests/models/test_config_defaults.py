"""What a config leaves out means what transformers reads for its model type, in every native family."""

from __future__ import annotations

import json
from copy import deepcopy
from typing import TYPE_CHECKING, Any

import pytest
import torch

from pd_cluster.errors import StartupError
from pd_cluster.models.registry import ARCHITECTURES, resolve_spec
from tests.models.test_scaled_contexts import HERE
from tests.models.test_yarn import GPT_OSS
from tests.worker.conftest import MODELS, VOCAB_SIZE, SavedModel, save_model
from tests.worker.driver import Driver, make_executor, random_prompts
from tests.worker.test_model_parity import EXACT
from tests.worker.watched_executor import WatchedExecutor

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

Config = dict[str, Any]
# 64 heads: the KV heads of each default divide them. Further layers show where windows and dense layers are
SIZES = {"num_attention_heads": 64, "hidden_size": 4096, "num_hidden_layers": 31}
YARN = {
    "rope_type": "yarn", "rope_theta": 2e4, "factor": 4.0, "original_max_position_embeddings": 64, "beta_fast": 16.0,
    "beta_slow": 2.0, "attention_factor": 1.25, "mscale": 0.7, "mscale_all_dim": 0.9, "truncate": False,
}  # fmt: skip
FURTHER: dict[str, Config] = {  # what gives defaults a meaning
    "Qwen2ForCausalLM": {"use_sliding_window": True},
    "Qwen3ForCausalLM": {"use_sliding_window": True},
    "Glm4MoeForCausalLM": {"head_dim": 64},
    "DeepseekV2ForCausalLM": {"num_experts_per_tok": 6},
    "DeepseekV3ForCausalLM": {"num_key_value_heads": 64},
    "Glm4MoeLiteForCausalLM": {"num_key_value_heads": 64},
    "Mistral4ForCausalLM": {"num_key_value_heads": 64},
}
NEEDED = {  # without these we serve nothing, as published configs have them
    "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads",
    "num_experts_per_tok", "num_experts", "num_local_experts", "n_routed_experts", "moe_intermediate_size",
    "shared_expert_intermediate_size",
}  # fmt: skip
# transformers parses these, and its forward fails: Qwen's layers with windows, which have no width then, and latent
# attention with as many key heads as the model type has by default
REFUSED = {
    "Gemma3ForCausalLM": {"rope_parameters.truncate"},
    "Qwen2ForCausalLM": {"use_sliding_window"},
    "Qwen3ForCausalLM": {"use_sliding_window"},
    "DeepseekV3ForCausalLM": {"num_key_value_heads"},
    "Glm4MoeLiteForCausalLM": {"num_key_value_heads"},
    "Mistral4ForCausalLM": {"num_key_value_heads"},
}


def model_types() -> list[tuple[str, str]]:
    """Architecture and `model_type` of all native models, by transformers' own table.

    Without the types of wrappers: their settings are those of their text models, which have types of their own.
    """
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    # Mistral 4's text model alone is in no table of causal language models
    known = [*MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.items(), ("mistral4", "Mistral4ForCausalLM")]
    native = [(name, kind) for kind, name in known if name in ARCHITECTURES]
    return [(name, kind) for name, kind in native if not hasattr(CONFIG_MAPPING[kind], "text_config")]


def read_by_transformers(config: Config) -> Config:
    """All settings that transformers reads from a config, with its defaults."""
    from transformers import AutoConfig

    known = deepcopy(config)  # it changes nested settings
    whole: Config = AutoConfig.for_model(known.pop("model_type"), **known).to_dict()
    return json.loads(json.dumps(whole))  # type: ignore[no-any-return]


def cuts(config: Config) -> Iterator[tuple[str, Config]]:
    """The config whole, without each setting, and with null in its place; so of RoPE. Each with the setting's name."""
    yield "", config
    for name in config.keys() - {"architectures", "model_type"}:
        yield name, {key: value for key, value in config.items() if key != name}
        yield name, {**config, name: None}
    yield from cuts_of_rope(config)


def cuts_of_rope(config: Config) -> Iterator[tuple[str, Config]]:
    rope = config["rope_parameters"]
    nested = {kind: value for kind, value in rope.items() if isinstance(value, dict)}
    for kind, settings in (nested or {"": rope}).items():
        for name in settings:
            rest = {key: value for key, value in settings.items() if key != name}
            for cut in (rest, {**settings, name: None}):
                yield f"rope_parameters.{name}", {**config, "rope_parameters": {**rope, kind: cut} if nested else cut}


def cut_configs(architecture: str, kind: str) -> Iterator[tuple[str, Config]]:
    """Of transformers' own settings of the model type, and of YaRN beside them."""
    plain = read_by_transformers(
        {"architectures": [architecture], "model_type": kind, **SIZES, **FURTHER.get(architecture, {})}
    )
    yield from cuts(plain)
    is_nested = any(isinstance(value, dict) for value in plain["rope_parameters"].values())
    nested = {**plain["rope_parameters"], "full_attention": {**YARN, "truncate": True}}
    yield from cuts_of_rope({**plain, "rope_parameters": nested if is_nested else YARN})


@pytest.mark.long
@pytest.mark.parametrize(("architecture", "kind"), model_types())
def test_a_setting_that_is_left_out_or_null_means_what_transformers_reads(architecture: str, kind: str) -> None:
    """What transformers refuses, such as most nulls, may mean anything here."""
    compared, refused = 0, set[str]()
    for name, cut in cut_configs(architecture, kind):
        try:
            theirs = read_by_transformers(cut)
        except Exception:  # transformers raises many kinds
            continue
        try:
            found = resolve_spec(HERE, deepcopy(cut))
        except StartupError:
            refused.add(name)
            continue
        assert found == resolve_spec(HERE, theirs), (name, cut.get(name))
        compared += 1
    assert compared > 40
    assert refused <= NEEDED | REFUSED.get(architecture, set())


def test_all_native_architectures_are_compared() -> None:
    assert {name for name, _ in model_types()} == set(ARCHITECTURES)


@pytest.mark.parametrize(
    "config", [{}, {"rope_parameters": None}, {"rope_scaling": None}, {"rope_scaling": {}}], ids=str
)
def test_gpt_oss_without_settings_of_rope_has_those_of_its_model_type(config: Config) -> None:
    published = {"architectures": ["GptOssForCausalLM"], "model_type": "gpt_oss", **SIZES, "vocab_size": 320,
                 "intermediate_size": 64, "num_local_experts": 8, "num_experts_per_tok": 2}  # fmt: skip
    spec = resolve_spec(HERE, {**published, **config})
    assert spec == resolve_spec(HERE, {**published, "rope_parameters": GPT_OSS})
    assert (spec.rope.kind, spec.rope.factor, spec.max_len) == ("yarn", 32.0, 131072)
    plain: tuple[Config, ...] = ({}, {"rope_theta": 5e5})  # so does transformers
    for settings in plain:
        assert resolve_spec(HERE, {**published, "rope_parameters": settings}).rope.kind == "default"


@pytest.mark.long
def test_logits_of_gpt_oss_without_settings_of_rope_equal_transformers(tmp_path: Path) -> None:
    import transformers

    kind, options = MODELS["gpt-oss"]
    save_model(kind, tmp_path, {**options, "attention_bias": False})
    file = tmp_path / "config.json"
    config = json.loads(file.read_text())
    del config["rope_parameters"]
    file.write_text(json.dumps(config))
    model = transformers.GptOssForCausalLM.from_pretrained(tmp_path, dtype=torch.float32).eval()
    theirs = SavedModel(tmp_path, model).exact
    assert theirs.config.rope_parameters["rope_type"] == "yarn"
    watched = WatchedExecutor(executor := make_executor(tmp_path))
    driver = Driver(watched, budget=23)  # type: ignore[arg-type]
    for prompt in random_prompts((5, 63, 120), VOCAB_SIZE):
        driver.add(prompt)
    driver.run()
    for generation in driver.sequences:
        with torch.inference_mode():
            logits = theirs(torch.tensor([generation.all_ids[:-1]]), use_cache=False).logits[0]
        expected, found = logits[len(generation.prompt) - 1 :], torch.stack(watched.logits[generation.seq_id])
        assert (found - expected).abs().max() <= EXACT["gpt-oss"] * expected.std()
    executor.close()
