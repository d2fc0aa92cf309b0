"""The seam of policies: what is filtered before one chooses and after, by a policy that takes the first nodes."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from pd_router.config import HandoffOrder
from pd_router.policy.candidates import Candidates, Pairing, to_generate, to_read
from pd_router.policy.charge import charge_for
from pd_router.policy.prompt_facts import PromptFacts
from pd_router.policy.route import Route
from tests.router.test_choice import NOW_S, config, table

if TYPE_CHECKING:
    from collections.abc import Sequence

    from pd_router.nodes.node import Node
    from pd_router.nodes.node_table import NodeTable

PROMPT = PromptFacts(4000)


class FirstRoute(Route, frozen=True):
    def pick(self, nodes: Sequence[Node], now_s: float) -> Node | None:
        return nodes[0]


class FirstNodes:
    def choose(self, prompt: PromptFacts, candidates: Candidates, now_s: float) -> FirstRoute:
        version, prefills, _ = candidates.pairings[0] if candidates.pairings else Pairing("", (), ())
        return FirstRoute(candidates.order, candidates.reason, prompt, prefills, candidates.decodes, version)


def route(nodes: NodeTable) -> FirstRoute:
    return FirstNodes().choose(PROMPT, to_generate(nodes, "demo", PROMPT, config(), 0), NOW_S)


def test_only_healthy_nodes_that_pair_reach_a_policy() -> None:
    nodes = table(3, 3)
    p0, p1, p2, d0, d1, d2 = nodes.nodes
    p0.reachable, d0.models = False, frozenset({"other"})
    for node, version in ((p1, "a"), (p2, "b"), (d1, "b"), (d2, "b")):
        node.kv_version = version
    chosen = route(nodes)
    assert (chosen.text, chosen.prefills, chosen.decodes) == ("p-first; reason=default", (p2,), (d1, d2))
    p2.kv_version = d1.kv_version = "c"  # since the choice: another one may be asked, these no longer
    assert chosen.best(chosen.decodes, NOW_S) is d2
    assert chosen.offered(NOW_S) == []
    assert chosen.best_alone(chosen.decodes, NOW_S) is d1
    d2.draining = True
    assert chosen.best(chosen.decodes, NOW_S) is None
    assert chosen.direct("no-pair").best(chosen.decodes, NOW_S) is d1


@pytest.mark.parametrize("failure", ["local", "fail"])
def test_decode_nodes_read_prompts_last(failure: str) -> None:
    nodes = table(1, 1, 1, on_prefill_failure=failure)
    p, d, m = nodes.nodes
    read = FirstNodes().choose(PROMPT, to_read(nodes, "demo", config(on_prefill_failure=failure), 1), NOW_S)
    assert (read.order, set(read.decodes)) == (HandoffOrder.PROMPT, {p, d, m} if failure == "local" else {p, m})
    assert read.best((d, m, p), NOW_S) is m
    p.reachable = m.reachable = False
    assert read.best((d, m, p), NOW_S) is d


def test_a_policy_without_estimates_charges_until_the_reading_is_over() -> None:
    nodes = table(1, 1)
    _, d = nodes.nodes
    with charge_for(route(nodes), d, nodes.clock, reads=True, generates=True, shows_reading=False) as charge:
        assert (d.view.queued_tokens, d.view.num_sequences) == (1000, 1)
        charge.prefill_done()
        assert d.view.queued_tokens == 1000, "what shows no reading is no measure"
        charge.prefill_over()
        assert (d.view.queued_tokens, d.view.num_sequences) == (0, 1)
    assert d.view.num_sequences == 0
