"""Configs with both spellings of RoPE's settings: what transformers reads, but nothing of either is lost."""

from __future__ import annotations

from copy import deepcopy
from itertools import product
from typing import Any

import pytest

from pd_cluster.errors import StartupError
from pd_cluster.models.registry import choose_implementation, resolve_spec
from tests.models.test_scaled_contexts import GEMMA, HERE, LLAMA

QWEN3 = {
    **LLAMA,
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "num_key_value_heads": 2,
    "max_position_embeddings": 32768,
}
CARD = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}
GEMMA3 = {**GEMMA, "num_hidden_layers": 6}  # the last has full attention
THETA = {"rope_theta": 1e6}
BLOCKS: tuple[dict[str, Any], ...] = (
    {},
    {"rope_type": "default"},
    {"type": "default", "rope_theta": 2e6},
    CARD,
    {"type": "yarn", "factor": 2, "original_max_position_embeddings": 4096.0, "beta_fast": 16.0, **THETA},
    {"type": "linear", "factor": 8.0},
    {"rope_type": "linear", "factor": 2.0, "rope_theta": 3e6},
    {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
     "original_max_position_embeddings": 1024, "rope_theta": 5e5},
    {"rope_type": "dynamic", "factor": 2.0},
)  # fmt: skip


def kind_of(block: dict[str, Any]) -> str:
    return str(block.get("rope_type") or block.get("type") or "default")


def transformers_rope(config: dict[str, Any]) -> dict[str, Any]:
    """The settings of layers with full attention, as transformers parses them."""
    from transformers import AutoConfig

    known = deepcopy(config)  # it changes nested settings
    rope = AutoConfig.for_model(known.pop("model_type"), **known).rope_parameters
    full: dict[str, Any] = rope.get("full_attention", rope)
    return full


def with_blocks(
    config: dict[str, Any], old: dict[str, Any], new: dict[str, Any], theta: float | None
) -> dict[str, Any]:
    """`theta`: that of the config itself."""
    blocks = {"rope_scaling": old, "rope_parameters": new}
    if config is GEMMA3 and new:
        blocks["rope_parameters"] = {"full_attention": new, "sliding_attention": {"rope_type": "default"}}
    return {
        **config,
        **{name: block for name, block in blocks.items() if block},
        **({"rope_theta": theta} if theta else {}),
    }


@pytest.mark.parametrize("config", [LLAMA, QWEN3, GEMMA3], ids=["llama", "qwen3", "gemma3"])
@pytest.mark.parametrize("theta", [None, 7e5])
def test_all_pairs_mean_what_transformers_reads(config: dict[str, Any], theta: float | None) -> None:
    """But for what it loses: a type beside `rope_scaling` of type `default`, theta of `rope_parameters` beside it."""
    for old, new in product(BLOCKS, BLOCKS):
        both, kinds = with_blocks(config, old, new, theta), (kind_of(old), kind_of(new))
        if "default" not in kinds and kinds[0] != kinds[1]:
            with pytest.raises(StartupError, match=f"rope_scaling names .* {kinds[0]}, rope_parameters {kinds[1]}$"):
                choose_implementation(HERE, both, "auto")
            continue
        spec = resolve_spec(HERE, both)
        in_blocks = [block["rope_theta"] for block in (old, new) if "rope_theta" in block]
        thetas = [*in_blocks, theta] if config is GEMMA3 else [theta, *in_blocks]
        top = next((value for value in thetas if value is not None), None)
        known = {} if kinds[0] == "default" != kinds[1] else old and {**old, "rope_type": kinds[0]}
        theirs = transformers_rope(with_blocks(config, known, new, top))
        found = spec.rope
        assert found.kind == theirs["rope_type"].replace("dynamic", "default"), both
        assert found.theta == theirs["rope_theta"], both
        if found.kind != "default":
            assert found.factor == theirs["factor"], both
        if found.kind in ("yarn", "llama3"):
            assert found.original_max_len == theirs["original_max_position_embeddings"], both
        if found.kind == "yarn":
            assert found.high_freq_factor == theirs.get("beta_fast", 32.0), both
        alone = resolve_spec(HERE, with_blocks(config, {}, theirs, None))
        assert spec == alone, both


@pytest.mark.parametrize(
    ("old", "new"), [(CARD, {"rope_type": "default", **THETA}), ({"rope_type": "default", **THETA}, CARD)]
)
def test_the_block_of_a_card_beside_what_transformers_saves(old: dict[str, Any], new: dict[str, Any]) -> None:
    spec = resolve_spec(HERE, with_blocks(QWEN3, old, new, None))
    assert (spec.max_len, spec.rope.kind, spec.rope.theta) == (131072, "yarn", 1e6)


@pytest.mark.parametrize("value", ["x", 1, None, []])
def test_only_an_object_is_the_settings_of_a_layer_type(value: object) -> None:
    spec = resolve_spec(HERE, {**QWEN3, "rope_scaling": {**CARD, "full_attention": value}})
    assert (spec.max_len, spec.rope.kind) == (131072, "yarn")


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({**QWEN3, "rope_scaling": {**CARD, "full_attention": {}}}, "rope_scaling = .* per layer type are not served"),
        ({**GEMMA3, "rope_scaling": {"full_attention": CARD}}, "rope_scaling = .* per layer type are not served"),
        ({**GEMMA3, "rope_parameters": CARD}, "rope_parameters = .* per layer type are expected"),
    ],
)
def test_settings_per_layer_type_where_there_are_none(config: dict[str, Any], message: str) -> None:
    with pytest.raises(StartupError, match=message):
        resolve_spec(HERE, config)


@pytest.mark.parametrize("original", [32768, 32768.0])
def test_a_whole_number_is_an_integer(original: float) -> None:
    spec = resolve_spec(HERE, {**QWEN3, "rope_scaling": {**CARD, "original_max_position_embeddings": original}})
    assert spec.max_len == 131072
    assert isinstance(spec.rope.original_max_len, int)


@pytest.mark.parametrize("original", [32768.5, float("inf"), float("nan")])
def test_another_number_is_refused(original: float) -> None:
    with pytest.raises(StartupError, match="original_max_position_embeddings"):
        resolve_spec(HERE, {**QWEN3, "rope_scaling": {**CARD, "original_max_position_embeddings": original}})
