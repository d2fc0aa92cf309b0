"""What the router knows of a prompt, from its body and the nodes' feeds."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pd_router.cost import PromptFacts

if TYPE_CHECKING:
    from pd_router.body import RequestBody
    from pd_router.node_table import NodeTable


def prompt_facts(body: RequestBody, table: NodeTable, key: bytes) -> PromptFacts:
    """`key`: of the cluster's text chains.

    Which nodes have the prompt's prefix is looked up only if one has named blocks: 400 kB cost 1.1 ms.
    """
    cached = table.prefixes.hits(body.text_chain(key)) if len(table.prefixes) else {}
    return PromptFacts(body.num_bytes, body.num_samples, body.has_several_prompts, cached, body.num_token_ids)
