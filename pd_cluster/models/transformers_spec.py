"""Describe a model that transformers' modules compute: its modules say themselves which keys and values they cache.

The modules are built without memory (on torch's device "meta"), and a forward of them records each layer's attention.
So no setting has to be known by name: heads, widths and windows have many names in configs.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from transformers import AutoModelForCausalLM
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

from pd_cluster.errors import StartupError, UnservedModel
from pd_cluster.models.spec import ModelSpec, ModulesSpec, RopeSpec
from pd_cluster.models.transformers_attention import ATTENTION

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from pd_cluster.models.transformers_attention import LayerCall

_NOT_SERVED = {
    "quantization_config": "quantized weights are",
    "is_encoder_decoder": "an encoder is",
    "index_topk": "attention that chooses its keys is",
    "attention_chunk_size": "chunked attention is",
    "num_kv_shared_layers": "sharing of keys between layers is",
}
_LAYER_TYPES = frozenset({"full_attention", "sliding_attention"})
_NAMES = ("_name_or_path", "dtype", "torch_dtype", "transformers_version")  # settings that do not change KV
_PROBE_TOKENS = 3


@dataclass(frozen=True, slots=True)
class _Recorder:
    """An AttentionStep that records the calls of all layers."""

    calls: dict[int, tuple[LayerCall, tuple[int, int, int]]] = field(default_factory=dict)  # heads, KV heads, width

    def attend(self, call: LayerCall, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        if call.layer in self.calls:
            raise UnservedModel(f"layer {call.layer} attends twice")
        width = max(query.shape[-1], value.shape[-1])
        self.calls[call.layer] = call, (query.shape[1], key.shape[1], width)
        return query.new_empty(*query.shape[:2], value.shape[-1])


def read_modules_spec(directory: Path, config: Mapping[str, Any]) -> ModelSpec:
    """Describe the model of a parsed `config.json`. Raises UnservedModel with the reason when it cannot be served."""
    file = directory / "config.json"
    try:
        parsed = parse_config(config)
        _check(parsed)
        _check_class(parsed, config)
        with torch.device("meta"):
            module = make_modules(parsed, torch.float32)
            calls, vocab_size = _probe(module)
        return _make_spec(config, module, calls, vocab_size)
    except StartupError as error:
        raise UnservedModel(f"{file}: transformers' modules cannot be served: {error}") from error
    except Exception as error:  # the modules are foreign and may raise anything
        reason = " ".join(f"{type(error).__name__}: {error}".split())
        raise UnservedModel(f"{file}: transformers' modules cannot be built from it: {reason}") from error


def parse_config(config: Mapping[str, Any]) -> Any:
    """The config as transformers' object. Code of the model's directory is never used. Raises UnservedModel."""
    kind = config.get("model_type")
    if kind not in CONFIG_MAPPING:
        code = "; its own code (auto_map) is never run" if config.get("auto_map") else ""
        raise UnservedModel(f"model_type {kind} is unknown to them{code}")
    return CONFIG_MAPPING[kind].from_dict(dict(config))


def make_modules(parsed: Any, dtype: torch.dtype) -> Any:
    """Make the modules on torch's default device, with weights of any value."""
    module = AutoModelForCausalLM.from_config(parsed, attn_implementation=ATTENTION, dtype=dtype)
    return prepare(module)


def prepare(module: Any) -> Any:
    """Set modules to inference. -> the same modules.

    RoPE of type longrope keeps the frequencies of short sequences, which `max_len` allows only. The modules would
    choose them in each step by its longest sequence, and wait for the device.
    """
    for part in module.modules():
        if getattr(part, "rope_type", None) == "longrope":
            part.rope_type = "default"
    return module.eval().requires_grad_(False)


def _check(parsed: Any) -> None:
    """Refuse settings with which the modules would run, and be wrong."""
    for name, what in _NOT_SERVED.items():
        if value := getattr(parsed, name, None):
            raise UnservedModel(f"{name} = {value!r}: {what} not served")
    if parsed.get_text_config() is not parsed:
        raise UnservedModel("wrappers of a text model are not served")
    if unknown := set(getattr(parsed, "layer_types", None) or ()) - _LAYER_TYPES:
        raise UnservedModel(f"layer_types: {', '.join(sorted(unknown))} layers are not served")
    if any("dynamic" in settings.get("rope_type", "") for settings in _ropes(parsed)):
        raise UnservedModel("RoPE of type dynamic is not served: keys depend on the longest sequence of a step")


