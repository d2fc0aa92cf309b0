"""The nodes for the rest of a stream: one that writes it, and prefill nodes that it may ask for KV.

The rest is planned like a new request, with the known tokens as the end of its prompt. So the prefill nodes, which may
have the prompt cached, read it, unless the decode node is clearly sooner. Pure: reads nodes, changes none.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from msgspec.structs import replace

from pd_http.errors import ModelNotFound
from pd_router.errors import NoNode
from pd_router.policy.candidates import to_generate

if TYPE_CHECKING:
    from collections.abc import Sequence

    from pd_router.config import RouterConfig
    from pd_router.nodes.node import Node
    from pd_router.nodes.node_table import NodeTable
    from pd_router.policy.prompt_facts import PromptFacts
    from pd_router.policy.route import Route, RoutePolicy
    from pd_router.requests.stream_record import StreamRecord


@dataclass(frozen=True, slots=True)
class ContinuedRoute:
    """`node` goes on. It may ask `prefills`, best first, for KV; without any it computes all by itself."""

    node: Node
    prefills: tuple[Node, ...]
    chosen: Route


def choose_resume_node(
    policy: RoutePolicy,
    table: NodeTable,
    model: str | None,
    prompt: PromptFacts,
    record: StreamRecord,
    settings: RouterConfig,
    resume_nodes: Sequence[Node],
) -> ContinuedRoute | None:
    """`prompt`: of the request. `resume_nodes`: the nodes that may go on. None: no one of them is healthy."""
    if record.head is None or not resume_nodes:
        return None
    now_s, num_prompt = table.clock(), max(1, record.head.num_prompt_tokens)
    num_tokens = num_prompt + record.num_tokens
    # the known tokens at as many bytes each as those of the prompt: from the bytes a node's speed is learned
    num_bytes = prompt.num_bytes * num_tokens // num_prompt
    # one that is longer than the mean already has about as much to come as any
    num_output = max(1.0, min(prompt.num_output, prompt.most_output - record.num_tokens / prompt.num_sequences))
    facts = replace(prompt, num_bytes=num_bytes, num_tokens=num_tokens, num_output=num_output, shows_logprobs=False)
    try:
        candidates = to_generate(table, model, facts, settings, turn=0, resume_nodes=frozenset(resume_nodes))
    except (NoNode, ModelNotFound):  # a stream waits for a node to come back
        return None
    chosen = policy.choose(facts, candidates, now_s)
    is_single = prompt.num_sequences == 1 and not prompt.is_several  # else nodes ask no other one for KV
    if is_single and not chosen.is_alone:
        node, prefills = chosen.best(chosen.decodes, now_s), chosen.offered(now_s, settings.offer_size)
        if node is not None and prefills:
            return ContinuedRoute(node, tuple(prefills), chosen)
    alone = chosen.direct(chosen.reason).best(chosen.decodes, now_s)
    return None if alone is None else ContinuedRoute(alone, (), chosen)
