"""Mixtral: Mistral with experts, which its checkpoints name in their own way."""

from __future__ import annotations

from typing import ClassVar

from pd_cluster.models.experts import ExpertNames
from pd_cluster.models.llama import Llama


class Mixtral(Llama):
    """Weights and forward pass of one decoder."""

    expert_names: ClassVar = ExpertNames("block_sparse_moe", gate="w1", up="w3", down="w2")
