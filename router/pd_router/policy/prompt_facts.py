"""What the router knows of a prompt, from its body and the nodes' feeds."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from math import inf
from typing import TYPE_CHECKING

import msgspec

from pd_router.nodes.adapter_table import load_s
from pd_router.nodes.answer_lengths import USUAL_OUTPUT
from pd_router.nodes.ledger import NodeWork
from pd_router.nodes.node import Node

if TYPE_CHECKING:
    from pd_router.calls.body import RequestBody
    from pd_router.nodes.node_table import NodeTable


class PromptFacts(msgspec.Struct, frozen=True):
    """What the router knows of a request before a node has read it."""

    num_bytes: int
    num_sequences: int = 1
    is_several: bool = False  # prompts in one request
    shows_logprobs: bool = False  # of the prompt: the node that generates computes every position
    cached: Mapping[Node, int] = {}  # tokens of its prefix; nodes without any are absent
    num_output: float = USUAL_OUTPUT  # tokens that each answer is expected to have
    most_output: float = inf  # that the client allows each
    num_tokens: int = 0  # of a prompt of token ids, which the router counts; 0: estimated from the bytes
    lower: Mapping[Node, int] = {}  # of `cached`, what the device lacks; nodes that lack nothing are absent
    loads: Mapping[Node, float] = {}  # seconds until its adapter can be used; nodes that have it ready are absent

    def tokens_at(self, node: Node) -> float:
        """Tokens of the prompt, estimated unless they were counted."""
        return self.num_tokens or self.num_bytes * node.view.ratio.value

    def context_at(self, node: Node) -> float:
        """`tokens_at`, as far as the node takes them: a body may have megabytes in fields that no node reads."""
        num_tokens, most = self.tokens_at(node), node.max_model_len
        return num_tokens if most is None or num_tokens < most else most

    def most_context_at(self, node: Node) -> float:
        """Tokens that one sequence may have at its end."""
        most = self.context_at(node) + self.most_output
        return most if node.max_model_len is None else min(most, node.max_model_len)

    def num_cached(self, node: Node) -> int:
        """Tokens of the prompt that the node has cached, by its feed."""
        return self.cached.get(node, 0)

    def num_missing(self, node: Node) -> int:
        """Tokens of the prompt that the node has to compute, estimated."""
        return max(int(self.tokens_at(node)) - self.num_cached(node), 1)

    def work(self, node: Node) -> NodeWork:
        """What the node has to do to read the prompt."""
        return NodeWork(self.num_missing(node), self.num_cached(node))


def prompt_facts(body: RequestBody, table: NodeTable, key: bytes) -> PromptFacts:
    """`key`: of the cluster's text chains.

    Which nodes have the prompt's prefix is looked up only if one has named blocks: 400 kB cost 1.1 ms, for each kind of
    chat template that nodes have. A prompt without a chain goes by load.
    """
    shows_logprobs = body.wants_prompt_logprobs
    has_use = len(table.prefixes) and not shows_logprobs
    having = {} if table.adapters.find(body.model) is None else table.having(body.model or "")  # the adapter
    digests = {state.record.digest for state in having.values()} or {""}
    turns = table.prefixes.last_turns if has_use else ()
    chains = [body.text_chain(key, last_turn, digest) for last_turn in turns for digest in digests]
    cached = _longest(table.prefixes.hits(chain) for chain in chains)
    lower: dict[Node, int] = {}
    if cached and table.prefixes.num_lower:
        ready = _longest(table.prefixes.hits_on_device(chain) for chain in chains)
        lower = {node: rest for node, num in cached.items() if (rest := num - ready.get(node, 0))}
    several, num_tokens = body.has_several_prompts, body.num_token_ids
    num_output, most = table.answers.expected(body.model or ""), body.most_output
    if most < num_output:
        num_output = max(1.0, most)
    return PromptFacts(
        body.prompt_bytes, body.num_samples, several, shows_logprobs, cached, num_output, most, num_tokens, lower,
        {node: s for node, state in having.items() if (s := load_s(state, node.view.load))},
    )  # fmt: skip


def _longest(hits: Iterable[dict[Node, int]]) -> dict[Node, int]:
    longest: dict[Node, int] = {}
    for found in hits:
        for node, num_tokens in found.items():
            longest[node] = max(num_tokens, longest.get(node, 0))
    return longest
