"""Parts that known models need and this package lacks, so that a refusal says what is missing."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Mapping

MISSING_PARTS: Mapping[str, tuple[str, ...]] = {
    "attention over the keys that an indexer chooses (DSA), with a cache of the indexer's keys": (
        "DeepseekV32ForCausalLM", "GlmMoeDsaForCausalLM",
    ),
    "DeepSeek-V4's attention over compressed keys, and its several residuals": ("DeepseekV4ForCausalLM",),
    "Kimi's delta attention (KDA), with a running state for each sequence": ("KimiLinearForCausalLM",),
    "Mamba-2 layers, with a running state for each sequence": (
        "NemotronHForCausalLM", "FalconH1ForCausalLM", "BambaForCausalLM", "GraniteMoeHybridForCausalLM",
    ),
    "weights of 4 bits (compressed-tensors' pack-quantized), in which Kimi-K2.5 and later are published": (
        "KimiK25ForConditionalGeneration",
    ),
}  # fmt: skip
"""What is missing -> the architectures that need it. A family that is added to the registry leaves this table."""


def missing_part(config: Mapping[str, Any]) -> str:
    """What the architecture of a `config.json` needs that is missing here, with its name; "": it is not known."""
    names = config.get("architectures")
    for what, architectures in MISSING_PARTS.items():
        if isinstance(names, list) and (known := [name for name in names if name in architectures]):
            return f"{known[0]} is not served: it needs {what}"
    return ""
