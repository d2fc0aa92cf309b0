"""A choice of the usual policy over a table, in one call."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pd_router.policy.candidates import to_generate
from pd_router.policy.cost_policy import CostPolicy, CostRoute

if TYPE_CHECKING:
    from collections.abc import Collection

    from pd_router.config import HandoffOrder, RouterConfig
    from pd_router.nodes.node import Node
    from pd_router.nodes.node_table import NodeTable
    from pd_router.policy.prompt_facts import PromptFacts


def choose(
    table: NodeTable,
    model: str | None,
    prompt: PromptFacts,
    settings: RouterConfig,
    asked: HandoffOrder | None = None,
    turn: int = 0,
    resume_nodes: Collection[Node] | None = None,
) -> CostRoute:
    candidates = to_generate(table, model, prompt, settings, turn, asked=asked, resume_nodes=resume_nodes)
    return CostPolicy(settings).choose(prompt, candidates, table.clock())
