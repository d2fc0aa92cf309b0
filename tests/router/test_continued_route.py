"""The nodes for the rest of a cut stream: over a table without processes."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from pd_http.frames import ChoiceProgress, Frame, StreamHead
from pd_router.nodes.ledger import NodeWork
from pd_router.policy.cost_policy import CostPolicy, CostRoute
from pd_router.policy.prompt_facts import PromptFacts
from pd_router.requests.continued_route import ContinuedRoute, choose_resume_node
from pd_router.requests.stream_record import StreamRecord
from tests.router.test_choice import TOKEN_S, config, table, tell

if TYPE_CHECKING:
    from pd_router.nodes.node import Node
    from pd_router.nodes.node_table import NodeTable

NUM_PROMPT, NUM_KNOWN = 1000, 200
PROMPT = PromptFacts(4 * NUM_PROMPT)
POLICY = CostPolicy(config())


def record(num_known: int = NUM_KNOWN) -> StreamRecord:
    told = StreamRecord()
    told.begin(
        StreamHead(
            stream_version="v",
            response_id="cmpl-1",
            created=1,
            seed=1,
            num_prompt_tokens=NUM_PROMPT,
            num_cached_tokens=0,
            prompt_digest=b"x" * 16,
        )
    )
    told.take(Frame((ChoiceProgress(0, tuple(range(num_known)), num_known),), b""))
    return told


def resumed(
    nodes: NodeTable, resume_nodes: list[Node], prompt: PromptFacts = PROMPT, num_known: int = NUM_KNOWN
) -> ContinuedRoute:
    route = choose_resume_node(POLICY, nodes, "demo", prompt, record(num_known), config(), resume_nodes)
    assert route is not None
    return route


def test_prefill_nodes_read_what_is_known() -> None:
    nodes = table()
    p0, p1, d0, d1 = nodes.nodes
    for node in nodes.nodes:
        tell(node)
    tell(p0, queued_tokens=500)
    route = resumed(nodes, [d1])
    assert (route.node, route.prefills) == (d1, (p1, p0))
    assert route.chosen.prompt.work(p1) == NodeWork(NUM_PROMPT + NUM_KNOWN), "counted, not estimated"
    num_bytes = route.chosen.prompt.num_bytes
    assert num_bytes == 4 * (NUM_PROMPT + NUM_KNOWN), "a node that reads known tokens is no slower for that"
    assert resumed(nodes, [d1], num_known=0).chosen.prompt.num_bytes == 4 * NUM_PROMPT
    p1.reachable = False
    assert resumed(nodes, [d0, d1]).prefills == (p0,)


def test_the_node_that_has_the_prompt_cached_reads_its_rest() -> None:
    nodes = table()
    p0, p1, _, d1 = nodes.nodes
    for node in nodes.nodes:
        tell(node)
    for node in (p0, p1):
        cached = PromptFacts(4 * NUM_PROMPT, cached={node: 960})
        assert resumed(nodes, [d1], cached).prefills[0] is node


def test_a_decode_node_that_is_sooner_reads_it_alone() -> None:
    nodes = table()
    p0, p1, d0, d1 = nodes.nodes
    for node in (p0, p1):
        tell(node, queued_tokens=200_000)
    for node in (d0, d1):
        tell(node)
    tell(d0, num_running=32)
    route = resumed(nodes, [d0, d1])
    assert (route.node, route.prefills) == (d1, ())
    assert isinstance(route.chosen, CostRoute)
    assert route.chosen.costs.reading_s(p0) > 200_000 * TOKEN_S
    assert resumed(nodes, [d0]).node is d0, "only these write the stream"


@pytest.mark.parametrize("prompt", [PromptFacts(4000, num_sequences=2), PromptFacts(4000, is_several=True)])
def test_several_choices_are_computed_where_they_are_written(prompt: PromptFacts) -> None:
    nodes = table()
    assert resumed(nodes, list(nodes.nodes[2:]), prompt).prefills == ()


def test_log_probabilities_of_the_prompt_came_with_the_beginning() -> None:
    nodes = table()
    assert len(resumed(nodes, list(nodes.nodes[2:]), PromptFacts(4000, shows_logprobs=True)).prefills) == 2


def test_a_prefill_node_that_does_not_pair_is_not_asked() -> None:
    nodes = table(num_prefill=2, num_decode=2)
    p0, p1, d0, d1 = nodes.nodes
    for node, version in ((p0, "old"), (p1, "new"), (d0, "old"), (d1, "new")):
        node.kv_version = version
    assert (resumed(nodes, [d0]).prefills, resumed(nodes, [d1]).prefills) == ((p0,), (p1,))


def test_no_healthy_resume_node() -> None:
    nodes = table()
    *_, d0, d1 = nodes.nodes
    d0.reachable = d1.reachable = False
    assert choose_resume_node(POLICY, nodes, "demo", PROMPT, record(), config(), [d0, d1]) is None
    assert choose_resume_node(POLICY, nodes, "demo", PROMPT, record(), config(), []) is None


@pytest.mark.parametrize(
    ("num_known", "most", "expected"), [(200, float("inf"), 256), (600, 700, 100), (600, 2000, 256), (700, 700, 1)]
)
def test_the_rest_of_a_stream_is_expected_to_be_as_long_as_an_answer(
    num_known: int, most: float, expected: float
) -> None:
    """Within what the client allows: by the mean alone, one that is longer than that had one token to come."""
    nodes = table()
    for node in nodes.nodes:
        tell(node)
    prompt = PromptFacts(4 * NUM_PROMPT, num_output=min(256.0, most), most_output=most)
    assert resumed(nodes, [nodes.nodes[3]], prompt, num_known).chosen.prompt.num_output == expected
