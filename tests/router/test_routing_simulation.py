"""The simulator of routers: its parts, and the order of the policies on a small trace."""

from __future__ import annotations

import itertools
import json
from dataclasses import replace
from random import Random
from typing import TYPE_CHECKING

import pytest

from benchmarks.presets import TURNS
from benchmarks.routing_simulation import simulate, simulate_turns
from benchmarks.routing_simulation.nodes import LruBlocks, Prompt, SimNode, prefill_s
from benchmarks.routing_simulation.report import BOUND, COST, LEAST_LOADED, ROUND_ROBIN, comparisons
from benchmarks.routing_simulation.trace import SimRequest, copied, read_trace, scaled, synthetic
from benchmarks.routing_simulation.turns import TurnsWorld, cluster_of, prompt_tokens
from benchmarks.routing_simulation.world import Cluster, SimWorld
from pd_cluster.bench.turns import TurnsPlan
from pd_cluster.bench.workload import Length
from pd_cluster.errors import StartupError
from pd_cluster.planning.event_queue import EventQueue

if TYPE_CHECKING:
    from pathlib import Path


@pytest.mark.long
def test_the_cost_beats_what_it_replaces_and_routers_agree() -> None:
    """Six seeds gave 0.53 to 0.65, 1.04 to 1.23, 0.95 to 1.02, 1.23 to 1.46, in this order."""
    arrivals = synthetic(200, Random(5))
    rows = simulate(arrivals, Cluster(num_prefill=4, num_decode=4, num_blocks=400), 0.8, 1, num_routers=(1, 3))
    ratios = comparisons(rows)
    assert ratios["mean / least-loaded"] < 0.8
    assert ratios["mean / bound"] < 1.35
    assert ratios["cost: 3 routers / one"] < 1.15
    assert ratios["least-loaded: 3 routers / one"] > 1.15
    assert rows[LEAST_LOADED, 1].mean_s < rows[ROUND_ROBIN, 1].mean_s
    assert rows[COST, 1].hit_share > 1.4 * rows[LEAST_LOADED, 1].hit_share


@pytest.mark.long
def test_runs_of_equal_seeds_are_equal() -> None:
    arrivals = synthetic(60, Random(1))
    cluster = Cluster(num_prefill=2, num_decode=1, num_routers=2)
    first, second = (SimWorld(cluster, scaled(arrivals, 4.0, Random(3)), Random(2)).run() for _ in range(2))
    assert first == second
    assert len(first.ttft_s) == 60
    assert first != SimWorld(cluster, scaled(arrivals, 4.0, Random(4)), Random(2)).run()


@pytest.mark.long
@pytest.mark.parametrize("policy", [COST, LEAST_LOADED, ROUND_ROBIN, BOUND])
def test_every_request_ends_and_no_charge_is_left(policy: str) -> None:
    arrivals = scaled(synthetic(60, Random(1)), 8.0, Random(1))
    world = SimWorld(Cluster(num_prefill=2, num_decode=2, num_routers=2, policy=policy), arrivals, Random(1))
    assert len(world.run().ttft_s) == 60
    world.events.run(lambda: not any(node.num_running or node.queue for node in world.nodes))
    tables = [router.table for router in world.routers if hasattr(router, "table")]
    for table in tables:
        assert {(node.view.ledger.own_tokens, node.view.ledger.own_sequences) for node in table.nodes} == {(0, 0)}
    assert len(tables) == (2 if policy in (COST, BOUND) else 0)


def test_an_idle_prefill_node_takes_as_long_as_its_fit_says() -> None:
    events = EventQueue()
    node = SimNode(events, LruBlocks(10), is_prefill=True)
    arrival = SimRequest(0.0, 1000, 2, (1,))
    ends: list[float] = []
    node.add_prompt(Prompt(arrival, 0.0, lambda: ends.append(events.now_s)))
    events.run(lambda: bool(ends))
    assert ends == [pytest.approx(prefill_s(1000, 0))]
    assert ends[0] == pytest.approx(1000 / 46_400, rel=0.02)
    node.add_prompt(Prompt(arrival, 0.0, lambda: ends.append(events.now_s)))
    assert (node.load.queued_tokens, node.hit_tokens) == (1000 - 512, 512)
    events.run(lambda: len(ends) == 2)
    assert ends[1] - ends[0] == pytest.approx(prefill_s(1000, 512))


def test_the_shortest_prompt_is_next_until_another_has_waited() -> None:
    events = EventQueue()
    node = SimNode(events, LruBlocks(10), is_prefill=True)
    order: list[int] = []
    for size in (30_000, 20_000, 500, 1000):
        node.add_prompt(Prompt(SimRequest(0.0, size, 2, ()), 0.0, lambda size=size: order.append(size)))  # type: ignore[misc]
    events.after(100.0, lambda: None)
    events.run(lambda: len(order) == 4)
    assert order == [30_000, 500, 1000, 20_000]


def test_a_prefix_cache_forgets_the_end_of_the_oldest_prompt_first() -> None:
    cache = LruBlocks(4)
    cache.put((1, 2, 3))
    stored, evicted = cache.put((1, 9, 8))
    assert ([block.block for block in stored], evicted) == ([8, 9], [3])
    assert [cache.match(blocks) for blocks in ((1, 2, 3), (1, 9, 8), (2,))] == [1024, 1536, 1024]


