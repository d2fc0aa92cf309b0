"""The policy that compares seconds: the least sum of `cost.py` wins, unless a target would be missed. Pure."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from msgspec.structs import replace

from pd_router.config import D_FIRST, DIRECT, P_FIRST, PROMPT
from pd_router.nodes.node import Node, Role, healthy
from pd_router.nodes.trial import FEWEST, MOST
from pd_router.policy.candidates import DEFAULT
from pd_router.policy.cost import DOUBT_S, ERROR_FACTOR, FEW_NODES, HANDOVER_S, LOCAL_TOKENS, LOOK_S, Costs
from pd_router.policy.route import Route

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from pd_router.config import RouterConfig
    from pd_router.policy.candidates import Candidates, Pairing
    from pd_router.policy.prompt_facts import PromptFacts

KEPT, FREE, BUSY, TRIED = "decode-late", "prefill-free", "prefill-busy", "prefill-idle"


class CostRoute(Route, frozen=True, kw_only=True):
    """A route with what the prompt costs at the nodes. `prefills` are in the order of their cost."""

    costs: Costs
    slo_ttft_s: float = 0.0  # 0: none
    first_s: float = 0.0  # until `prefills[0]` has read the prompt, when it was chosen
    otherwise: CostRoute | None = None

    def pick(self, nodes: Sequence[Node], now_s: float) -> Node | None:
        """The first node with the least cost. D-first, the cache of the decode node may save the handoff."""
        costs = self.costs
        if self.order is PROMPT:
            return _least(nodes, costs.reading_beside(nodes))
        if self.order is D_FIRST:
            prefill_s = self._prefill_s(now_s)
            return _least(nodes, [costs.asking_s(node, prefill_s) for node in nodes])
        if self.order is P_FIRST:
            takers = costs.takers(nodes)
            return _least(takers, [over_s for over_s, _, _ in costs.decoding(takers)])
        if self.otherwise is None:
            return _least(nodes, [direct_s for _, direct_s, _ in costs.decoding(nodes)])
        if self.reason == KEPT:  # no decode node instead of it: those are late, and may not be allowed to read prompts
            return self.otherwise.soonest(self.otherwise.keepers(nodes))
        if self.reason == FREE:
            return self.otherwise.freest(nodes, now_s)
        return self.sooner([node for node in nodes if node.role is not Role.PREFILL], self._prefill_s(now_s))[0]

    def queue_s(self, node: Node) -> float | None:
        return self.costs.queue_s(node)

    def predicted_s(self, node: Node, now_s: float) -> float | None:
        costs, order = self.costs, self.order
        if order is PROMPT:
            return costs.reading_s(node) if node.view.ledger.reported.token_s or costs.knows_speed else None
        if self._is_read_by(node):
            return costs.first_token_s(node)
        if not node.view.ledger.reported.token_s and not costs.knows_speed:
            return None
        if order is D_FIRST:  # P is charged with this prompt before D is asked, so by the sum of the choice
            return LOOK_S + self.first_s + HANDOVER_S
        return HANDOVER_S + (self.first_s if node is self.prefills[0] else costs.reading_s(node))

    def first_token_s(self, now_s: float) -> float | None:
        costs, is_prompt = self.costs, self.order is PROMPT
        if not self.prefills:
            if not any(node.view.ledger.reported.token_s for node in self.decodes):
                return None
            return min(costs.reading_beside(self.decodes) if is_prompt else costs.reading(self.decodes))
        if not costs.knows_speed:
            return None
        prefill_s = self._prefill_s(now_s) + HANDOVER_S
        return prefill_s if not self.is_alone else min(prefill_s, *costs.reading(self.decodes))

    def _prefill_s(self, now_s: float) -> float:
        """Until the best prefill node has read the prompt."""
        return min(self.costs.reading(healthy(self.prefills, now_s)), default=0.0)

    def _is_read_by(self, node: Node) -> bool:
        """Whether this node computes what it lacks of the prompt, if it answers."""
        is_short = self.order is D_FIRST and self.prompt.num_missing(node) < LOCAL_TOKENS
        return self.order is DIRECT or is_short

    # --- whether another way is better

    def keepers(self, nodes: Iterable[Node]) -> list[Node]:
        """The prefill nodes that may go on with the prompt, while all decode nodes are late.

        Those within their streams' target. Else one with fewer sequences than any decode node has: of those that answer
        about as soon as the first of them the one with most, so that the streams of the others stay within it.
        """
        costs, prefills = self.costs, [node for node in nodes if node.role is Role.PREFILL]
        if keepers := [node for node in prefills if costs.has_time(node)]:
            return keepers
        fewest = min((node.view.num_sequences for node in self.paired(self.decodes)), default=0)
        late = [node for node in prefills if costs.may_be_late(node, fewest)]
        ready = [node for node, (_, _, has_room) in zip(late, costs.decoding(late), strict=True) if has_room]
        reading_s = costs.reading(ready)
        latest_s = min(reading_s, default=0.0) + DOUBT_S
        soon = [node for node, s in zip(ready, reading_s, strict=True) if s <= latest_s]
        return [max(soon, key=lambda node: node.view.num_sequences)] if soon else []

    def freest(self, nodes: Iterable[Node], now_s: float) -> Node | None:
        """The prefill node that keeps the stream where that costs clearly less than a handoff and than this route.

        Its first token meets the target if that of this route does. Else it is no later than that by more than DOUBT_S:
        estimates err by so much, and no client waits for what the streams of others gain.
        """
        costs, order = self.costs, self.order
        free = [node for node in nodes if node.role is Role.PREFILL and costs.may_keep(node)]
        if not free or not (decodes := [*self.paired(self.decodes)]):
            return None
        over_s = [one_s for one_s, _, _ in costs.decoding(decodes)]
        best, prefill_s = _least(decodes, over_s), self._prefill_s(now_s)
        first_s: float | None = prefill_s + HANDOVER_S
        most_s = prefill_s + min(over_s) + costs.waiting_s(best)
        chosen = None if order is P_FIRST else self.best(self.decodes, now_s)
        if chosen is not None and self._is_read_by(chosen):
            first_s = costs.first_token_s(chosen)
            most_s = min(most_s, costs.direct_s(chosen) + costs.waiting_s(chosen))
        if first_s is None:
            return None
        latest_s = self.slo_ttft_s if first_s <= self.slo_ttft_s else first_s + DOUBT_S
        kept_s = costs.keeping(free, best, latest_s)
        return _least(free, kept_s) if min(kept_s) + DOUBT_S < most_s else None

    def soonest(self, keepers: Sequence[Node]) -> Node | None:
        """The one with room that answers soonest."""
        sums = [(direct_s, has_room) for _, direct_s, has_room in self.costs.decoding(keepers)]
        ready = [(direct_s, at) for at, (direct_s, has_room) in enumerate(sums) if has_room]
        return keepers[min(ready)[1]] if ready else None

    def sooner(self, nodes: Sequence[Node], prefill_s: float) -> tuple[Node | None, str]:
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

    def _may_be_sooner(self, nodes: Sequence[Node], prefill_s: float) -> bool:
        """False: no node costs clearly less than a handoff, not even an idle one. So it is mostly, and the sums that
        would say it too take four times as long."""
        if len(nodes) < FEW_NODES:
            return True
        least_s = self.costs.least_direct_s(nodes) + DOUBT_S
        if least_s < prefill_s or not (paired := list(self.paired(nodes))):
            return True
        streams = [node.view.ledger.total.num_sequences for node in paired]
        return least_s < prefill_s + self.costs.handing_over_s(paired[streams.index(min(streams))])


class CostPolicy:
    """The first policy, and the usual one. Nodes of equal cost take turns."""

    def __init__(self, config: RouterConfig) -> None:
        self._slo_ttft_s = config.slo_ttft_ms / 1000
        self._workers = config.workers

    def choose(self, prompt: PromptFacts, candidates: Candidates, now_s: float) -> CostRoute:
        """See `RoutePolicy`."""
        if not candidates.pairings:
            return _alone(prompt, candidates, now_s)
        costs = Costs(prompt, candidates.prefills, now_s, candidates.decodes)
        pairing = _cheapest(candidates.pairings, costs)
        reading_s = dict(zip(pairing.prefills, costs.reading(pairing.prefills), strict=True))
        ranked = tuple(sorted(reading_s, key=reading_s.__getitem__))  # stable, so equals keep the order of the turn
        first, last = ranked[0], ranked[-1]
        reason = "cached" if candidates.reason == DEFAULT and prompt.num_cached(first) else candidates.reason
        handoff = CostRoute(
            candidates.order, reason, prompt, ranked, candidates.decodes, pairing.kv_version, costs=costs,
            slo_ttft_s=self._slo_ttft_s, first_s=reading_s[first],
        )  # fmt: skip
        if candidates.may_keep and (kept := _kept(handoff)) is not None:
            return kept
        is_slow = candidates.may_try and len(ranked) > 1 and costs.is_slower(last)  # last because of its pace
        if is_slow and self._tries(handoff, last, reading_s[last], reading_s[first]):
            return replace(handoff, reason=TRIED, prefills=(last, *ranked[:-1]), first_s=reading_s[last])
        route = self._better(handoff, reading_s[first], candidates) if candidates.may_spill else handoff
        may_keep = candidates.may_keep and costs.is_far and route.reason != TRIED
        return _freed(route, now_s) if may_keep else route

    def _better(self, handoff: CostRoute, prefill_s: float, candidates: Candidates) -> CostRoute:
        """`handoff`, or that a decode node reads the prompt."""
        node, reason = handoff.sooner(handoff.decodes, prefill_s)
        if node is None:
            return handoff
        costs, prompt, first = handoff.costs, handoff.prompt, handoff.prefills[0]
        cached = prompt.num_cached(node)
        is_whole = cached and prompt.num_missing(node) < LOCAL_TOKENS
        if is_whole and node.pairs_with(handoff.kv_version):  # D's own word is newer, and it may still ask a P
            return replace(handoff, order=D_FIRST, reason="cached")
        # A cache that saves D less than half of the prompt is no reason against a trial: a P that was killed has lost
        # the system prompt that all share
        is_new = 2 * (cached - prompt.num_cached(first)) <= prompt.tokens_at(node)
        pace_s = first.view.ledger.total.token_s
        if candidates.may_try and reason == BUSY and is_new and pace_s > ERROR_FACTOR * node.view.ledger.total.token_s:
            over_s, direct_s, _ = costs.decoding((node,))[0]
            if self._tries(handoff, first, prefill_s, max(0.0, direct_s - over_s), DOUBT_S):
                return replace(handoff, reason=TRIED)
        if cached > prompt.num_cached(first):
            reason = "cached"
        return replace(handoff, order=DIRECT, reason=reason, otherwise=handoff)

    def _tries(self, handoff: CostRoute, node: Node, reported_s: float, usual_s: float, doubt_s: float = 0.0) -> bool:
        """Whether the prompt goes to this idle prefill node though it takes `reported_s` there by the node's pace, and
        `usual_s` elsewhere. Not if it would miss the target, nor if it would wait for memory; and without the node's
        feed nothing says that it is idle. The workers of a router all get their part of its requests."""
        view, trial = node.view, node.view.trial
        likely_s = trial.likely_s(reported_s)
        total, is_idle = view.ledger.total, not (view.queued_tokens or view.num_sequences)
        if not is_idle or view.load is None or total.free_tokens < handoff.prompt.tokens_at(node):
            return False
        is_late = 0 < self._slo_ttft_s < likely_s + HANDOVER_S
        return not is_late and trial.is_due(likely_s, usual_s, doubt_s, max(FEWEST, MOST // self._workers))


def _alone(prompt: PromptFacts, candidates: Candidates, now_s: float) -> CostRoute:
    """No handoff is possible."""
    is_read = candidates.order is PROMPT
    costs = Costs(prompt, candidates.prefills, now_s, () if is_read else candidates.decodes)
    route = CostRoute(candidates.order, candidates.reason, prompt, (), candidates.decodes, costs=costs)
    best = route.best(route.decodes, now_s) if is_read and route.reason == DEFAULT else None
    return replace(route, reason="cached") if best is not None and prompt.num_cached(best) else route


def _cheapest(pairings: Sequence[Pairing], costs: Costs) -> Pairing:
    """Of two equal ones the one with the better prefill node of its own version: others are in each pairing."""

    def cost_s(pairing: Pairing) -> tuple[float, float]:
        pairs = zip(pairing.prefills, reading_s := costs.reading(pairing.prefills), strict=True)
        own_s = (one_s for node, one_s in pairs if node.kv_version == pairing.kv_version)
        return min(reading_s) + min(costs.decoding(pairing.decodes))[0], min(own_s, default=math.inf)

    return pairings[0] if len(pairings) == 1 else min(pairings, key=cost_s)


def _kept(handoff: CostRoute) -> CostRoute | None:
    """That a prefill node keeps the stream, because the decode nodes would miss their target of time per token."""
    if not all(map(handoff.costs.is_late, handoff.paired(handoff.decodes))):
        return None
    keepers = tuple(handoff.keepers(handoff.prefills))
    if handoff.soonest(keepers) is None:
        return None
    return replace(handoff, order=DIRECT, reason=KEPT, decodes=keepers, otherwise=handoff)


def _freed(route: CostRoute, now_s: float) -> CostRoute:
    """`route`, or that a prefill node with time to spare keeps the stream, which costs less to the last token."""
    free = route.freest(route.prefills, now_s)
    return route if free is None else replace(route, order=DIRECT, reason=FREE, decodes=(free,), otherwise=route)


def _least(nodes: Sequence[Node], costs_s: Sequence[float]) -> Node:
    """The first node with the least cost."""
    return nodes[costs_s.index(min(costs_s))]
