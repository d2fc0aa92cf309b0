"""The order of the legs of a request, the nodes for each leg, and the reason. Pure: reads the table only."""

from __future__ import annotations

import math
from itertools import islice
from typing import TYPE_CHECKING

import msgspec
from msgspec.structs import replace

from pd_router.config import HandoffOrder
from pd_router.cost import DOUBT_S, ERROR_FACTOR, FEW_NODES, HANDOVER_S, LOCAL_TOKENS, Costs, PromptFacts
from pd_router.errors import NoNode
from pd_router.node_table import Node, NodeTable, Role
from pd_router.trial import FEWEST, MOST

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Mapping, Sequence

    from pd_router.config import RouterConfig

KEPT, BUSY, TRIED = "decode-late", "prefill-busy", "prefill-idle"


class RouteChoice(msgspec.Struct, frozen=True):
    """An order, and the nodes that may serve its legs. The `best_*` choose among those left when a leg begins.

    Loads change between the legs, so the node of the second is chosen late. `prefills` are in the order of their cost.
    A handoff is between nodes that pair with `kv_version`; any decode node may read a prompt itself.
    """

    order: HandoffOrder
    reason: str  # docs/routing.md lists them
    prefills: tuple[Node, ...]
    decodes: tuple[Node, ...]
    costs: Costs
    kv_version: str = ""  # see `Node.kv_version`; "": all nodes pair
    is_asked: bool = False  # the client asked for `order`
    slo_ttft_s: float = 0.0  # 0: none
    otherwise: RouteChoice | None = None  # a handoff, for a prompt that no decode node takes DIRECT

    @property
    def text(self) -> str:
        """The value of the header `x-pd-route`."""
        return f"{self.order.value}; reason={self.reason}"

    def direct(self, reason: str) -> RouteChoice:
        """The same request, if no prefill node reads the prompt."""
        return replace(self, order=HandoffOrder.DIRECT, reason=reason, otherwise=None)

    def offered(self, now_s: float, limit: int | None = None, without: Node | None = None) -> list[Node]:
        """The prefill nodes that a decode node may ask, best first, at most `limit`."""
        nodes = (node for node in self._paired(self.prefills) if node is not without and node.is_healthy(now_s))
        return list(islice(nodes, limit))

    def best_prefill(self, nodes: Iterable[Node], now_s: float) -> Node | None:
        """The first that is healthy: `prefills` are ranked."""
        return next((node for node in self._paired(nodes) if node.is_healthy(now_s)), None)

    def best_decode(self, nodes: Iterable[Node], now_s: float) -> Node | None:
        """For a handoff. D-first, the cache of the decode node may save it."""
        ready = _healthy(self._paired(nodes), now_s)
        if self.order is not HandoffOrder.D_FIRST:
            return self._first(self.costs.takers(ready), 0)
        prefill_s = self._prefill_s(now_s)
        return min(ready, key=lambda node: self.costs.asking_s(node, prefill_s), default=None)

    def best_alone(self, nodes: Iterable[Node], now_s: float) -> Node | None:
        """For a handoff that no decode node took: one that does not pair with the prefill nodes reads the prompt."""
        return self.best_direct((node for node in nodes if not node.pairs_with(self.kv_version)), now_s)

    def _paired(self, nodes: Iterable[Node]) -> Iterable[Node]:
        """`pairs_with`, written out."""
        fitting = self.kv_version, ""
        return (node for node in nodes if node.kv_version in fitting) if self.kv_version else nodes

    def best_direct(self, nodes: Iterable[Node], now_s: float) -> Node | None:
        """For a prompt that no prefill node reads."""
        return self._first(_healthy(nodes, now_s), 1)

    def _first(self, nodes: Sequence[Node], which: int) -> Node | None:
        """The first node with the least of the costs `which` of `Costs.decoding`."""
        costs_s = [costs_s[which] for costs_s in self.costs.decoding(nodes)]
        return nodes[costs_s.index(min(costs_s))] if nodes else None

    def sooner(self, nodes: Iterable[Node], now_s: float) -> Node | None:
        """A node that may serve the request alone although a handoff is planned; None: that is better, or not known."""
        ready = _healthy(nodes, now_s)
        if self.reason == KEPT:  # no decode node instead of it: those are late, and may not be allowed to read prompts
            return None if self.otherwise is None else self.otherwise._keeper(ready)
        return self._sooner([node for node in ready if node.role is not Role.PREFILL], self._prefill_s(now_s))[0]

    def _keepers(self, nodes: Iterable[Node]) -> list[Node]:
        """The prefill nodes that may go on with the prompt, while all decode nodes are late.

        Those within their streams' target. Else one with fewer sequences than any decode node has: of those that answer
        about as soon as the first of them the one with most, so that the streams of the others stay within it.
        """
        costs, prefills = self.costs, [node for node in nodes if node.role is Role.PREFILL]
        if keepers := [node for node in prefills if costs.has_time(node)]:
            return keepers
        fewest = min((node.view.num_sequences for node in self._paired(self.decodes)), default=0)
        late = [node for node in prefills if costs.may_be_late(node, fewest)]
        ready = [node for node, (_, _, has_room) in zip(late, costs.decoding(late), strict=True) if has_room]
        reading_s = costs.reading(ready)
        latest_s = min(reading_s, default=0.0) + DOUBT_S
        soon = [node for node, s in zip(ready, reading_s, strict=True) if s <= latest_s]
        return [max(soon, key=lambda node: node.view.num_sequences)] if soon else []

    def _keeper(self, nodes: Iterable[Node]) -> Node | None:
        """The one of `_keepers` that answers soonest, if it has room."""
        return self._soonest(self._keepers(nodes))

    def _soonest(self, keepers: Sequence[Node]) -> Node | None:
        """The one with room that answers soonest."""
        sums = [(direct_s, has_room) for _, direct_s, has_room in self.costs.decoding(keepers)]
        ready = [(direct_s, at) for at, (direct_s, has_room) in enumerate(sums) if has_room]
        return keepers[min(ready)[1]] if ready else None

    def _sooner(self, nodes: Sequence[Node], prefill_s: float) -> tuple[Node | None, str]:
        """The node, and the reason: it costs clearly less than a handoff, or meets the target that P misses.

        A node without room is left out: there a prompt waits for another sequence's end, while one that is handed over
        already has its first token.
        """
        costs = self.costs
        if prefill_s < DOUBT_S / 2 or not costs.knows_speed:  # the handover is not worth leaving the prefill nodes
            return None, ""
        handing_over_s = best_s = math.inf
        best: Node | None = None
        sums = costs.decoding(nodes) if self._may_be_sooner(nodes, prefill_s) else []
        for at, (over_s, direct_s, has_room) in enumerate(sums):
            if over_s < handing_over_s and nodes[at].pairs_with(self.kv_version):
                handing_over_s = over_s
            if direct_s < best_s and has_room:
                best, best_s = nodes[at], direct_s
        if best_s + DOUBT_S < prefill_s + handing_over_s:
            return best, BUSY
        slo_s = self.slo_ttft_s
        if slo_s and prefill_s + HANDOVER_S > slo_s:
            ready = [node for node, (_, _, has_room) in zip(nodes, costs.decoding(nodes), strict=True) if has_room]
            meeting = [node for node in ready if costs.reading_s(node) <= slo_s]
            return min(meeting, key=costs.direct_s, default=None), "prefill-late"
        return None, ""

    def _tries(self, node: Node, workers: int, told_s: float, usual_s: float, doubt_s: float = 0.0) -> bool:
        """Whether the prompt goes to this idle prefill node though it takes `told_s` there by the node's pace, and
        `usual_s` elsewhere. Not if it would miss the target, nor if it would wait for memory; and without the node's
        feed nothing says that it is idle. `workers`: of the router, which all get their part of its requests."""
        view, trial = node.view, node.view.trial
        likely_s = trial.likely_s(told_s)
        if view.queued_tokens or view.load is None or view.ledger.total.free_tokens < self.costs.num_tokens(node):
            return False
        is_late = 0 < self.slo_ttft_s < likely_s + HANDOVER_S
        return not is_late and trial.is_due(likely_s, usual_s, doubt_s, max(FEWEST, MOST // workers))

    def _may_be_sooner(self, nodes: Sequence[Node], prefill_s: float) -> bool:
        """False: no node costs clearly less than a handoff, not even an idle one. So it is mostly, and the sums that
        would say it too take four times as long."""
        if len(nodes) < FEW_NODES:
            return True
        least_s = self.costs.least_direct_s(nodes) + DOUBT_S
        if least_s < prefill_s or not (paired := list(self._paired(nodes))):
            return True
        streams = [node.view.ledger.total.num_sequences for node in paired]
        return least_s < prefill_s + self.costs.handing_over_s(paired[streams.index(min(streams))])

    @property
    def num_tokens(self) -> float:
        """Tokens of the prompt, estimated unless they were counted."""
        return self.costs.num_tokens(self.decodes[0])

    def first_token_s(self, now_s: float) -> float | None:
        """Until the first token, by the costs, if a node has room then. None: no speed is known."""
        costs = self.costs
        if self.prefills:
            if not costs.knows_speed:
                return None
            prefill_s = self._prefill_s(now_s) + HANDOVER_S
            if self.order is not HandoffOrder.DIRECT:
                return prefill_s
            return min(prefill_s, *costs.reading(self.decodes))
        if not any(node.view.ledger.told.token_s for node in self.decodes):
            return None
        return min(costs.reading(self.decodes))

    def _prefill_s(self, now_s: float) -> float:
        """Until the best prefill node has read the prompt."""
        return min(self.costs.reading(_healthy(self.prefills, now_s)), default=0.0)


def choose(
    table: NodeTable,
    model: str | None,
    prompt: PromptFacts,
    settings: RouterConfig,
    asked: HandoffOrder | None,
    turn: int,
    heirs: Collection[Node] | None = None,
) -> RouteChoice:
    """Choose for one request. `turn`: any counter; it breaks ties, so that nodes of equal cost take turns.

    It changes nothing in the table but how long idle prefill nodes have waited (`trial.py`).

    `heirs`: of a stream that was cut, the only nodes that may decode. Raises ModelNotFound, NoNode.
    """
    table.require_model(model)
    now_s = table.clock()
    reads = Role.PREFILL  # looking up a member of an enum takes longer than comparing it
    sides: tuple[list[Node], list[Node]] = ([], [])
    for node in table.nodes:
        # `is_healthy` and `serves`, written out: the calls take 7 us for 100 nodes
        if not node.reachable or node.draining or node.gone or now_s < node.ejected_until_s:
            continue
        if model is None or node.models is None or model in node.models:
            sides[node.role is reads].append(node)
    decodes, prefills = (rotate(side, turn) for side in sides)
    if heirs is not None:
        decodes = tuple(node for node in decodes if node in heirs)
    if not decodes:
        raise NoNode(
            "no healthy node can decode" + (f" for the model {model!r}" if model else "") + "; try again later"
        )
    costs = Costs(prompt, prefills, now_s, decodes)
    if not prefills:
        return RouteChoice(HandoffOrder.DIRECT, "no-prefill-node", (), decodes, costs)
    if prompt.is_told:
        return RouteChoice(HandoffOrder.DIRECT, "prompt-logprobs", (), decodes, costs)
    reading_s = dict(zip(prefills, costs.reading(prefills), strict=True))
    ranked = tuple(sorted(prefills, key=reading_s.__getitem__))  # stable, so equals keep the order of the turn
    kv_version = _best_version(costs, reading_s, ranked, decodes)
    if kv_version is None:
        return RouteChoice(HandoffOrder.DIRECT, "no-pair", (), decodes, costs)
    if kv_version:
        ranked = tuple(node for node in ranked if node.kv_version in (kv_version, ""))
    handoff = _handoff(costs, settings, asked, ranked, decodes, kv_version, prompt)
    if handoff.is_asked:
        return handoff
    may_keep = settings.decode_on_prefill == "auto" and heirs is None
    if may_keep and not prompt.is_several and (kept := _kept(handoff)) is not None:  # how many is not counted here
        return kept
    workers = 0 if prompt.is_several or heirs is not None else settings.workers
    if len(ranked) > 1 and workers and (tried := _slow(handoff, reading_s, workers)) is not None:
        return tried
    return _better(handoff, reading_s[ranked[0]], workers) if settings.spills else handoff


def _best_version(
    costs: Costs, reading_s: Mapping[Node, float], prefills: Sequence[Node], decodes: Sequence[Node]
) -> str | None:
    """The KV version of the cheapest pair. "": no node tells one. None: no prefill node pairs with a decode node."""
    nodes = (*prefills, *decodes)
    known = {node.kv_version for node in nodes} - {""}
    if len(known) < 2:
        return next(iter(known), "")
    versions = [version for version in dict.fromkeys(node.kv_version for node in nodes) if version]
    best: tuple[float, str | None] = math.inf, None
    for version in versions:  # of two equal ones the one of the better prefill node
        reads = (reading_s[node] for node in prefills if node.pairs_with(version))
        decoding = (costs.handing_over_s(node) for node in decodes if node.pairs_with(version))
        total_s = min(reads, default=math.inf) + min(decoding, default=math.inf)
        if total_s < best[0]:
            best = total_s, version
    return best[1]


def _handoff(
    costs: Costs,
    settings: RouterConfig,
    asked: HandoffOrder | None,
    prefills: tuple[Node, ...],
    decodes: tuple[Node, ...],
    kv_version: str,
    prompt: PromptFacts,
) -> RouteChoice:
    """A ticket is for the KV of one prompt. So D asks for a ticket for each of several: they are not sent P-first."""
    cached = costs.num_cached(prefills[0])
    order, reason = settings.default_order, "cached" if cached else "default"
    if asked is not None:
        order, reason = asked, "header"
    if order is HandoffOrder.P_FIRST and prompt.is_several:
        order, reason = HandoffOrder.D_FIRST, "several-prompts"
    return RouteChoice(
        order, reason, prefills, decodes, costs, kv_version, is_asked=asked is not None,
        slo_ttft_s=settings.slo_ttft_ms / 1000,
    )  # fmt: skip


def _kept(handoff: RouteChoice) -> RouteChoice | None:
    """That a prefill node keeps the stream, because the decode nodes would miss their target of time per token."""
    costs = handoff.costs
    if not all(map(costs.is_late, handoff._paired(handoff.decodes))):
        return None
    keepers = tuple(handoff._keepers(handoff.prefills))
    if handoff._soonest(keepers) is None:
        return None
    return replace(handoff, order=HandoffOrder.DIRECT, reason=KEPT, decodes=keepers, otherwise=handoff)


def _slow(handoff: RouteChoice, reading_s: Mapping[Node, float], workers: int) -> RouteChoice | None:
    """The handoff from the last prefill node, if it is last because of its pace, and to be tried."""
    first, last = handoff.prefills[0], handoff.prefills[-1]
    if not handoff.costs.is_slower(last) or not handoff._tries(last, workers, reading_s[last], reading_s[first]):
        return None
    return replace(handoff, reason=TRIED, prefills=(last, *handoff.prefills[:-1]))


def _better(handoff: RouteChoice, prefill_s: float, workers: int) -> RouteChoice:
    """`handoff`, or that a decode node reads the prompt. `workers`: see `_tries`; 0: nothing is tried."""
    node, reason = handoff._sooner(handoff.decodes, prefill_s)
    if node is None:
        return handoff
    costs, first = handoff.costs, handoff.prefills[0]
    cached = costs.num_cached(node)
    is_whole = cached and costs.num_missing(node) < LOCAL_TOKENS
    if is_whole and node.pairs_with(handoff.kv_version):  # D's own word is newer, and it may still ask a P
        return replace(handoff, order=HandoffOrder.D_FIRST, reason="cached")
    # A cache that saves D less than half of the prompt is no reason against a trial: a P that was killed has lost the
    # system prompt that all share
    may_try = workers and reason == BUSY and 2 * (cached - costs.num_cached(first)) <= costs.num_tokens(node)
    if may_try and first.view.ledger.total.token_s > ERROR_FACTOR * node.view.ledger.total.token_s:
        over_s, direct_s, _ = costs.decoding((node,))[0]
        if handoff._tries(first, workers, prefill_s, max(0.0, direct_s - over_s), DOUBT_S):
            return replace(handoff, reason=TRIED)
    if cached > costs.num_cached(first):
        reason = "cached"
    return replace(handoff, order=HandoffOrder.DIRECT, reason=reason, otherwise=handoff)


def _healthy(nodes: Iterable[Node], now_s: float) -> list[Node]:
    """`is_healthy`, written out, because each leg asks it of each node."""
    return [
        node
        for node in nodes
        if node.reachable and not node.draining and not node.gone and now_s >= node.ejected_until_s
    ]


def rotate(nodes: Sequence[Node], turn: int) -> tuple[Node, ...]:
    """`nodes`, starting at another one each turn, which makes ties round-robin."""
    start = turn % len(nodes) if nodes else 0
    return (*nodes[start:], *nodes[:start])
