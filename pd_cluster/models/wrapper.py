"""Multimodal wrappers: their configs nest the settings of a text model in `text_config`, and only that is served."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from pd_cluster.errors import StartupError, UnservedModel

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path


@dataclass(frozen=True, slots=True)
class Wrapper:
    """How to read the text model of one wrapper."""

    text_architecture: str
    defaults: Mapping[str, int] = field(default_factory=dict)  # settings that `text_config` may leave out
    text_type: str = ""  # the only `model_type` of the text model that is served; "": it has one only


WRAPPERS = {
    "Gemma3ForConditionalGeneration": Wrapper(
        "Gemma3ForCausalLM", {"vocab_size": 262208, "num_attention_heads": 8}
    ),  # the hub's 4B model leaves both out
    "Mistral3ForConditionalGeneration": Wrapper("Mistral4ForCausalLM", text_type="mistral4"),
    "Qwen3_5ForConditionalGeneration": Wrapper("Qwen3_5ForCausalLM"),
    "Qwen3_5MoeForConditionalGeneration": Wrapper("Qwen3_5MoeForCausalLM"),
}
_DTYPES = ("dtype", "torch_dtype")
_OF_BOTH = (*_DTYPES, "tie_word_embeddings", "eos_token_id", "quantization_config")
"""Settings of the wrapper that hold for its text model."""


def text_config(directory: Path, config: Mapping[str, Any]) -> Mapping[str, Any]:
    """The config of a wrapper's text model, as if it were saved alone; any other `config` as it is.

    Raises StartupError for a wrapper without `text_config`, UnservedModel for one of a text model that is not served.
    """
    architectures = config.get("architectures")
    if not isinstance(architectures, list) or len(architectures) != 1 or not isinstance(architectures[0], str):
        return config
    wrapper = WRAPPERS.get(architectures[0])
    if wrapper is None:
        return config
    nested = config.get("text_config")
    if not isinstance(nested, dict):
        raise StartupError(f"{directory / 'config.json'}: {architectures[0]} needs a text_config, not {nested!r}")
    if wrapper.text_type and (kind := nested.get("model_type")) != wrapper.text_type:
        raise UnservedModel(
            f"{directory / 'config.json'}: {architectures[0]} with a text model of type {kind} is not served; with "
            f"{wrapper.text_type} it is"
        )
    both = {name: config[name] for name in _OF_BOTH if config.get(name) is not None}
    if any(name in both for name in _DTYPES):  # one setting with two names
        nested = {name: value for name, value in nested.items() if name not in _DTYPES}
    return {**wrapper.defaults, **nested, **both, "architectures": [wrapper.text_architecture]}
