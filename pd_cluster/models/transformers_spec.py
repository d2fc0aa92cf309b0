"""Describe a model that transformers' modules compute.

The modules say themselves which keys and values they cache: they are built without memory, on torch's device "meta",
and a forward records each layer's attention. In configs, heads, widths and windows have many names.
"""

from __future__ import annotations

import json
import sys
from copy import deepcopy
from inspect import signature
from typing import TYPE_CHECKING, Any

import torch
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

from pd_cluster.errors import StartupError, UnservedModel
from pd_cluster.models.hf_config import scaled_length
from pd_cluster.models.quantization import quantization_settings
from pd_cluster.models.spec import ModelSpec, ModulesSpec, RopeSpec
from pd_cluster.models.transformers_modules import make_modules, run_modules

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

    from pd_cluster.models.transformers_modules import LayerCall

_NOT_SERVED = {
    "is_encoder_decoder": "an encoder is",
    "index_topk": "attention that chooses its keys is",
    "attention_chunk_size": "chunked attention is",
    "num_kv_shared_layers": "sharing of keys between layers is",
}
_LAYER_TYPES = {"full_attention", "sliding_attention"}
_NAMES = ("_name_or_path", "dtype", "torch_dtype", "transformers_version")  # settings that do not change KV


def read_modules_spec(directory: Path, config: Mapping[str, Any]) -> ModelSpec:
    """Describe the model of a parsed `config.json`. Raises UnservedModel with the reason when it cannot be served."""
    refused = f"{directory / 'config.json'}: transformers' modules cannot be"
    try:
        parsed = parse_config(config)
        _check(parsed, config.get("architectures"))
        place, settings = quantization_settings(directory, config)
        if settings:
            raise UnservedModel(f"{place}: quantized weights are not served")
        with torch.device("meta"):
            return _describe(make_modules(parsed, torch.float32), config)
    except StartupError as error:
        raise UnservedModel(f"{refused} served: {error}") from error
    except Exception as error:  # the modules are foreign and may raise anything
        reason = " ".join(f"{type(error).__name__}: {error}".split())
        raise UnservedModel(f"{refused} built from it: {reason}") from error


def parse_config(config: Mapping[str, Any]) -> Any:
    """The config as transformers' object. Raises UnservedModel. Code of the model's directory is never run."""
    kind = config.get("model_type")
    if kind not in CONFIG_MAPPING:
        raise UnservedModel(f"model_type {kind} is unknown to them; code of the model's directory is never run")
    return CONFIG_MAPPING[kind].from_dict(deepcopy(dict(config)))  # it changes nested settings


def _check(parsed: Any, architectures: object) -> None:
    """Refuse models that would run, and be wrong."""
    for name, what in _NOT_SERVED.items():
        if value := getattr(parsed, name, None):
            raise UnservedModel(f"{name} = {value!r}: {what} not served")
    if not getattr(parsed, "is_causal", True):  # only masks say so, and our attention gets none
        raise UnservedModel("is_causal = false: attention to later tokens is not served")
    if parsed.get_text_config() is not parsed:
        raise UnservedModel("wrappers of a text model are not served")
    if unknown := set(getattr(parsed, "layer_types", None) or ()) - _LAYER_TYPES:
        raise UnservedModel(f"layer_types: {', '.join(sorted(unknown))} layers are not served")
    if any("dynamic" in rope.get("rope_type", "") for rope in _ropes(parsed)):
        raise UnservedModel("RoPE of type dynamic is not served: keys depend on the longest sequence of a step")
    kind = MODEL_FOR_CAUSAL_LM_MAPPING.get(type(parsed), None)
    if kind is None or architectures != [kind.__name__]:
        served = kind.__name__ if kind else "no decoder"
        raise UnservedModel(f"architectures = {architectures!r}: of model_type {parsed.model_type} {served} is served")
    if kind._is_stateful:
        raise UnservedModel(f"{kind.__name__} has state besides keys and values")
    if not kind._supports_attention_backend:
        raise UnservedModel(f"{kind.__name__} cannot use another attention")
    if missing := {"position_ids", "logits_to_keep"} - set(signature(kind.forward).parameters):
        raise UnservedModel(f"{kind.__name__} takes no {' and no '.join(sorted(missing))}")