def _check_class(parsed: Any, config: Mapping[str, Any]) -> None:
    kind, named = MODEL_FOR_CAUSAL_LM_MAPPING.get(type(parsed), None), config.get("architectures")
    if kind is None or named != [kind.__name__]:
        served = kind.__name__ if kind else "no decoder"
        raise UnservedModel(f"architectures = {named!r}: of model_type {parsed.model_type} {served} is served")
    if kind._is_stateful:
        raise UnservedModel(f"{kind.__name__} has state besides keys and values")
    if not kind._supports_attention_backend:
        raise UnservedModel(f"{kind.__name__} cannot use another attention")


def _probe(module: Any) -> tuple[list[tuple[LayerCall, tuple[int, int, int]]], int]:
    """The calls of all layers, and the size of the vocabulary."""
    from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

    # How many tokens an expert has is a value, which tensors without memory do not have
    ALL_EXPERTS_FUNCTIONS.register("pd_cluster_probe", lambda experts, hidden, *choice: hidden)
    if module._can_set_experts_implementation():
        module.set_experts_implementation("pd_cluster_probe")
    recorder, tokens = _Recorder(), torch.arange(_PROBE_TOKENS)[None]
    logits = run_modules(module, tokens, tokens, torch.arange(1), recorder)
    num_layers = module.config.num_hidden_layers
    if others := sorted(set(range(num_layers)) ^ set(recorder.calls)):
        raise UnservedModel(f"layers {', '.join(map(str, others))} of {num_layers} do not attend, or not in its way")
    return [recorder.calls[layer] for layer in range(num_layers)], logits.shape[-1]


def run_modules(
    module: Any, token_ids: torch.Tensor, positions: torch.Tensor, rows: torch.Tensor | int, step: object
) -> torch.Tensor:
    """Logits [R, vocab_size] of `rows` (int64 [R]; 0: all T). `token_ids`, `positions`: int64 [1, T]."""
    with torch.inference_mode():
        found = module(input_ids=token_ids, position_ids=positions, use_cache=False, logits_to_keep=rows, step=step)
    logits: torch.Tensor = found.logits[0]
    return logits


def _make_spec(
    config: Mapping[str, Any], module: Any, calls: list[tuple[LayerCall, tuple[int, int, int]]], vocab_size: int
) -> ModelSpec:
    parsed, shapes = module.config, {shape for _, shape in calls}
    if len(shapes) > 1:
        raise UnservedModel(f"layers differ in heads, KV heads and head size: {sorted(shapes)}")
    ((num_heads, num_kv_heads, head_dim),) = shapes
    hidden_size, is_tied = int(parsed.hidden_size), bool(parsed.tie_word_embeddings)
    num_weights = sum(weight.numel() for weight in module.parameters())
    layer_parameters = num_weights - (1 if is_tied else 2) * vocab_size * hidden_size
    meaning = {name: value for name, value in config.items() if name not in _NAMES}
    # Beyond its first length, longrope has other frequencies for all keys of a step: see `prepare`
    lengths = [parsed.max_position_embeddings]
    lengths += [
        rope["original_max_position_embeddings"] for rope in _ropes(parsed) if rope.get("rope_type") == "longrope"
    ]
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
        windows=tuple(call.window for call, _ in calls),
        qkv_bias=False,
        out_bias=False,
        mlp_bias=False,
        qk_norm=False,
        tied_embeddings=is_tied,
        dtype=str(config.get("dtype") or config.get("torch_dtype") or "float32").removeprefix("torch."),
        modules=ModulesSpec(json.dumps(meaning, sort_keys=True), layer_parameters),
    )


def _ropes(parsed: Any) -> list[dict[str, Any]]:
    """The settings of RoPE, by kind of layer where they differ."""
    settings = getattr(parsed, "rope_parameters", None) or {}
    return [value for value in settings.values() if isinstance(value, dict)] or [settings]
