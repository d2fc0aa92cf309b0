"""Why a module takes no adapter. Imports no torch."""

from __future__ import annotations

import re

SERVED_KINDS = frozenset(("qkv", "out", "gate_up", "down", "latent", "query", "delta_out"))  # of Linears
_REASONS = tuple(
    (re.compile(pattern), why)
    for pattern, why in (
        # The first part is of the name in the file: wrappers have more than a text model
        (r".*(vision|visual|image|audio|multi_modal_projector).*", "it is not of the text model"),
        # A shared expert is a Linear on several ranks, and one of the experts on one: nodes must agree
        (r".*\.(experts|shared_experts?)(\..*)?|.*\.shared_expert_gate", "adapters of experts are not served"),
        (r".*\.(mlp|block_sparse_moe)\.(gate|router)", "adapters of a router of experts are not served"),
        (r".*\.kv_b_proj", "it is absorbed into attention, so no product takes its adapter"),
        (r".*\.linear_attn\.(in_proj_\w+|conv1d)", "inner projections of gated delta rules take no adapter"),
        (r"(.*\.)?(embed_tokens|lm_head)", "embeddings and heads take no adapter"),
    )
)  # fmt: skip


def refusal(module: str) -> str:
    """Why the module of the checkpoint takes no adapter, if it is none of the model's products that do."""
    return next((why for pattern, why in _REASONS if pattern.fullmatch(module)), "the model has no such product")
