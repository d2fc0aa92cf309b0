"""Prefill nodes with time to spare that keep the streams of the prompts that they read, without a target."""

from __future__ import annotations

from itertools import product
from typing import TYPE_CHECKING, Any

import pytest
from msgspec.structs import replace

from pd_connectors.protocol.feed import FAR
from pd_router.config import HandoffOrder
from pd_router.policy.charge import Charge
from pd_router.policy.cost import DOUBT_S
from tests.router.test_choice import NOW_S, chosen, table
from tests.router.test_long_contexts import CONTEXT, DECODE, PREFILL, nodes

if TYPE_CHECKING:
    from pd_connectors.protocol.feed import NodeLoad
    from pd_router.policy.cost_policy import CostRoute

FREE = replace(PREFILL, kept_tokens=250_000, prompts_share=0.3, step_s=0.0042, context_s=33e-9)
MOST: dict[str, Any] = {"most_output": 400.0}


def test_a_free_prefill_node_keeps_a_stream_that_costs_more_elsewhere() -> None:
    made = nodes(FREE, DECODE)
    p, _ = made.nodes
    choice = chosen(made, CONTEXT, **MOST)
    assert (choice.text, choice.best(choice.decodes, NOW_S)) == ("direct; reason=prefill-free", p)
    assert choice.otherwise is not None
    assert choice.otherwise.order is HandoffOrder.P_FIRST
    p.view.receive(replace(FREE, kept_tokens=0), ())
    assert choice.best(choice.decodes, NOW_S) is None, "prompts have come meanwhile: it is handed over"


@pytest.mark.parametrize(
    ("prefill", "decode", "facts"),
    [
        (PREFILL, DECODE, {}),  # an older release, or one that has a target
        (replace(FREE, kept_tokens=CONTEXT), DECODE, {}),
        (FREE, DECODE, {"most_output": 1e6}),
        (replace(FREE, num_running=64), DECODE, {}),
        (replace(FREE, free_blocks=10), DECODE, {}),
        (replace(FREE, prompts_share=0.7), DECODE, {}),
        (replace(FREE, prompts_share=1.0), DECODE, {}),
        (replace(FREE, prompts_share=0.5), replace(DECODE, num_running=1, num_context=CONTEXT, step_s=0.0055), {}),
        (replace(FREE, num_running=3, num_context=3 * CONTEXT, step_s=0.0082), DECODE, {}),
        (FREE, DECODE, {"asked": HandoffOrder.P_FIRST}),
        (FREE, DECODE, {"decode_on_prefill": "never"}),
        (FREE, DECODE, {"is_several": True}),
        (FREE, DECODE, {"num_sequences": 2}),  # each costs a step as much as one does
    ],
)
def test_a_stream_is_handed_over_as_ever(prefill: NodeLoad, decode: NodeLoad, facts: dict[str, Any]) -> None:
    assert chosen(nodes(prefill, decode), CONTEXT, **MOST | facts).reason != "prefill-free"


def test_a_prefill_node_keeps_no_stream_that_steps_hardly_feel() -> None:
    """Its tokens would come late while prompts are computed, and the others' hardly sooner."""
    reasons = [chosen(nodes(FREE, DECODE), num_tokens, **MOST).reason for num_tokens in (FAR - 1000, FAR + 1000)]
    assert [reason == "prefill-free" for reason in reasons] == [False, True]


def test_a_queue_is_time_that_a_prefill_node_has_not() -> None:
    assert chosen(nodes(FREE, DECODE, queued=300), CONTEXT, **MOST).reason == "prefill-free"
    assert chosen(nodes(FREE, DECODE, queued=200_000), CONTEXT, **MOST).reason != "prefill-free"


def test_a_node_without_a_feed_keeps_none() -> None:
    made = nodes(FREE, DECODE)
    made.nodes[0].view.forget()
    assert chosen(made, CONTEXT, **MOST).reason != "prefill-free"
    assert chosen(table(1, 1), CONTEXT, **MOST).reason == "default"


