"""GLM-4.5: Llama's layer with experts that are routed as in DeepSeek-V3, beside one that computes every token."""

from __future__ import annotations

from typing import ClassVar

from pd_cluster.models.experts import ExpertNames
from pd_cluster.models.llama import Llama


class Glm4Moe(Llama):
    """Weights and forward pass of one decoder."""

    expert_names: ClassVar = ExpertNames("mlp", "gate_proj", "up_proj", "down_proj", shared="shared_experts")
