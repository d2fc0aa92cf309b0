"""The settings of an adapter that PEFT saved. Imports no torch.

Each setting is read, refused by name, or known to change no answer. One that is not known is refused if it is set: new
settings of PEFT change what an adapter computes, as `use_dora` did.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from pd_cluster.adapters.strict_json import strict_object
from pd_cluster.errors import BadAdapter

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

MAX_RANK = 256
MAX_ALPHA = 1e6
MAX_PATTERNS = 4096  # of one setting; AdaLoRA-like ranks name each module once: 448 in Llama 8B
MAX_PATTERN_CHARS = 2048  # Unsloth's regex for target_modules has 700
ALL_LINEAR = "all-linear"
_REFUSED = {  # settings that may not be set -> why
    "use_dora": "DoRA scales the sums of base and adapter, which is not served",
    "lora_bias": "biases of adapters are not served",
    "modules_to_save": "whole modules beside the adapter are not served",
    "trainable_token_indices": "trained embeddings of tokens are not served",
    "target_parameters": "adapters of experts are not served",
    "layer_replication": "an adapter that repeats layers needs another base model",
    "alora_invocation_tokens": "an adapter that begins at a token (aLoRA) is not served",
    "use_qalora": "QALoRA pools the inputs of an adapter, which is not served",
    "use_bdlora": "block-diagonal adapters (BD-LoRA) are not served",
    "arrow_config": "adapters that are routed by token (Arrow) are not served",
    "monteclora_config": "sampled adapters (MonteCLoRA) are not served",
    "velora_config": "VeLoRA is not served",
    "megatron_config": "adapters of Megatron's layers are not served",
    "kasa_config": "KaSA has changed the base model's weights",
}
_KEEPS_BASE = (True, False, None, "gaussian", "orthogonal", "eva")  # `init_lora_weights`
_HARMLESS = frozenset((
    "task_type", "auto_mapping", "revision", "inference_mode", "lora_dropout", "peft_version", "megatron_core",
    "qalora_group_size", "runtime_config", "ensure_weight_tying",
    # Of starts, which `init_lora_weights` names; PEFT keeps them when it converts an adapter for the base as it was
    "loftq_config", "corda_config", "lora_ga_config", "eva_config",
    "fan_in_fan_out",  # of layers that are no Linear: PEFT sets it to false for these
))  # fmt: skip


@dataclass(frozen=True, slots=True)
class PeftConfig:
    """What decides on an adapter's modules, ranks and scales. `PeftNames` has the rules."""

    rank: int
    alpha: float
    is_rank_stabilized: bool  # the scale is alpha / sqrt(rank), not alpha / rank
    targets: str | frozenset[str]  # a regex or ALL_LINEAR; or ends of names
    excluded: str | frozenset[str]
    layers: frozenset[int]  # empty: all
    layer_lists: tuple[str, ...]  # regexes of the names of lists of layers; empty: any
    rank_pattern: Mapping[str, int]  # regexes of ends of names, in order
    alpha_pattern: Mapping[str, float]
    base_name: str  # of the model that was trained; only told

    def scale(self, rank: int, alpha: float) -> float:
        """The factor on B A x."""
        return alpha / math.sqrt(rank) if self.is_rank_stabilized else alpha / rank


def read_config(content: bytes | memoryview, file: Path) -> PeftConfig:
    """Raises BadAdapter, which names `file` and the setting."""
    read = _Settings(strict_object(content, file), file)
    read.refuse_others()
    targets, layers = read.names("target_modules"), read.layers()
    if not targets:
        raise read.error("target_modules", "names no module")
    if isinstance(targets, str) and (layers or read.names("layers_pattern")):
        raise read.error("layers_to_transform", "needs target_modules as a list, in PEFT, too")
    lists = read.names("layers_pattern")
    return PeftConfig(
        rank=read.rank("r", read.get("r", 8)),
        alpha=read.alpha("lora_alpha", read.get("lora_alpha", 8)),
        is_rank_stabilized=read.flag("use_rslora"),
        targets=ALL_LINEAR if isinstance(targets, str) and targets.lower() == ALL_LINEAR else targets,
        excluded=read.names("exclude_modules"),
        layers=layers,
        layer_lists=(lists,) if isinstance(lists, str) and lists else tuple(lists),
        rank_pattern={name: read.rank("rank_pattern", rank) for name, rank in read.pattern("rank_pattern")},
        alpha_pattern={name: read.alpha("alpha_pattern", one) for name, one in read.pattern("alpha_pattern")},
        base_name=str(read.get("base_model_name_or_path", ""))[:MAX_PATTERN_CHARS],
    )