@pytest.mark.parametrize("context", [20_000, CONTEXT])
def test_a_router_sends_one_stream_before_the_node_tells_it(context: int) -> None:
    """Or a burst would land on one prefill node: eight routers sent 56 streams, with steps of 78 ms."""
    made = nodes(FREE, replace(DECODE, num_running=60, step_s=0.02, num_slots=256))
    p, _ = made.nodes
    assert chosen(made, context, **MOST).reason == "prefill-free"
    with Charge(p, lambda: NOW_S, sequences=1, context=context) as charge:
        assert chosen(made, context, **MOST).reason != "prefill-free"
        p.view.receive(replace(FREE, num_running=1, num_context=context), [charge.number])
        assert chosen(made, context, **MOST).reason == "prefill-free"
    assert chosen(made, context, **MOST).reason == "prefill-free"


def first_token_s(choice: CostRoute) -> float:
    """Of the node that reads the prompt, or answers."""
    first = choice.prefills[0] if choice.order is HandoffOrder.P_FIRST else choice.best(choice.decodes, NOW_S)
    assert first is not None
    seconds = choice.predicted_s(first, NOW_S)
    assert seconds is not None
    return seconds


@pytest.mark.long_cases
@pytest.mark.parametrize("route", ["p-first", "d-first"])
@pytest.mark.parametrize("slo_ttft_ms", [0.0, 150.0, 400.0])
def test_the_first_token_is_not_later_than_elsewhere(route: str, slo_ttft_ms: float) -> None:
    """Nor does it miss a target that is met elsewhere. A decode node with all but 10 tokens of a prompt was left for a
    prefill node that computed 40,000: 2 s in place of 13 ms."""
    found = set()
    cached = 0, 30_000, 38_500, 39_700, CONTEXT - 10
    for on_p, on_d, queued in product(cached, cached, (0, 3000, 12_000)):
        made = nodes(FREE, DECODE, queued=queued)
        facts = MOST | {"cached": dict(zip(made.nodes, (on_p, on_d), strict=True)), "slo_ttft_ms": slo_ttft_ms}
        choice = chosen(made, CONTEXT, route=route, **facts)
        if choice.reason == "prefill-free":
            assert choice.otherwise is not None
            displaced = chosen(made, CONTEXT, route=route, decode_on_prefill="never", **facts)
            assert (choice.otherwise.text, choice.otherwise.decodes) == (displaced.text, displaced.decodes)
            other_s, latest_s = first_token_s(displaced), slo_ttft_ms / 1000
            assert first_token_s(choice) <= (latest_s if other_s <= latest_s else other_s + DOUBT_S)
            found.add(displaced.order)
    assert HandoffOrder(route) in found, "else nothing was compared"


def test_a_stream_that_is_not_kept_goes_where_it_had_gone() -> None:
    """A prefill node that has no room any more would read all of the prompt, of which the decode node lacks 100."""
    made = nodes(FREE, DECODE)
    p, d = made.nodes
    choice = chosen(made, CONTEXT, cached={p: 38_500, d: 39_900}, slo_ttft_ms=400.0, **MOST)
    assert choice.reason == "prefill-free"
    p.view.receive(replace(FREE, kept_tokens=0), ())
    assert choice.best(choice.decodes, NOW_S) is None
    assert choice.otherwise is not None
    assert (choice.otherwise.text, choice.otherwise.best([d], NOW_S)) == ("direct; reason=cached", d)
    assert choice.otherwise.otherwise is not None
    assert choice.otherwise.otherwise.order is HandoffOrder.P_FIRST


def test_what_another_node_has_cached_costs_a_node_nothing() -> None:
    """A mixed node beside one with a long queue read prompts later than it had to."""
    made = table(0, 0, 2)
    for node in made.nodes:
        node.view.receive(PREFILL, ())
    first, second = made.nodes
    costs_s = [chosen(made, 9000, cached=cached).costs.direct_s(second) for cached in ({}, {first: 8000})]
    assert costs_s[0] == costs_s[1]


def test_a_prefill_node_with_streams_is_not_tried_as_an_idle_one() -> None:
    """Its streams make its pace slower than that of the others, which says nothing of its speed."""
    made = table(2, 1)
    slow = replace(FREE, num_running=2, num_context=2 * CONTEXT, step_s=0.007, step_tokens=500, kept_tokens=0)
    for node, load in zip(made.nodes, (replace(FREE, kept_tokens=0), slow, DECODE), strict=True):
        node.view.receive(load, ())
    made.nodes[1].view.trial.num_waited = 100
    assert {chosen(made, CONTEXT, turn=turn, **MOST).reason for turn in range(120)} == {"default"}
