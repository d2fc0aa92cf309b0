"""Prefill nodes with time to spare that keep the streams of the prompts that they read, without a target."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
from msgspec.structs import replace

from pd_router.config import HandoffOrder
from pd_router.policy.charge import Charge
from tests.router.test_choice import NOW_S, chosen, table
from tests.router.test_long_contexts import CONTEXT, DECODE, PREFILL, nodes

if TYPE_CHECKING:
    from pd_connectors.protocol.feed import NodeLoad

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
        (FREE, replace(DECODE, num_running=1, num_context=CONTEXT, step_s=0.0055), {}),
        (replace(FREE, num_running=3, num_context=3 * CONTEXT, step_s=0.0082), DECODE, {}),
        (FREE, DECODE, {"asked": HandoffOrder.P_FIRST}),
        (FREE, DECODE, {"decode_on_prefill": "never"}),
        (FREE, DECODE, {"is_several": True}),
    ],
)
def test_a_stream_is_handed_over_as_ever(prefill: NodeLoad, decode: NodeLoad, facts: dict[str, Any]) -> None:
    assert chosen(nodes(prefill, decode), CONTEXT, **MOST | facts).reason != "prefill-free"


def test_a_queue_is_time_that_a_prefill_node_has_not() -> None:
    assert chosen(nodes(FREE, DECODE, queued=300), CONTEXT, **MOST).reason == "prefill-free"
    assert chosen(nodes(FREE, DECODE, queued=200_000), CONTEXT, **MOST).reason != "prefill-free"


def test_a_node_without_a_feed_keeps_none() -> None:
    made = nodes(FREE, DECODE)
    made.nodes[0].view.forget()
    assert chosen(made, CONTEXT, **MOST).reason != "prefill-free"
    assert chosen(table(1, 1), CONTEXT, **MOST).reason == "default"


def test_streams_that_are_on_their_way_count_before_the_node_tells_them() -> None:
    """Or a burst of one router would land on one prefill node."""
    made = nodes(replace(FREE, kept_tokens=3 * CONTEXT), DECODE)
    charges, kept = [], 0
    for _ in range(6):
        choice = chosen(made, CONTEXT, **MOST)
        if choice.reason != "prefill-free":
            break
        kept += 1
        charges.append(Charge(made.nodes[0], lambda: NOW_S, sequences=1, context=CONTEXT))
    assert kept == 2, "the third might need more than is promised to no other"
    for charge in charges:
        charge.release()
    assert chosen(made, CONTEXT, **MOST).reason == "prefill-free"


def test_routers_that_decide_at_once_send_one_stream_too_many_each_at_most() -> None:
    first, second = (nodes(replace(FREE, kept_tokens=int(1.5 * CONTEXT)), DECODE) for _ in range(2))
    for made in (first, second):
        assert chosen(made, CONTEXT, **MOST).reason == "prefill-free"
        Charge(made.nodes[0], lambda: NOW_S, sequences=1, context=CONTEXT)
        assert chosen(made, CONTEXT, **MOST).reason != "prefill-free"


def test_a_prefill_node_with_streams_is_not_tried_as_an_idle_one() -> None:
    """Its streams make its pace slower than that of the others, which says nothing of its speed."""
    made = table(2, 1)
    slow = replace(FREE, num_running=2, num_context=2 * CONTEXT, step_s=0.007, step_tokens=500, kept_tokens=0)
    for node, load in zip(made.nodes, (replace(FREE, kept_tokens=0), slow, DECODE), strict=True):
        node.view.receive(load, ())
    made.nodes[1].view.trial.num_waited = 100
    assert {chosen(made, CONTEXT, turn=turn, **MOST).reason for turn in range(120)} == {"default"}
