"""Settings of adapters: those that are read, those that are refused by name, and those that change nothing."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from pd_cluster.adapters.peft_config import ALL_LINEAR, PeftConfig, read_config
from pd_cluster.errors import BadAdapter
from tests.models.adapter_files import AXOLOTL, CONFIG, TRL, UNSLOTH

FILE = Path("adapter_config.json")


def read(**changes: Any) -> PeftConfig:
    return read_config(json.dumps(CONFIG | changes).encode(), FILE)


def test_what_is_read() -> None:
    config = read(
        r=64, lora_alpha=128.5, use_rslora=True, rank_pattern={"q_proj": 8, "^model.layers.0": 256},
        alpha_pattern={"q_proj": 4}, target_modules=["q_proj"], exclude_modules=["x"], layers_to_transform=3,
        layers_pattern="blocks",
    )  # fmt: skip
    assert (config.rank, config.alpha, config.base_name) == (64, 128.5, "some/base")
    assert dict(config.rank_pattern) == {"q_proj": 8, "^model.layers.0": 256}
    assert dict(config.alpha_pattern) == {"q_proj": 4.0}
    assert (config.targets, config.excluded) == (frozenset({"q_proj"}), frozenset({"x"}))
    assert (config.layers, config.layer_lists) == (frozenset({3}), ("blocks",))


def test_scales() -> None:
    assert read().scale(16, 8.0) == 0.5
    assert read(use_rslora=True).scale(16, 8.0) == 2.0


def test_defaults_are_those_of_peft() -> None:
    config = read_config(b'{"peft_type": "LORA", "target_modules": ["q_proj"]}', FILE)
    assert (config.rank, config.alpha, config.is_rank_stabilized, config.layers) == (8, 8.0, False, frozenset())


@pytest.mark.parametrize("targets", ["all-linear", "All-Linear"])
def test_all_linear(targets: str) -> None:
    assert read(target_modules=targets).targets == ALL_LINEAR


@pytest.mark.parametrize("config", [UNSLOTH, AXOLOTL, TRL], ids=["unsloth", "axolotl", "trl"])
def test_configs_as_they_are_published(config: dict[str, Any]) -> None:
    assert read_config(json.dumps(config).encode(), FILE).rank == 4


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"peft_type": "IA3"}, "peft_type is 'IA3': LORA is served"),
        ({"peft_type": None}, "peft_type is '': LORA is served"),
        ({"use_dora": True}, "use_dora is set: DoRA scales"),
        ({"bias": "all"}, "bias is 'all': biases of adapters are not served"),
        ({"bias": "lora_only"}, "bias is 'lora_only'"),
        ({"lora_bias": True}, "lora_bias is set: biases"),
        ({"modules_to_save": ["lm_head"]}, "modules_to_save is set: whole modules"),
        ({"trainable_token_indices": [5]}, "trainable_token_indices is set: trained embeddings"),
        ({"target_parameters": ["mlp.experts.gate_up_proj"]}, "target_parameters is set: adapters of experts"),
        ({"layer_replication": [[0, 4], [2, 5]]}, "layer_replication is set"),
        ({"alora_invocation_tokens": [1, 2]}, "alora_invocation_tokens is set"),
        ({"use_qalora": True}, "use_qalora is set"),
        ({"use_bdlora": {"nblocks": 2}}, "use_bdlora is set"),
        ({"arrow_config": {"top_k": 2}}, "arrow_config is set"),
        ({"monteclora_config": {"a": 1}}, "monteclora_config is set"),
        ({"velora_config": {"a": 1}}, "velora_config is set"),
        ({"megatron_config": {"a": 1}}, "megatron_config is set"),
        ({"kasa_config": {"beta": 1}}, "kasa_config is set: KaSA has changed the base"),
        ({"loftq_config": {"loftq_bits": 4}, "init_lora_weights": "loftq"}, "init_lora_weights is 'loftq', which has"),
        ({"init_lora_weights": "pissa_niter_16"}, "init_lora_weights is 'pissa_niter_16', which has changed the base"),
        ({"init_lora_weights": "olora"}, "init_lora_weights is 'olora'"),
        ({"init_lora_weights": 1}, "init_lora_weights is '1'"),
        ({"use_nora": True}, "use_nora is set and not known"),
        ({"r": 257}, "r is 257: ranks up to 256 are served"),
        ({"r": 0}, "r is 0: a rank is a whole number"),
        ({"r": True}, "r is True: a rank"),
        ({"r": 8.0}, "r is 8.0: a rank"),
        ({"rank_pattern": {"q": 300}}, "rank_pattern is 300: ranks up to 256"),
        ({"rank_pattern": [8]}, "rank_pattern must be an object"),
        ({"lora_alpha": "16"}, "lora_alpha is 16: a number"),
        ({"lora_alpha": 1e7}, "lora_alpha is 10000000.0: a number of at most 1e+06"),
        ({"alpha_pattern": {"q": False}}, "alpha_pattern is False"),
        ({"alpha_pattern": {"q" * 2049: 1}}, "alpha_pattern has a name of more than 2048"),
        ({"use_rslora": "yes"}, "use_rslora must be true or false"),
        ({"target_modules": None}, "target_modules names no module"),
        ({"target_modules": []}, "target_modules names no module"),
        ({"target_modules": [1]}, "target_modules must be a text or a list"),
        ({"target_modules": {"q": 1}}, "target_modules must be a text or a list"),
        ({"target_modules": "q" * 2049}, "target_modules must be a text or a list of texts, of at most 2048"),
        ({"target_modules": ["q"] * 4097}, "target_modules has 4097 names: 4096 are allowed"),
        ({"target_modules": ".*q", "layers_to_transform": [1]}, "layers_to_transform needs target_modules as a list"),
        ({"layers_to_transform": ["1"]}, "layers_to_transform must be"),
        ({"layers_to_transform": True}, "layers_to_transform must be"),
    ],
)  # fmt: skip
def test_what_is_refused_is_named(changes: dict[str, Any], told: str) -> None:
    with pytest.raises(BadAdapter, match=re.escape(f"adapter_config.json: {told}")):
        read(**changes)


@pytest.mark.parametrize("value", [None, False, 0, "", [], {}])
def test_settings_that_are_not_set_are_no_reason(value: object) -> None:
    assert read(use_nora=value, use_dora=value, modules_to_save=value) == read()


@pytest.mark.parametrize("name", ["loftq_config", "corda_config", "lora_ga_config", "eva_config"])
def test_settings_of_a_start_that_was_not_used(name: str) -> None:
    """PEFT writes them with an adapter that it converts for the base as it was."""
    assert read(**{name: {"a": 1}}) == read()


@pytest.mark.parametrize("start", [True, False, None, "gaussian", "orthogonal", "eva"])
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
