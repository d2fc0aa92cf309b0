"""The context that a config means by its RoPE, and that tokens after the original context are transformers'."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from pd_cluster.errors import UnservedModel
from pd_cluster.models.hf_config import scaled_length
from pd_cluster.models.registry import choose_implementation, resolve_spec
from pd_cluster.models.spec import RopeSpec
from tests.worker.conftest import save_model
from tests.worker.driver import Driver, make_executor

LLAMA: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": 320, "hidden_size": 64,
    "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4, "max_position_embeddings": 4096,
}  # fmt: skip
GEMMA: dict[str, Any] = {
    **LLAMA, "architectures": ["Gemma3ForCausalLM"], "model_type": "gemma3_text", "max_position_embeddings": 131072,
}  # fmt: skip
LLAMA3 = {"rope_type": "llama3", "factor": 32.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
YARN = {"type": "yarn", "factor": 4.0}
HERE = Path("model")


@pytest.mark.parametrize("spelling", ["rope_scaling", "rope_parameters"])
@pytest.mark.parametrize("kind", ["type", "rope_type"])
@pytest.mark.parametrize(
    ("rope", "length"),
    [
        ({"is": "linear", "factor": 4.0}, 16384),
        ({"is": "linear", "factor": 2}, 8192),
        ({"is": "linear", "factor": 2.5}, 10240),
        ({"is": "linear", "factor": 1.0}, 4096),
        ({"is": "linear", "factor": 0.5}, 4096),
        ({"is": "linear", "factor": 4.0, "original_max_position_embeddings": 1024}, 4096),
        ({"is": "linear", "factor": 8.0, "original_max_position_embeddings": 1024}, 8192),
        ({"is": "linear", "factor": 4.0, "original_max_position_embeddings": None}, 16384),
        ({"is": "linear", "factor": 8.0, "original_max_position_embeddings": 1024.0}, 8192),
        ({"is": "dynamic", "factor": 4.0}, 4096),
        ({"is": "default", "factor": None}, 4096),
        ({"is": None}, 4096),
        ({}, 4096),
    ],
)
def test_contexts_of_native_families(spelling: str, kind: str, rope: dict[str, Any], length: int) -> None:
    settings = {kind if name == "is" else name: value for name, value in rope.items()}
    spec = resolve_spec(HERE, {**LLAMA, spelling: settings})
    assert spec.max_len == length
    scaled = rope.get("is") == "linear"
    assert spec.rope == (RopeSpec(10000.0, "linear", rope["factor"]) if scaled else RopeSpec(10000.0))


@pytest.mark.parametrize(
    "rope",
    [
        {"factor": "4"},
        {"factor": 4.0, "original_max_position_embeddings": "32768"},
        {"factor": 4.0, "original_max_position_embeddings": 32768.5},
        {"factor": 4.0, "original_max_position_embeddings": float("inf")},
    ],
)
def test_text_in_place_of_a_number_is_refused(rope: dict[str, Any]) -> None:
    with pytest.raises(UnservedModel, match="must be numbers"):
        scaled_length(4096, {"rope_type": "yarn", **rope})


def test_contexts_that_a_config_has_scaled_already() -> None:
    """Llama 3.1 and Gemma 3."""
    llama = {**LLAMA, "rope_scaling": {**LLAMA3, "original_max_position_embeddings": 1024}}
    assert resolve_spec(HERE, llama).max_len == 4096
    nested = {"rope_parameters": {"full_attention": {"rope_type": "linear", "factor": 8.0}, "sliding_attention": {}}}
    for rope in ({"rope_scaling": {"rope_type": "linear", "factor": 8.0}}, nested):
        assert resolve_spec(HERE, {**GEMMA, **rope}).max_len == 131072


@pytest.mark.parametrize(
    ("rope", "length"),
    [
        (YARN, 16384),
        ({**YARN, "original_max_position_embeddings": 1024}, 4096),  # as DeepSeek-V3 and gpt-oss
        ({**YARN, "original_max_position_embeddings": 2048}, 8192),  # as Qwen's cards say
        ({"rope_type": "yarn", "factor": None, "original_max_position_embeddings": 1024}, 4096),
        ({"type": "linear", "factor": 4.0}, 16384),
        ({**LLAMA3, "original_max_position_embeddings": 1024}, 4096),
    ],
)
def test_contexts_of_transformers_modules(rope: dict[str, Any], length: int) -> None:
    spec, line = choose_implementation(HERE, {**LLAMA, "rope_scaling": rope}, "transformers")
    assert (spec.max_len, spec.modules is not None, "transformers' modules" in line) == (length, True, True)


@pytest.mark.long
@pytest.mark.parametrize("rope", [{"rope_type": "linear", "factor": 4.0}, {"rope_type": "yarn", "factor": 4.0}])
def test_tokens_after_the_original_context(rope: dict[str, Any], tmp_path: Path) -> None:
    options = {
        "max_position_embeddings": 64,
        "rope_parameters": {**rope, "rope_theta": 10000.0},
        "num_key_value_heads": 2,
    }
    saved = save_model("Llama", tmp_path, options)
    prompt = [(7 * index) % 300 + 5 for index in range(200)]
    executor = make_executor(tmp_path)
    driver = Driver(executor)
    driver.add(prompt)
    assert driver.run() == [saved.generate(prompt, 12)]
    assert executor.model.max_model_len == 256
    executor.close()