class _Settings:
    """Reads settings, and notes which."""

    def __init__(self, values: Mapping[str, Any], file: Path) -> None:
        self._values, self._file = values, file

    def error(self, name: str, why: str) -> BadAdapter:
        return BadAdapter(f"{self._file}: {name} {why}")

    def get(self, name: str, default: Any) -> Any:
        value = self._values.get(name)
        return default if value is None else value

    def refuse_others(self) -> None:
        """Raises BadAdapter for what is not served, and for what is set and not known."""
        if (kind := self.get("peft_type", "")) != "LORA":
            raise self.error("peft_type", f"is {str(kind)[:40]!r}: LORA is served")
        if (bias := self.get("bias", "none")) != "none":
            raise self.error("bias", f"is {str(bias)[:40]!r}: biases of adapters are not served")
        start = self.get("init_lora_weights", None)
        if not any(start is one or (isinstance(start, str) and start == one) for one in _KEEPS_BASE):
            told = f"is {str(start)[:40]!r}, which has changed the base model's weights: convert the adapter"
            raise self.error("init_lora_weights", f"{told} (peft: path_initial_model_for_weight_conversion)")
        for name, value in self._values.items():
            if value and name in _REFUSED:
                raise self.error(name, f"is set: {_REFUSED[name]}")
            if value and name not in _READ and name not in _HARMLESS:
                raise self.error(name[:100], "is set and not known: it may change what the adapter computes")

    def flag(self, name: str) -> bool:
        value = self.get(name, False)
        if not isinstance(value, bool):
            raise self.error(name, "must be true or false")
        return value

    def rank(self, name: str, value: object) -> int:
        if type(value) is not int or value < 1:
            raise self.error(name, f"is {str(value)[:40]}: a rank is a whole number from 1 on")
        if value > MAX_RANK:
            raise self.error(name, f"is {value}: ranks up to {MAX_RANK} are served")
        return value

    def alpha(self, name: str, value: object) -> float:
        if isinstance(value, bool) or not isinstance(value, int | float) or not abs(value) <= MAX_ALPHA:
            raise self.error(name, f"is {str(value)[:40]}: a number of at most {MAX_ALPHA:g} is expected")
        return float(value)

    def names(self, name: str) -> str | frozenset[str]:
        """A regex, or names."""
        value = self.get(name, [])
        for one in [value] if isinstance(value, str) else value if isinstance(value, list) else [None]:
            if not isinstance(one, str) or len(one) > MAX_PATTERN_CHARS:
                raise self.error(name, f"must be a text or a list of texts, of at most {MAX_PATTERN_CHARS} characters")
        if len(value) > MAX_PATTERNS and isinstance(value, list):
            raise self.error(name, f"has {len(value)} names: {MAX_PATTERNS} are allowed")
        return value if isinstance(value, str) else frozenset(value)

    def layers(self) -> frozenset[int]:
        value = self.get("layers_to_transform", [])
        layers = value if isinstance(value, list) else [value]
        if not all(type(layer) is int for layer in layers):
            raise self.error("layers_to_transform", "must be a layer's number or a list of them")
        return frozenset(layers)

    def pattern(self, name: str) -> list[tuple[str, object]]:
        value = self.get(name, {})
        if not isinstance(value, dict) or len(value) > MAX_PATTERNS:
            raise self.error(name, f"must be an object of at most {MAX_PATTERNS} names")
        if any(len(one) > MAX_PATTERN_CHARS for one in value):
            raise self.error(name, f"has a name of more than {MAX_PATTERN_CHARS} characters")
        return list(value.items())


_READ = frozenset((
    "peft_type", "bias", "init_lora_weights", "r", "lora_alpha", "use_rslora", "target_modules", "exclude_modules",
    "layers_to_transform", "layers_pattern", "rank_pattern", "alpha_pattern", "base_model_name_or_path",
))  # fmt: skip
