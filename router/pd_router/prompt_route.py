"""The node that reads a prompt which nothing follows. Pure: reads the table only."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from pd_http.endpoints import Kind, paths_of
from pd_router.choice import rotate
from pd_router.config import HandoffOrder
from pd_router.cost import Costs, PromptFacts
from pd_router.errors import NoNode
from pd_router.node_table import Node, NodeTable, Role

if TYPE_CHECKING:
    from collections.abc import Iterable

    from pd_router.body import RequestBody
    from pd_router.config import RouterConfig

READERS = (Role.PREFILL, Role.MIXED)
READ_PATHS = frozenset(paths_of(Kind.READ))
_COMPLETIONS = "/v1/completions"


@dataclass(frozen=True, slots=True)
class PromptRoute:
    """The nodes that may read the prompt. Decode nodes come last, after every other one has failed."""

    reason: str  # docs/routing.md lists them
    nodes: tuple[Node, ...]
    roles: tuple[Role, ...]  # that may read it
    costs: Costs

    @property
    def order(self) -> HandoffOrder:
        return HandoffOrder.PROMPT

    @property
    def text(self) -> str:
        """The value of the header `x-pd-route`."""
        return f"{self.order.value}; reason={self.reason}"

    @property
    def num_tokens(self) -> float:
        """Tokens of the prompt, estimated unless they were counted."""
        return self.costs.num_tokens(self.nodes[0])

    def first_token_s(self, now_s: float) -> float | None:
        """Until the answer, by the costs. None: no speed is known."""
        if not any(node.view.ledger.told.token_s for node in self.nodes):
            return None
        return min(self.costs.reading_beside(self.nodes))

    def because(self, reason: str) -> PromptRoute:
        return replace(self, reason=reason)

    def best(self, nodes: Iterable[Node], now_s: float) -> Node | None:
        """The first node with the least cost."""
        healthy = [node for node in nodes if node.is_healthy(now_s)]
        ready = [node for node in healthy if node.role in READERS] or healthy
        costs_s = self.costs.reading_beside(ready)
        return ready[costs_s.index(min(costs_s))] if ready else None


def reads_only(path: str, body: RequestBody) -> bool:
    """Whether the request asks about its prompt alone, or for one token that the same step samples."""
    return path in READ_PATHS or (path == _COMPLETIONS and not body.generates)


def choose_reader(
    table: NodeTable, model: str | None, prompt: PromptFacts, settings: RouterConfig, turn: int
) -> PromptRoute:
    """`turn`: any counter; nodes of equal cost take turns by it. Raises ModelNotFound, NoNode."""
    table.require_model(model)
    nodes = rotate(table.healthy(tuple(Role), model), turn)
    if not nodes:
        raise NoNode("no healthy node" + (f" for the model {model!r}" if model else "") + "; try again later")
    readers = tuple(node for node in nodes if node.role in READERS)
    has_decodes = not readers or settings.on_prefill_failure == "local"
    roles = tuple(Role) if has_decodes else READERS
    costs = Costs(prompt, readers or nodes, table.clock())
    route = PromptRoute("no-prefill-node", nodes if has_decodes else readers, roles, costs)
    best = route.best(readers, table.clock())
    return route if best is None else route.because("cached" if costs.num_cached(best) else "default")
