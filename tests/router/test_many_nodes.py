"""A table of many nodes: what leaves nodes out, or keeps a figure, gives what a look at every node gives."""

from __future__ import annotations

from random import Random
from statistics import mean
from typing import TYPE_CHECKING

import pytest

from pd_connectors.protocol.feed import NodeLoad
from pd_http.body import longest_body
from pd_router.config import HandoffOrder, RouterConfig
from pd_router.nodes.node import NodeSpec, Role
from pd_router.nodes.node_table import FLAGS, NodeTable
from pd_router.nodes.node_view import TextRatio
from pd_router.policy.charge import Charge
from pd_router.policy.cost import FEW_NODES, Costs
from pd_router.policy.cost_policy import CostRoute
from pd_router.policy.prompt_facts import PromptFacts
from tests.router.choosing import choose

if TYPE_CHECKING:
    from collections.abc import Sequence

    from pd_router.nodes.node import Node

NOW_S = 100.0
NUM_TABLES = 120
URLS = {role: tuple(f"http://{role.value}{at}:1" for at in range(3 * FEW_NODES)) for role in Role}


def random_table(draw: Random) -> tuple[NodeTable, RouterConfig]:
    """Nodes of one or two versions; some have no feed, queues, learned speeds, or a text ratio of their own."""
    num_prefill, num_decode = draw.randrange(1, 40), draw.randrange(FEW_NODES, 48)
    settings = RouterConfig(
        prefill=URLS[Role.PREFILL][:num_prefill], decode=URLS[Role.DECODE][:num_decode],
        slo_ttft_ms=draw.choice((0.0, 0.0, 100.0)),
    )  # fmt: skip
    table = NodeTable(settings, lambda: NOW_S)
    versions = draw.choice((("",), ("a",), ("a", ""), ("a", "b", "")))
    busy, spread, most_streams = draw.choice((0.0, 0.5, 1.0)), draw.choice((1.0, 1.08, 2.0)), draw.choice((1, 40, 300))
    other = TextRatio()
    other.note(9000, 10_000)
    for node in table.nodes:
        node.reachable = draw.random() < 0.95
        node.kv_version = draw.choice(versions)
        if draw.random() < 0.2:
            node.view.ratio = other
        if draw.random() < 0.9:
            queued = draw.randrange(30_000) if draw.random() < busy else 0
            token_s = draw.choice((0.0, *[2e-5 * draw.uniform(1.0, spread)] * 9))
            node.view.receive(
                NodeLoad(
                    queued_tokens=queued, queued_keys=300 * queued, num_running=draw.randrange(most_streams),
                    num_slots=draw.choice((64, 256)), free_blocks=draw.choice((5, 3000)), num_blocks=5000,
                    block_size=64, step_s=0.005, step_tokens=draw.choice((0, 192)), token_s=token_s, key_s=1e-9,
                ), (),
            )  # fmt: skip
        if draw.random() < 0.3:
            Charge(node, table.clock, prefill_bytes=draw.randrange(50_000), sequences=draw.randrange(3))
    return table, settings


def outcome(seed: int) -> list[object]:
    """All that a choice says at once, and between its legs, when some nodes have told another load."""
    draw = Random(seed)
    table, settings = random_table(draw)
    cached = {node: draw.randrange(1, 4000) for node in table.nodes if draw.random() < draw.choice((0.0, 0.1, 1.0))}
    prompt = PromptFacts(draw.choice((1000, 16_000, 200_000)), cached=cached, num_tokens=draw.choice((0, 0, 3000)))
    asked = draw.choice((None, None, HandoffOrder.P_FIRST))
    choice = choose(table, None, prompt, settings, asked, draw.randrange(100))
    found: list[object] = [choice.text, choice.prefills, choice.decodes]
    for node in table.nodes:
        if draw.random() < 0.2:
            load = NodeLoad(queued_tokens=draw.randrange(3000), num_running=9, num_slots=64, token_s=1e-5)
            node.view.receive(load, ())
    found += [way.best(choice.decodes, NOW_S) for way in (choice, choice.otherwise, choice.direct("")) if way]
    return [[one.url for one in each] if isinstance(each, tuple) else getattr(each, "url", each) for each in found]


@pytest.mark.long
def test_what_is_left_out_changes_no_choice(monkeypatch: pytest.MonkeyPatch) -> None:
    takers, may_be_sooner = Costs.takers, CostRoute._may_be_sooner
    shares: list[float] = []
    answers: list[bool] = []

    def some(costs: Costs, nodes: Sequence[Node]) -> Sequence[Node]:
        left = takers(costs, nodes)
        shares.append(len(left) / max(1, len(nodes)))
        return left

    def judged(choice: CostRoute, nodes: Sequence[Node], prefill_s: float) -> bool:
        answers.append(may_be_sooner(choice, nodes, prefill_s))
        return answers[-1]

    monkeypatch.setattr(Costs, "takers", some)
    monkeypatch.setattr(CostRoute, "_may_be_sooner", judged)
    quick = [outcome(seed) for seed in range(NUM_TABLES)]
    assert mean(shares) < 0.8
    assert 0.1 < mean(answers) < 0.95, "both answers are given"
    monkeypatch.setattr(Costs, "takers", lambda costs, nodes: nodes)
    monkeypatch.setattr(CostRoute, "_may_be_sooner", lambda *given: True)
    assert quick == [outcome(seed) for seed in range(NUM_TABLES)]


@pytest.mark.long
def test_no_node_costs_less_than_the_least() -> None:
    draw = Random(1)
    for _ in range(NUM_TABLES):
        table, settings = random_table(draw)
        cached = {node: 1000 for node in table.nodes if draw.random() < 0.05}
        choice = choose(table, None, PromptFacts(16_000, cached=cached), settings, None, 0)
        least_s = choice.costs.least_direct_s(choice.decodes)
        assert 0.0 < least_s <= min(map(choice.costs.direct_s, choice.decodes))


def test_the_longest_body_follows_the_nodes() -> None:
    table = NodeTable(RouterConfig(decode=("http://d0:1", "http://d1:1")), lambda: NOW_S)
    d0, d1 = table.nodes

    def seen() -> int | None:
        return table.longest_body

    assert seen() is None
    for node, length in ((d0, 100), (d1, 2000)):
        table.set_length(node, length)
        table.set_up(node)
    assert seen() == longest_body(2000)
    table.set_down(d1)
    assert seen() == longest_body(100)
    table.set_length(d0, 300)
    assert seen() == longest_body(300)
    table.set_length(d0, None)
    assert seen() is None
    table.set_up(d1)
    table.set_length(d0, 300)
    assert seen() == longest_body(2000)
    table.apply(FLAGS, [NodeSpec(d0.url, Role.DECODE)])
    assert seen() == longest_body(300)
