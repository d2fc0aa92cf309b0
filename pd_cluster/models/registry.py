"""Which architectures are served, and by which family."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from pd_cluster.errors import StartupError
from pd_cluster.models.spec import Family, ModelSpec, Windows, read_spec

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

FAMILIES: dict[str, Family] = {
    "LlamaForCausalLM": Family(),
    "MistralForCausalLM": Family(qkv_bias=False, out_bias=False, num_kv_heads=8, max_len=131072, windows=Windows.ALL),
    "Qwen2ForCausalLM": Family(qkv_bias=True, out_bias=False, num_kv_heads=32, max_len=32768, windows=Windows.SOME),
    "Qwen3ForCausalLM": Family(qk_norm=True, num_kv_heads=32, max_len=32768, head_dim=128, windows=Windows.SOME),
}


def resolve_spec(directory: Path, config: Mapping[str, Any]) -> ModelSpec:
    """The model that a `config.json` describes. Raises StartupError for one that cannot be served."""
    architectures = config.get("architectures") or []
    if len(architectures) != 1 or architectures[0] not in FAMILIES:
        named = ", ".join(map(str, architectures)) or "none named"
        raise StartupError(
            f"{directory / 'config.json'}: architecture {named} is not served; served are {', '.join(FAMILIES)}"
        )
    return read_spec(directory, FAMILIES[architectures[0]], config)
