"""The nodes that may serve a request, the order of the legs, and the reason. Pure: reads the table only."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from pd_http.errors import ModelNotFound
from pd_router.config import HandoffOrder
from pd_router.errors import NoNode
from pd_router.node_table import Node, NodeTable, Role

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence


@dataclass(frozen=True, slots=True)
class RoutePlan:
    """Candidates for both legs. The best one is chosen when it is needed, since loads change meanwhile.

    `prefills` is empty exactly if `order` is DIRECT.
    """

    order: HandoffOrder
    reason: str  # default | header | several-prompts | no-prefill-node | prefill-busy | prefill-failed
    prefills: tuple[Node, ...]
    decodes: tuple[Node, ...]
    is_asked: bool = False  # the client asked for `order`


def make_plan(
    table: NodeTable,
    model: str | None,
    default: HandoffOrder,
    asked: HandoffOrder | None,
    turn: int,
    *,
    several_prompts: bool = False,
) -> RoutePlan:
    """Plan one request. `turn`: any counter; it breaks ties, so that equally loaded nodes take turns.

    A ticket is for one prompt, so several prompts are never sent P-first: D asks for a ticket for each.
    Raises ModelNotFound, NoNode.
    """
    if model is not None and not table.knows_model(model):
        raise ModelNotFound(f"no node serves the model {model!r}", param="model")
    decodes = rotate(table.healthy((Role.DECODE, Role.MIXED), model), turn)
    if not decodes:
        raise NoNode(
            "no healthy node can decode" + (f" for the model {model!r}" if model else "") + "; try again later"
        )
    prefills = rotate(table.healthy((Role.PREFILL,), model), turn)
    if not prefills:
        return RoutePlan(HandoffOrder.DIRECT, "no-prefill-node", (), decodes)
    order, reason = (default, "default") if asked is None else (asked, "header")
    if several_prompts and order is HandoffOrder.P_FIRST:
        order, reason = HandoffOrder.D_FIRST, "several-prompts"
    return RoutePlan(order, reason, prefills, decodes, is_asked=asked is not None)


def rotate(nodes: Sequence[Node], turn: int) -> tuple[Node, ...]:
    """`nodes`, starting at another one each turn, which makes ties round-robin."""
    start = turn % len(nodes) if nodes else 0
    return (*nodes[start:], *nodes[:start])


def best_prefill(nodes: Iterable[Node], now_s: float) -> Node | None:
    """The healthy node with the fewest outstanding prompt bytes."""
    return min((n for n in nodes if n.is_healthy(now_s)), key=lambda n: n.prefill_bytes, default=None)


def best_decode(nodes: Iterable[Node], now_s: float) -> Node | None:
    """The healthy node with the fewest outstanding generations."""
    return min(
        (n for n in nodes if n.is_healthy(now_s)), key=lambda n: (n.decode_sequences, n.prefill_bytes), default=None
    )


def best_direct(nodes: Iterable[Node], now_s: float) -> Node | None:
    """Like `best_decode`, but mixed nodes first: decode nodes are not meant to prefill."""
    healthy = [n for n in nodes if n.is_healthy(now_s)]
    return best_decode([n for n in healthy if n.role is Role.MIXED] or healthy, now_s)


def offer_order(nodes: Iterable[Node], now_s: float, without: Node | None = None) -> list[Node]:
    """The prefill nodes that a decode node may ask, least loaded first."""
    return sorted((n for n in nodes if n is not without and n.is_healthy(now_s)), key=lambda n: n.prefill_bytes)
