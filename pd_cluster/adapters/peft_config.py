"""The settings of an adapter that PEFT saved. Imports no torch.

Each setting is read, known to change no answer, or refused by name if it is set: new settings of PEFT change what an
adapter computes, as `use_dora` did.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import msgspec
from msgspec import Meta

from pd_cluster.adapters.strict_json import described, strict_object
from pd_cluster.errors import BadAdapter

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

MAX_RANK = 256
MAX_ALPHA = 1e6
MAX_PATTERNS = 4096  # of one setting; AdaLoRA-like ranks name each module once: 448 in Llama 8B
MAX_PATTERN_CHARS = 2048  # Unsloth's regex for target_modules has 700
ALL_LINEAR = "all-linear"
_REFUSED = {  # some of those that may not be set -> why
    "use_dora": "DoRA scales the sums of base and adapter, which is not served",
    "lora_bias": "biases of adapters are not served",
    "modules_to_save": "whole modules beside the adapter are not served",
    "trainable_token_indices": "trained embeddings of tokens are not served",
    "target_parameters": "adapters of experts are not served",
}
_KEEPS_BASE = (True, False, None, "gaussian", "orthogonal", "eva", "mica")  # `init_lora_weights`
_UNDONE = ("pissa", "corda", "olora", "lora_ga")  # how those begin that peft undoes
_NEVER_NULL = ("r", "lora_alpha")  # others have their default then
_HARMLESS = frozenset((
    "peft_type", "bias", "init_lora_weights",  # as `_refusal` lets them pass
    "task_type", "auto_mapping", "revision", "inference_mode", "lora_dropout", "peft_version", "megatron_core",
    "qalora_group_size", "runtime_config", "ensure_weight_tying", "merge_weights",
    # Of starts, which `init_lora_weights` names; PEFT keeps them when it converts an adapter for the base as it was
    "loftq_config", "corda_config", "lora_ga_config", "eva_config",
    "fan_in_fan_out",  # of layers that are no Linear: PEFT sets it to false for these
))  # fmt: skip


_Text = Annotated[str, Meta(max_length=MAX_PATTERN_CHARS)]
_Names = _Text | Annotated[frozenset[_Text], Meta(max_length=MAX_PATTERNS)]  # a regex, or ends of names
_Rank = Annotated[int, Meta(ge=1, le=MAX_RANK)]
_Alpha = Annotated[float, Meta(ge=-MAX_ALPHA, le=MAX_ALPHA)]


@described
class PeftConfig(msgspec.Struct, frozen=True):
    """What decides on an adapter's modules, ranks and scales, by PEFT's names. `PeftNames` has the rules."""

    target_modules: _Names  # or ALL_LINEAR
    r: _Rank = 8
    lora_alpha: _Alpha = 8.0
    use_rslora: bool = False  # the scale is alpha / sqrt(rank), not alpha / rank
    exclude_modules: _Names = frozenset()
    layers_to_transform: int | list[int] = []  # empty: all
    # Regexes of the names of lists of layers; empty: any
    layers_pattern: _Text | Annotated[list[_Text], Meta(max_length=MAX_PATTERNS)] = []
    rank_pattern: Annotated[dict[_Text, _Rank], Meta(max_length=MAX_PATTERNS)] = {}  # by regexes of ends of names
    alpha_pattern: Annotated[dict[_Text, _Alpha], Meta(max_length=MAX_PATTERNS)] = {}
    base_model_name_or_path: str = ""  # only told


def read_config(content: bytes | memoryview, file: Path) -> PeftConfig:
    """Raises BadAdapter, which names `file` and the setting."""
    found = strict_object(content, file)
    values = {name: value for name, value in found.items() if value is not None or name in _NEVER_NULL}
    if why := _refusal(values):
        raise BadAdapter(f"{file}: {why}")
    try:
        return msgspec.convert(values, PeftConfig)
    except (ValueError, OverflowError) as error:
        raise BadAdapter(f"{file}: {error}") from error


def _refusal(values: Mapping[str, Any]) -> str:
    """Why these settings are not served. "": they are, if well formed."""
    if "peft_type" not in values:
        return "it has no peft_type: configs of other programs are not read"
    if (kind := values["peft_type"]) != "LORA":
        return f"peft_type is {str(kind)[:40]!r}: LORA is served"
    if (bias := values.get("bias", "none")) != "none":
        return f"bias is {str(bias)[:40]!r}: biases of adapters are not served"
    start = values.get("init_lora_weights")
    if not any(start is one or (isinstance(start, str) and start.lower() == one) for one in _KEEPS_BASE):
        told = f"init_lora_weights is {str(start)[:40]!r}, which"
        if not str(start).lower().startswith(_UNDONE):
            return f"{told} is not known to keep the base model's weights"
        told = f"{told} has changed the base model's weights"
        return f"{told}: convert the adapter (peft: path_initial_model_for_weight_conversion)"
    for name, value in values.items():
        if value and name in _REFUSED:
            return f"{name} is set: {_REFUSED[name]}"
        if value and name not in PeftConfig.__struct_fields__ and name not in _HARMLESS:
            return f"{name[:100]} is set, and not served: it may change what the adapter computes"
    if not (targets := values.get("target_modules")):
        return "target_modules names no module"
    if isinstance(targets, str) and (values.get("layers_to_transform", []) != [] or values.get("layers_pattern")):
        return "layers_to_transform needs target_modules as a list, in PEFT, too"
    return ""
