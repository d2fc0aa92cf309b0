"""What a policy decides for one request, and what the request's legs ask of that."""

from __future__ import annotations

from itertools import islice
from typing import TYPE_CHECKING, Protocol

import msgspec
from msgspec.structs import replace

from pd_router.config import DIRECT, PROMPT, HandoffOrder
from pd_router.nodes.node import READERS, Node, healthy
from pd_router.policy.prompt_facts import PromptFacts

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from pd_router.policy.candidates import Candidates


class Route(msgspec.Struct, frozen=True):
    """An order, its reason, and the nodes that may serve its legs. A policy makes a kind of its own, with `pick`.

    Loads change between the legs, so the node that answers is chosen when its leg begins. A handoff is between nodes
    that pair with `kv_version`; any decode node may read a prompt itself.
    """

    order: HandoffOrder
    reason: str  # docs/routing.md lists them
    prompt: PromptFacts
    prefills: tuple[Node, ...]  # best first
    decodes: tuple[Node, ...]  # that may answer
    kv_version: str = ""  # see `Node.kv_version`; "": all nodes pair
    otherwise: Route | None = None  # of which the last is a handoff, if no node is better alone when the leg begins

    @property
    def text(self) -> str:
        """The value of the header `x-pd-route`."""
        return f"{self.order.value}; reason={self.reason}"

    @property
    def is_alone(self) -> bool:
        """Whether the node that answers reads the prompt, too."""
        return self.order is DIRECT or self.order is PROMPT

    def because(self, reason: str) -> Route:
        return replace(self, reason=reason)

    def direct(self, reason: str) -> Route:
        """The same request, if no prefill node reads the prompt."""
        return replace(self, order=DIRECT, reason=reason, otherwise=None)

    def offered(self, now_s: float, limit: int | None = None, without: Node | None = None) -> list[Node]:
        """The prefill nodes that a decode node may ask, best first, at most `limit`."""
        nodes = (node for node in self.paired(self.prefills) if node is not without and node.is_healthy(now_s))
        return list(islice(nodes, limit))

    def best_prefill(self, nodes: Iterable[Node], now_s: float) -> Node | None:
        """The first that is healthy: `prefills` are ranked."""
        return next((node for node in self.paired(nodes) if node.is_healthy(now_s)), None)

    def best(self, nodes: Iterable[Node], now_s: float) -> Node | None:
        """The node that answers. None: none of `nodes` can, or the route is better that is there `otherwise`."""
        ready = healthy(nodes if self.is_alone else self.paired(nodes), now_s)
        if self.order is PROMPT:
            ready = [node for node in ready if node.role in READERS] or ready
        return self.pick(ready, now_s) if ready else None

    def best_alone(self, nodes: Iterable[Node], now_s: float) -> Node | None:
        """For a handoff that no decode node took: one that does not pair with the prefill nodes reads the prompt."""
        return self.direct("").best((node for node in nodes if not node.pairs_with(self.kv_version)), now_s)

    def paired(self, nodes: Iterable[Node]) -> Iterable[Node]:
        """`Node.pairs_with`, written out."""
        fitting = self.kv_version, ""
        return (node for node in nodes if node.kv_version in fitting) if self.kv_version else nodes

    # --- of a policy

    def pick(self, nodes: Sequence[Node], now_s: float) -> Node | None:
        """See `best`. `nodes`: at least one; healthy, and of a handoff those that pair."""
        raise NotImplementedError

    def queue_s(self, node: Node) -> float | None:
        """Until the node has computed what it was given. None: not known."""
        return None

    def predicted_s(self, node: Node, now_s: float) -> float | None:
        """Until the first token, if `node` is the first that is asked. None: not known."""
        return None

    def first_token_s(self, now_s: float) -> float | None:
        """Until the first token, if a node has room then. None: not known."""
        return None


class RoutePolicy(Protocol):
    """Where requests go. Pure: it reads nodes and changes none; how long idle ones have waited is all that it notes."""

    def choose(self, prompt: PromptFacts, candidates: Candidates, now_s: float) -> Route:
        """The order and the nodes of one request."""
