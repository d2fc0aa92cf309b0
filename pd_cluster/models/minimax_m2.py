"""MiniMax-M2: Mixtral's names of experts, and queries and keys that are normed over all heads at once."""

from __future__ import annotations

from typing import ClassVar

from pd_cluster.models.experts import ExpertNames
from pd_cluster.models.llama import Llama


class MiniMaxM2(Llama):
    """Weights and forward pass of one decoder."""

    expert_names: ClassVar = ExpertNames("block_sparse_moe", "w1", "w3", "w2", bias="e_score_correction_bias")
