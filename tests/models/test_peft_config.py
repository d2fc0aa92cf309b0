"""Settings of adapters: those that are read, those that are refused by name, and those that change nothing."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from pd_cluster.adapters.peft_config import PeftConfig, read_config
from pd_cluster.errors import BadAdapter
from tests.models.adapter_files import AXOLOTL, CONFIG, TRL, UNSLOTH

FILE = Path("adapter_config.json")
UNKNOWN = "which is not known to keep the base model's weights"
CONVERT = "which has changed the base model's weights: convert the adapter"


def read(**changes: Any) -> PeftConfig:
    return read_config(json.dumps(CONFIG | changes).encode(), FILE)


def test_what_is_read() -> None:
    config = read(
        r=64, lora_alpha=128.5, use_rslora=True, rank_pattern={"q_proj": 8, "^model.layers.0": 256},
        alpha_pattern={"q_proj": 4}, target_modules=["q_proj"], exclude_modules=["x"], layers_to_transform=3,
        layers_pattern="blocks",
    )  # fmt: skip
    assert (config.r, config.lora_alpha, config.base_model_name_or_path) == (64, 128.5, "some/base")
    assert dict(config.rank_pattern) == {"q_proj": 8, "^model.layers.0": 256}
    assert dict(config.alpha_pattern) == {"q_proj": 4.0}
    assert (config.target_modules, config.exclude_modules) == (frozenset({"q_proj"}), frozenset({"x"}))
    assert (config.layers_to_transform, config.layers_pattern) == (3, "blocks")


def test_defaults_are_those_of_peft() -> None:
    config = read_config(b'{"peft_type": "LORA", "target_modules": ["q_proj"]}', FILE)
    assert (config.r, config.lora_alpha, config.use_rslora, config.layers_to_transform) == (8, 8.0, False, [])


@pytest.mark.parametrize("config", [UNSLOTH, AXOLOTL, TRL], ids=["unsloth", "axolotl", "trl"])
def test_configs_as_they_are_published(config: dict[str, Any]) -> None:
    assert read_config(json.dumps(config).encode(), FILE).r == 4


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"peft_type": "IA3"}, "peft_type is 'IA3': LORA is served"),
        ({"peft_type": None}, "it has no peft_type: configs of other programs are not read"),
        ({"use_dora": True}, "use_dora is set: DoRA scales"),
        ({"bias": "all"}, "bias is 'all': biases of adapters are not served"),
        ({"bias": "lora_only"}, "bias is 'lora_only'"),
        ({"lora_bias": True}, "lora_bias is set: biases"),
        ({"modules_to_save": ["lm_head"]}, "modules_to_save is set: whole modules"),
        ({"trainable_token_indices": [5]}, "trainable_token_indices is set: trained embeddings"),
        ({"target_parameters": ["mlp.experts.gate_up_proj"]}, "target_parameters is set: adapters of experts"),
        ({"layer_replication": [[0, 4], [2, 5]]}, "layer_replication is set, and not served"),
        ({"alora_invocation_tokens": [1, 2]}, "alora_invocation_tokens is set, and not served"),
        ({"use_qalora": True}, "use_qalora is set, and not served"),
        ({"use_bdlora": {"nblocks": 2}}, "use_bdlora is set, and not served"),
        ({"arrow_config": {"top_k": 2}}, "arrow_config is set, and not served"),
        ({"monteclora_config": {"a": 1}}, "monteclora_config is set, and not served"),
        ({"velora_config": {"a": 1}}, "velora_config is set, and not served"),
        ({"megatron_config": {"a": 1}}, "megatron_config is set, and not served"),
        ({"kasa_config": {"beta": 1}}, "kasa_config is set, and not served"),
        ({"loftq_config": {"loftq_bits": 4}, "init_lora_weights": "loftq"}, f"init_lora_weights is 'loftq', {UNKNOWN}"),
        ({"init_lora_weights": "kaiming"}, f"init_lora_weights is 'kaiming', {UNKNOWN}"),
        ({"init_lora_weights": 1}, f"init_lora_weights is '1', {UNKNOWN}"),
        ({"init_lora_weights": "pissa_niter_16"}, f"init_lora_weights is 'pissa_niter_16', {CONVERT}"),
        ({"init_lora_weights": "OLoRA"}, f"init_lora_weights is 'OLoRA', {CONVERT}"),
        ({"init_lora_weights": "corda"}, f"init_lora_weights is 'corda', {CONVERT}"),
        ({"init_lora_weights": "lora_ga"}, f"init_lora_weights is 'lora_ga', {CONVERT}"),
        ({"enable_lora": [True, False, True]}, "enable_lora is set, and not served"),  # as the first versions of peft
        ({"use_nora": True}, "use_nora is set, and not served"),
        ({"r": 257}, "Expected `int` <= 256 - at `$.r`"),
        ({"r": 0}, "Expected `int` >= 1 - at `$.r`"),
        ({"r": None}, "Expected `int`, got `null` - at `$.r`"),  # PEFT fails, too: no default takes its place
        ({"lora_alpha": None}, "Expected `float`, got `null` - at `$.lora_alpha`"),
        ({"r": True}, "Expected `int`, got `bool` - at `$.r`"),
        ({"r": 8.0}, "Expected `int`, got `float` - at `$.r`"),
        ({"rank_pattern": {"q": 300}}, "Expected `int` <= 256 - at `$.rank_pattern"),
        ({"rank_pattern": [8]}, "Expected `object`, got `array` - at `$.rank_pattern`"),
        ({"lora_alpha": "16"}, "Expected `float`, got `str` - at `$.lora_alpha`"),
        ({"lora_alpha": 1e7}, "Expected `float` <= 1000000.0 - at `$.lora_alpha`"),
        ({"lora_alpha": 10**400}, ""),
        ({"alpha_pattern": {"q": False}}, "Expected `float`, got `bool` - at `$.alpha_pattern"),
        ({"alpha_pattern": {"q" * 2049: 1}}, "Expected `str` of length <= 2048 - at `key` in `$.alpha_pattern`"),
        ({"use_rslora": "yes"}, "Expected `bool`, got `str` - at `$.use_rslora`"),
        ({"target_modules": None}, "target_modules names no module"),
        ({"target_modules": []}, "target_modules names no module"),
        ({"target_modules": [1]}, "Expected `str`, got `int` - at `$.target_modules[0]`"),
        ({"target_modules": {"q": 1}}, "Expected `str | array`, got `object` - at `$.target_modules`"),
        ({"target_modules": "q" * 2049}, "Expected `str` of length <= 2048 - at `$.target_modules`"),
        ({"target_modules": ["q"] * 4097}, "Expected `array` of length <= 4096 - at `$.target_modules`"),
        ({"target_modules": ".*q", "layers_to_transform": [1]}, "layers_to_transform needs target_modules as a list"),
        ({"layers_to_transform": ["1"]}, "Expected `int`, got `str` - at `$.layers_to_transform[0]`"),
        ({"layers_to_transform": True}, "Expected `int | array`, got `bool` - at `$.layers_to_transform`"),
    ],
)  # fmt: skip
def test_what_is_refused_is_named(changes: dict[str, Any], told: str) -> None:
    with pytest.raises(BadAdapter, match=re.escape(f"adapter_config.json: {told}")):
        read(**changes)


@pytest.mark.parametrize("value", [None, False, 0, "", [], {}])
def test_settings_that_are_not_set_are_no_reason(value: object) -> None:
    assert read(use_nora=value, use_dora=value, modules_to_save=value) == read()


def test_the_first_versions_of_peft_wrote_how_they_merge() -> None:
    assert read(merge_weights=True, enable_lora=None, fan_in_fan_out=True) == read()


@pytest.mark.parametrize("name", ["loftq_config", "corda_config", "lora_ga_config", "eva_config"])
def test_settings_of_a_start_that_was_not_used(name: str) -> None:
    """PEFT writes them with an adapter that it converts for the base as it was."""
    assert read(**{name: {"a": 1}}) == read()


@pytest.mark.parametrize("start", [True, False, None, "gaussian", "Gaussian", "orthogonal", "eva", "mica", "MiCA"])
def test_starts_that_keep_the_base(start: object) -> None:
    assert read(init_lora_weights=start) == read()


@pytest.mark.parametrize(
    ("content", "told"),
    [
        (b"", "is not JSON"),
        (b"\xff", "is not JSON"),
        (b"[]", "does not hold a JSON object"),
        (b'{"peft_type": "LORA", "r": 8, "r": 16}', "'r' is there twice"),
        (b'{"peft_type": "LORA", "lora_alpha": NaN}', "NaN is no number of JSON"),
        (b'{"peft_type": "LORA", "rank_pattern": {"a": 1, "a": 2}}', "'a' is there twice"),
    ],
)
def test_what_two_readers_may_understand_in_two_ways_is_refused(content: bytes, told: str) -> None:
    with pytest.raises(BadAdapter, match=re.escape(told)):
        read_config(content, FILE)
