"""The nodes that a policy may choose among, and what it may decide. Pure: reads the table only."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import msgspec

from pd_router.config import D_FIRST, DIRECT, P_FIRST, PROMPT, HandoffOrder
from pd_router.errors import NoNode
from pd_router.nodes.node import READERS, Node, Role, healthy

if TYPE_CHECKING:
    from collections.abc import Collection, Sequence

    from pd_router.config import RouterConfig
    from pd_router.nodes.node_table import NodeTable
    from pd_router.policy.prompt_facts import PromptFacts

DEFAULT, NO_PREFILL_NODE, NO_DECODE_NODE = "default", "no-prefill-node", "no-decode-node"


class Pairing(NamedTuple):
    """Nodes that may hand KV over to each other: at least one of each side."""

    kv_version: str  # see `Node.kv_version`; "": all nodes pair
    prefills: tuple[Node, ...]
    decodes: tuple[Node, ...]


class Candidates(msgspec.Struct, frozen=True):
    """Nodes that are healthy and serve the model. Equal ones take turns: each request finds another one first."""

    order: HandoffOrder  # of a handoff; DIRECT, PROMPT: none is possible
    reason: str  # of this order; docs/routing.md lists them
    prefills: tuple[Node, ...]  # that compute prompts
    decodes: tuple[Node, ...]  # that may answer
    pairings: tuple[Pairing, ...] = ()  # empty: no handoff is possible
    may_spill: bool = False  # a decode node may read the prompt although a prefill node could
    may_keep: bool = False  # a prefill node may answer
    may_try: bool = False  # the prompt may go where it shows how fast an idle node is


def to_generate(
    table: NodeTable,
    model: str | None,
    prompt: PromptFacts,
    settings: RouterConfig,
    turn: int,
    *,
    asked: HandoffOrder | None = None,
    resume_nodes: Collection[Node] | None = None,
) -> Candidates:
    """For a request that generates tokens. `turn`: any counter. `asked`: the order that the client wants.

    `resume_nodes`: of a stream that was cut, the only nodes that may answer. Raises ModelNotFound, NoNode.
    """
    reads, answers = _sides(table, model)
    if resume_nodes is not None:
        answers = [node for node in answers if node in resume_nodes]
    has_decodes = bool(answers)
    if not has_decodes and settings.decode_on_prefill == "auto":
        answers = table.answering(model) if resume_nodes is None else [node for node in reads if node in resume_nodes]
    prefills, decodes = _rotated(reads, turn), _rotated(answers, turn)
    if not decodes:
        raise _no_node("no healthy node can decode", model)
    if not has_decodes:
        return Candidates(DIRECT, NO_DECODE_NODE, (), decodes)
    if not prefills or prompt.shows_logprobs or not (pairings := _pairings(prefills, decodes)):
        reason = NO_PREFILL_NODE if not prefills else "prompt-logprobs" if prompt.shows_logprobs else "no-pair"
        return Candidates(DIRECT, reason, prefills, decodes)
    order, reason = (settings.default_order, DEFAULT) if asked is None else (asked, "header")
    if order is P_FIRST and prompt.is_several:  # a ticket is for the KV of one prompt: D asks for each
        order, reason = D_FIRST, "several-prompts"
    is_plain = asked is None and resume_nodes is None and not prompt.is_several
    return Candidates(
        order, reason, prefills, decodes, pairings, may_spill=asked is None and settings.spills,
        may_keep=is_plain and settings.decode_on_prefill == "auto", may_try=is_plain,
    )  # fmt: skip


def to_read(table: NodeTable, model: str | None, settings: RouterConfig, turn: int) -> Candidates:
    """For a request about its prompts alone. Decode nodes come last, after every other one has failed.

    `turn`: any counter. Raises ModelNotFound, NoNode.
    """
    prefills, decodes = _sides(table, model)
    nodes = _rotated(prefills + decodes, turn)
    if not nodes:
        raise _no_node("no healthy node", model)
    readers = tuple(node for node in nodes if node.role in READERS)
    may_all = not readers or settings.on_prefill_failure == "local"
    reason = DEFAULT if readers else NO_PREFILL_NODE
    return Candidates(PROMPT, reason, readers or nodes, nodes if may_all else readers)


def _sides(table: NodeTable, model: str | None) -> tuple[list[Node], list[Node]]:
    """The healthy prefill nodes, and the others. Raises ModelNotFound."""
    table.require_model(model)
    reads = Role.PREFILL  # looking up a member of an enum takes longer than comparing it
    sides: tuple[list[Node], list[Node]] = ([], [])
    for node in healthy(table.nodes, table.clock()):
        if model is None or node.models is None or model in node.models:  # `serves`, written out
            sides[node.role is not reads].append(node)
    return table.current(sides[0], model), table.current(sides[1], model)


def _pairings(prefills: tuple[Node, ...], decodes: tuple[Node, ...]) -> tuple[Pairing, ...]:
    nodes = (*prefills, *decodes)
    known = {node.kv_version for node in nodes} - {""}
    if len(known) < 2:
        return (Pairing(next(iter(known), ""), prefills, decodes),)
    found = []
    for version in dict.fromkeys(node.kv_version for node in nodes if node.kv_version):
        reads, answers = (tuple(n for n in side if n.pairs_with(version)) for side in (prefills, decodes))
        if reads and answers:
            found.append(Pairing(version, reads, answers))
    return tuple(found)


def _rotated(nodes: Sequence[Node], turn: int) -> tuple[Node, ...]:
    """Starting at another one each turn, which makes ties round-robin."""
    start = turn % len(nodes) if nodes else 0
    return (*nodes[start:], *nodes[:start])


def _no_node(what: str, model: str | None) -> NoNode:
    return NoNode(what + (f" for the model {model!r}" if model else "") + "; try again later")