def _describe(module: Any, config: Mapping[str, Any]) -> ModelSpec:
    """The spec of modules without memory. Raises UnservedModel when no cache of ours can hold their keys."""
    if any(hasattr(part, "create_position_ids_from_input_ids") for part in module.modules()):  # RoBERTa's relatives
        raise UnservedModel("positions that begin after pad_token_id are not served")
    calls, vocab_size = _probe(module)
    parsed, shapes = module.config, {shape for _, shape in calls.values()}
    if others := sorted(set(range(parsed.num_hidden_layers)) ^ set(calls)):
        raise UnservedModel(f"layers {', '.join(map(str, others))} do not attend, or not in transformers' usual way")
    if len(shapes) > 1:
        raise UnservedModel(f"layers differ in heads, KV heads and head size: {sorted(shapes)}")
    ((num_heads, num_kv_heads, head_dim),) = shapes
    if num_heads % num_kv_heads:
        raise UnservedModel(f"num_key_value_heads = {num_kv_heads}: {num_heads} heads cannot share them")
    windows = tuple(calls[layer][0].window for layer in sorted(calls))
    _check_windows(module, windows)
    hidden_size, is_tied = int(parsed.hidden_size), bool(parsed.tie_word_embeddings)
    num_weights = sum(weight.numel() for weight in module.parameters())
    meaning = {name: value for name, value in config.items() if name not in _NAMES}
    # Beyond its first length, longrope has other frequencies for all keys of a step: see `make_modules`
    ropes = _ropes(parsed)
    lengths = [rope["original_max_position_embeddings"] for rope in ropes if rope.get("rope_type") == "longrope"]
    longest = parsed.max_position_embeddings  # where layers have several RoPEs, the scaled one: see `read_spec`
    is_named = config.get("rope_scaling") or config.get("rope_parameters") is not None  # and no default of transformers
    lengths.append(scaled_length(longest, ropes[0]) if len(ropes) == 1 and is_named else longest)
    return ModelSpec(
        architecture=type(module).__name__,
        vocab_size=vocab_size,
        hidden_size=hidden_size,
        intermediate_size=4 * hidden_size,  # for the estimate of a step's memory, which is measured on GPUs
        num_layers=len(calls),
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        max_len=min(lengths),
        norm_eps=0.0,
        rope=RopeSpec(0.0),
        windows=windows,
        qkv_bias=False,
        out_bias=False,
        mlp_bias=False,
        qk_norm=False,
        tied_embeddings=is_tied,
        dtype=str(config.get("dtype") or config.get("torch_dtype") or "float32").removeprefix("torch."),
        modules=ModulesSpec(
            json.dumps(meaning, sort_keys=True), num_weights - (1 if is_tied else 2) * vocab_size * hidden_size
        ),
    )


def _probe(module: Any) -> tuple[dict[int, tuple[LayerCall, tuple[int, int, int]]], int]:
    """By layer, its attention and its heads, KV heads and width. Besides, the size of the vocabulary."""
    from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

    # How many tokens an expert has is a value, which tensors without memory do not have
    ALL_EXPERTS_FUNCTIONS.register("pd_cluster_probe", lambda experts, hidden, *choice: hidden)
    if module._can_set_experts_implementation():
        module.set_experts_implementation("pd_cluster_probe")
    calls: dict[int, tuple[LayerCall, tuple[int, int, int]]] = {}

    def record(call: LayerCall, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        if call.layer in calls:
            raise UnservedModel(f"layer {call.layer} attends twice")
        calls[call.layer] = call, (query.shape[1], key.shape[1], max(query.shape[-1], value.shape[-1]))
        return query.new_empty(*query.shape[:2], value.shape[-1])

    tokens = torch.arange(3)
    return calls, run_modules(module, tokens, tokens, 0, record).shape[-1]


def _check_windows(module: Any, windows: Sequence[int]) -> None:
    """Refuse windows that the modules have in their masks only (Qwen2-MoE, PhiMoE): our attention gets no mask."""
    parsed, kinds = module.config, getattr(module.config, "layer_types", None) or ()
    width = getattr(parsed, "sliding_window", None) or 0
    # Other modules, such as Llama's, ignore the setting
    makes_masks = hasattr(sys.modules[type(module).__module__], "create_sliding_window_causal_mask")
    if not kinds and makes_masks and not any(windows) and 0 < width < parsed.max_position_embeddings:
        kinds = ["sliding_attention"]
    lost = [layer for layer, kind in enumerate(kinds) if kind == "sliding_attention" and not windows[layer]]
    if lost:
        raise UnservedModel(f"sliding_window = {width}: the attention of layer {lost[0]} is not told of it")


def _ropes(parsed: Any) -> list[dict[str, Any]]:
    """The settings of RoPE, by kind of layer where they differ."""
    settings = getattr(parsed, "rope_parameters", None) or {}
    return [value for value in settings.values() if isinstance(value, dict)] or [settings]
