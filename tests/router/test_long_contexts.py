"""Conversations of 20,000 to 60,000 tokens: what the next turn costs at nodes beside streams as long, in an 8B shape.

On two H200s requests of equal size had a median of 283 ms until the first token by way of the prefill node, and of 712
and 985 ms at the decode node that the router preferred.
"""

from __future__ import annotations

from itertools import pairwise
from typing import TYPE_CHECKING

import pytest
from msgspec.structs import replace

from pd_cluster.scheduling.prefill_budget import PrefillBudget
from pd_connectors.protocol.feed import FAR, NodeLoad
from pd_router.calls.body import RequestBody
from pd_router.config import HandoffOrder
from pd_router.nodes.answer_lengths import AnswerLengths
from pd_router.nodes.node_table import FLAGS
from pd_router.policy.charge import Charge
from pd_router.policy.cost import DOUBT_S, FAR_SHARE, HANDOVER_S
from pd_router.policy.prompt_facts import prompt_facts
from tests.router.test_choice import NOW_S, chosen, table

if TYPE_CHECKING:
    from pd_router.nodes.node import Node
    from pd_router.nodes.node_table import NodeTable

TOKEN_S, KEY_S = 20e-6, 1.5e-9
CONTEXT, STEP_S, SHARE, KEYS = 40_000, 0.0107, 251, 6000  # of five streams, each of so many tokens
PREFILL = NodeLoad(num_slots=64, free_blocks=9000, num_blocks=9000, block_size=64, token_s=TOKEN_S, key_s=KEY_S)
DECODE = replace(
    PREFILL, num_running=5, step_s=STEP_S, step_tokens=SHARE, step_keys=KEYS, num_context=5 * CONTEXT, context_s=33e-9
)


def nodes(prefill: NodeLoad = PREFILL, *decodes: NodeLoad, queued: int = 0) -> NodeTable:
    """`queued`: tokens that the prefill node has to compute, behind as many as the streams have."""
    made = table(1, len(decodes) or 1)
    queue = {"queued_tokens": queued, "queued_keys": queued * CONTEXT} if queued else {}
    loads = (replace(prefill, **queue), *(decodes or (DECODE,)))
    for node, load in zip(made.nodes, loads, strict=True):
        node.view.receive(load, ())
    return made


def cached_on(made: NodeTable, num_tokens: int) -> dict[Node, int]:
    return dict.fromkeys(made.nodes, num_tokens)


def prefill_s(num_new: int, num_cached: int) -> float:
    return num_new * (TOKEN_S + KEY_S * (num_cached + num_new / 2))


def steps_s(num_new: int, num_cached: int) -> float:
    """Of the decode node's steps until it has computed the prompt, as its planner cuts them."""
    seconds, start = 0.0, num_cached
    while left := num_cached + num_new - start:
        count = PrefillBudget.beside(5, 2048, SHARE, KEYS).take(start, left)
        seconds += STEP_S + prefill_s(count, start)
        start += count
    return seconds


@pytest.mark.long_cases
@pytest.mark.parametrize("num_cached", [20_000, 40_000, 60_000])
@pytest.mark.parametrize("num_new", [1000, 3500, 6000])
def test_a_decode_node_does_not_take_what_it_serves_three_times_slower(num_new: int, num_cached: int) -> None:
    own_s, alone_s = prefill_s(num_new, num_cached), steps_s(num_new, num_cached)
    for queued in range(0, 20_000, 500):
        made = nodes(queued=queued)
        choice = chosen(made, num_new + num_cached, cached=cached_on(made, num_cached))
        waits_s = queued * (TOKEN_S + KEY_S * CONTEXT) + own_s + HANDOVER_S
        if 2 * waits_s < alone_s:
            assert choice.order is HandoffOrder.P_FIRST, (queued, waits_s, alone_s)
        if waits_s > (1.2 + 5 * FAR_SHARE) * alone_s + DOUBT_S:
            assert choice.order is HandoffOrder.DIRECT, (queued, waits_s, alone_s)


@pytest.mark.long
@pytest.mark.parametrize(
    ("num_tokens", "num_cached", "order"),
    [(FAR - 84, 0, HandoffOrder.DIRECT), (43_500, 40_000, HandoffOrder.P_FIRST)],
)
def test_streams_count_more_for_what_comes_after_many_tokens(
    num_tokens: int, num_cached: int, order: HandoffOrder
) -> None:
    """A prefill node that takes 1.35 times as long keeps such a turn, and no fresh prompt."""
    for queued in range(0, 50_000, 100):
        made = nodes(queued=queued)
        choice = chosen(made, num_tokens, cached=cached_on(made, num_cached))
        p, d = made.nodes
        if choice.costs.reading_s(p) > 1.35 * (choice.costs.first_token_s(d) or 0.0):
            assert choice.order is order
            return
    pytest.fail("its queue was never so long")


@pytest.mark.long
def test_no_few_tokens_more_make_a_fresh_prompt_stay_much_longer() -> None:
    """At 16,384 tokens 20 streams cost it two and a half times as much as at 16,300."""
    made = nodes(PREFILL, replace(DECODE, num_running=20, num_context=20 * 16_000))
    costs = [chosen(made, num_tokens).costs.direct_s(made.nodes[1]) for num_tokens in range(8000, 60_000, 100)]
    assert all(one < other < 1.04 * one for one, other in pairwise(costs))