@pytest.mark.long
def test_copies_of_a_trace_share_no_text_and_are_as_dense_as_their_number() -> None:
    arrivals = synthetic(40, Random(2))
    assert copied(arrivals, 1) == arrivals
    copies = copied(arrivals, 3)
    assert len(copies) == 120
    assert copies[-1].at_s <= arrivals[-1].at_s + 1
    assert [one.at_s for one in copies] == sorted(one.at_s for one in copies)
    assert sum(0 <= one.at_s < 10 for one in copies) == pytest.approx(30, abs=3)
    assert len({block for one in copies for block in one.blocks}) == 3 * len(
        {b for one in arrivals for b in one.blocks}
    )
    rows = simulate(copies, Cluster(num_prefill=2, num_decode=2), 0.5, 1, policies=(COST,))
    assert ([*rows], comparisons(rows)) == ([(COST, 1)], {})


@pytest.mark.long
@pytest.mark.parametrize("at_once", [0, 4])
def test_conversations_are_held_by_their_seed(at_once: int) -> None:
    plan = TurnsPlan(num_conversations=6, num_turns=Length(2, 4), at_once=at_once, rate=0.2)
    conversations = plan.conversations(1)
    worlds = [TurnsWorld(cluster_of("2P1D"), conversations, at_once, 0) for _ in range(2)]
    first, second = (world.talk() for world in worlds)
    assert first == second
    turns = [turn for one in conversations for turn in one.turns]
    assert [(one.num_output, len(one.chunk_times_s)) for one in first] == [(turn.num_output,) * 2 for turn in turns]
    assert [one.num_input for one in first] == [num for one in conversations for num in prompt_tokens(one)]
    found = list[bool]()  # by later turns: the whole prompt before
    for before, one in itertools.pairwise(first):
        if one.turn:
            assert one.sent_s == pytest.approx(before.end_s + conversations[one.conversation].turns[one.turn].pause_s)
            assert plan.num_head <= one.num_cached + 512 <= before.num_input + before.num_output + 512
            found.append(before.num_input - 512 < one.num_cached)
        assert one.route
        assert one.chunk_times_s == sorted(one.chunk_times_s)
    assert sum(found) > len(found) / 2, "else the turn before was read on the other kind of node"
    by_time = sorted(first, key=lambda one: one.sent_s)
    assert all(one.predicted_s is not None for one in by_time if one.sent_s > by_time[0].end_s)
    busy = worlds[0].events
    busy.run(lambda: not any(node.num_running or node.has_prompts for node in worlds[0].nodes))
    ledgers = [node.view.ledger for node in worlds[0].routers[0].table.nodes]  # type: ignore[attr-defined]
    assert {(one.own_tokens, one.own_keys, one.own_context, one.own_sequences) for one in ledgers} == {(0,) * 4}


@pytest.mark.long
def test_mixed_nodes_answer_more_and_stall_longer() -> None:
    """As it was measured: 1.35 and 1.68 requests a second, gaps of 24 and 122 ms."""
    preset = TURNS["turns"]
    preset = replace(preset, plan=replace(preset.plan, num_conversations=8, num_turns=Length(4, 4)))
    pair, mixed = (simulate_turns(preset, setting, 0) for setting in ("1P1D", "2M"))
    assert 1.0 < mixed.whole.request_rate / pair.whole.request_rate < 1.4
    gaps = [one.whole.spreads["longest gap"].p50_ms for one in (pair, mixed)]
    assert gaps[0] < 40 < 80 < gaps[1]
    assert mixed.found_answers > pair.found_answers, "a decode node's answers are not on a prefill node"


@pytest.mark.parametrize("setting", ["1P", "0M", "2P1M"])
def test_settings_that_are_none(setting: str) -> None:
    with pytest.raises(StartupError, match="is not like"):
        cluster_of(setting)


def test_traces_are_read(tmp_path: Path) -> None:
    mooncake, azure, bad = (tmp_path / name for name in ("m.jsonl", "a.csv", "b.jsonl"))
    row = {"timestamp": 5000, "input_length": 1030, "output_length": 7, "hash_ids": [4, 5, 6]}
    mooncake.write_text(json.dumps(row) + "\n" + json.dumps(row | {"timestamp": 4000}) + "\n")
    assert read_trace(mooncake) == [SimRequest(0.0, 1030, 7, (4, 5)), SimRequest(1.0, 1030, 7, (4, 5))]
    lines = ("TIMESTAMP,ContextTokens,GeneratedTokens", "2023-11-16 18:15:46.6805900,1024,44",
             "2023-11-16 18:15:48.1805900,600,9")  # fmt: skip
    azure.write_text("\n".join(lines) + "\n")
    first, second = read_trace(azure)
    assert (first.num_tokens, second.num_output) == (1024, 9)
    assert second.at_s == pytest.approx(1.5)
    assert not set(first.blocks) & set(second.blocks)
    bad.write_text("{}\n")
    with pytest.raises(StartupError, match=r"b\.jsonl cannot be read"):
        read_trace(bad)