@pytest.mark.parametrize("num_cached", [20_000, 40_000, 60_000])
@pytest.mark.parametrize("num_new", [1000, 3500, 6000])
def test_predictions_are_those_of_the_steps(num_new: int, num_cached: int) -> None:
    made = nodes()
    choice = chosen(made, num_new + num_cached, cached=cached_on(made, num_cached))
    p, d = made.nodes
    direct = choice.direct("no-pair").predicted_s(d, NOW_S)
    assert direct == pytest.approx(steps_s(num_new, num_cached) + STEP_S, rel=0.1)
    assert choice.predicted_s(p, NOW_S) == pytest.approx(prefill_s(num_new, num_cached) + HANDOVER_S)
    if (num_new, num_cached) == (3500, 40_000):
        assert direct is not None
        assert 0.712 < direct < 0.985


def test_what_is_queued_behind_long_contexts_takes_at_most_what_steps_take() -> None:
    """A step takes 64 tokens of a prompt however many are before them: for all that waits as for the prompt itself."""
    made = nodes(PREFILL, replace(DECODE, queued_tokens=1000, queued_keys=1000 * CONTEXT))
    p, d = made.nodes
    costs = chosen(made, CONTEXT).costs
    assert costs.queue_s(d) == pytest.approx(1000 * (TOKEN_S + STEP_S / 64 + KEY_S * CONTEXT))
    pace = d.view.ledger.reported
    assert pace.reading_s(1000, 1000 * CONTEXT) < 0.8 * 1000 * (pace.token_s + pace.key_s * CONTEXT)
    assert costs.queue_s(p) == 0.0


def test_a_stream_goes_where_streams_and_contexts_cost_least() -> None:
    """By the number of streams alone, the node with three long ones were better than that with five short ones."""
    short = replace(DECODE, num_context=5 * 1000)
    long = replace(DECODE, num_running=3, num_context=3 * CONTEXT)
    made = nodes(PREFILL, long, short)
    choice = chosen(made, 1000)
    assert choice.best(choice.decodes, NOW_S) is made.nodes[2]
    many = replace(DECODE, num_running=30, num_context=30 * 1000)
    made = nodes(PREFILL, long, many)
    best = [chosen(made, num).pick(made.nodes[1:], NOW_S) for num in (1000, CONTEXT)]
    assert best == [made.nodes[2], made.nodes[1]], "each of the thirty would wait for a long context"


def test_streams_of_a_node_that_tells_no_contexts_are_as_long_as_those_of_others() -> None:
    """Counted as 1,200 tokens each, seventy long streams of an older release cost less than five of a new one."""
    made = nodes(PREFILL, DECODE, replace(DECODE, num_running=70, num_context=0, context_s=0.0))
    new, old = made.nodes[1:]
    costs = chosen(made, CONTEXT).costs
    assert costs.handing_over_s(old) > 10 * costs.handing_over_s(new)
    assert chosen(made, CONTEXT).best(made.nodes[1:], NOW_S) is new
    told = old.view.ledger.total.streams_s
    new.view.receive(replace(DECODE, num_running=0, num_context=0), ())
    old.view.receive(replace(DECODE, num_running=71, num_context=0, context_s=0.0), ())
    assert old.view.ledger.total.streams_s == pytest.approx(told * 71 / 70), "an idle node says nothing"


def test_the_context_of_a_stream_counts_until_its_node_tells_it() -> None:
    made = nodes(PREFILL, DECODE, DECODE)
    first, second = made.nodes[1:]
    with Charge(first, lambda: NOW_S, sequences=1, context=CONTEXT) as charge:
        costs = chosen(made, CONTEXT).costs
        assert costs.handing_over_s(first) > costs.handing_over_s(second)
        first.view.receive(replace(DECODE, num_running=6, num_context=6 * CONTEXT), [charge.number])
        assert chosen(made, CONTEXT).costs.handing_over_s(first) == pytest.approx(costs.handing_over_s(first))
    assert first.view.ledger.own_context == 0


def test_short_answers_cost_a_node_less() -> None:
    made = nodes()
    prompts = [chosen(made, CONTEXT, num_output=num).costs.handing_over_s(made.nodes[1]) for num in (20.0, 400.0)]
    assert 10 * prompts[0] < prompts[1]


def test_lengths_are_learned_by_model_and_bounded_by_the_client() -> None:
    made = nodes()
    for _ in range(300):
        made.answers.note("demo", 40.0)
    bodies = (b'{"model": "demo"}', b'{"model": "demo", "max_tokens": 9}', b'{"max_tokens": 900}')
    expected = [prompt_facts(RequestBody(body), made, b"k" * 32).num_output for body in bodies]
    assert expected == [pytest.approx(40, abs=3), 9, 256]


def test_cut_answers_and_huge_ones_hardly_move_the_mean() -> None:
    """213 answers of one token, which their clients asked for, made the mean 10; 64 of 30,000 made it 19,144."""
    lengths = AnswerLengths()
    for _ in range(213):
        lengths.note("demo", 1.0, 1.0)
    assert lengths.expected("demo") == 256
    lengths.note("demo", 300.0, 300.0)
    assert lengths.expected("demo") > 256, "it would have been longer still"
    for _ in range(213):
        lengths.note("demo", 1.0)
    assert lengths.expected("demo") < 12, "these ended by themselves"
    for _ in range(64):
        lengths.note("other", 30_000.0)
    assert lengths.expected("other") < 256 * 1.05**64


def test_lengths_of_models_that_no_node_serves_are_forgotten() -> None:
    made = nodes()
    first, second = made.nodes
    made.set_models(first, frozenset({"a"}))
    made.set_models(second, frozenset({"a", "b"}))
    for name in ("", "a", "b"):
        made.answers.note(name, 512.0)
    assert [made.answers.expected(name) for name in ("", "a", "b")] == [260, 260, 260]
    made.set_models(second, frozenset({"a"}))
    assert [made.answers.expected(name) for name in ("", "a", "b")] == [260, 260, 256]
    made.apply(FLAGS, ())
    assert [made.answers.expected(name) for name in ("", "a")] == [260, 256]
