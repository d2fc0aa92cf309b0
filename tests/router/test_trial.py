"""When an idle prefill node is tried though its pace is worse, and at what price."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pd_connectors.protocol.feed import NodeLoad
from pd_router.config import HandoffOrder, RouterConfig
from pd_router.nodes.node_table import NodeTable
from pd_router.nodes.trial import FEWEST, MOST, SAVED, SHORT_S, IdleTrial
from pd_router.policy.charge import Charge
from pd_router.policy.prompt_facts import PromptFacts
from tests.router.choosing import choose

if TYPE_CHECKING:
    from pd_router.nodes.node import Node
    from pd_router.policy.cost_policy import CostRoute

TOKEN_S = 100e-6
NUM_TOKENS = 1000
BUSY, TRIED = "direct; reason=prefill-busy", "p-first; reason=prefill-idle"


class World:
    """A table of live feeds and a clock."""

    def __init__(self, num_prefill: int = 1, **settings: Any) -> None:
        self.now_s = 100.0
        prefill = tuple(f"http://p{number}:1" for number in range(num_prefill))
        self.config = RouterConfig(prefill=prefill, decode=("http://d:1",), **settings)
        self.table = NodeTable(self.config, lambda: self.now_s)
        for node in self.table.nodes:
            node.reachable = True
            self.tell(node)
        self.d = self.table.nodes[-1]

    def tell(self, node: Node, token_s: float = TOKEN_S, queued: int = 0, free_blocks: int = 5000) -> None:
        node.view.receive(
            NodeLoad(queued, num_slots=64, free_blocks=free_blocks, num_blocks=5000, block_size=64, token_s=token_s), ()
        )

    def choose(self, asked: HandoffOrder | None = None, turn: int = 0, **facts: Any) -> CostRoute:
        resume_nodes = self.table.nodes if facts.pop("goes_on", False) else None  # of a stream that was cut
        return choose(self.table, None, PromptFacts(4 * NUM_TOKENS, **facts), self.config, asked, turn, resume_nodes)

    def routes(self, count: int, **facts: Any) -> list[str]:
        return [choice.text for choice in self.choices(count, **facts)]

    def choices(self, count: int, **facts: Any) -> list[CostRoute]:
        """A trial is begun, and the node is idle again at once."""
        choices = []
        for turn in range(count):
            choices.append(choice := self.choose(turn=turn, **facts))
            if choice.text == TRIED:
                choice.prefills[0].view.trial.begin()
        return choices

    def read(self, node: Node, took_s: float) -> None:
        """The node computes a prompt."""
        with Charge(node, lambda: self.now_s, prefill_bytes=4 * NUM_TOKENS) as charge:
            self.now_s += took_s
            charge.prefill_done()


def tries(trial: IdleTrial, likely_s: float, usual_s: float, doubt_s: float = 0.0) -> bool:
    """Whether the prompt goes to the node, which begins it then."""
    is_due = trial.is_due(likely_s, usual_s, doubt_s)
    if is_due and likely_s > usual_s + doubt_s:
        trial.begin()
    return is_due


@pytest.mark.long
@given(prompts=st.lists(st.tuples(st.floats(1e-6, 100.0), st.floats(1e-3, 10.0)), max_size=400))
def test_trials_are_paid_for_and_none_waits_for_long(prompts: list[tuple[float, float]]) -> None:
    """`prompts`: seconds that each would lose, and that it takes elsewhere."""
    trial = IdleTrial()
    tried = [tries(trial, usual_s + lost_s, usual_s) for lost_s, usual_s in prompts]
    last, saved_s = -1, 0.0
    for at, (lost_s, usual_s) in enumerate(prompts):
        saved_s += SAVED * usual_s
        if tried[at]:
            assert saved_s >= lost_s - 1e-9 or at - last >= MOST
            last, saved_s = at, 0.0
        assert at - last < 2 * MOST


def test_what_a_trial_may_cost_whatever_it_costs_is_that_of_a_prompt_of_usual_length() -> None:
    trial = IdleTrial()
    tried = [usual_s for usual_s in (0.1, 0.4) * (2 * MOST) if tries(trial, 20 * usual_s, usual_s)]
    assert tried == [0.1] * 3
    tried = [usual_s for usual_s in (0.1,) * MOST + (0.4,) * (2 * MOST) if tries(trial, 20 * usual_s, usual_s)]
    assert 0.4 in tried, "short ones have ended"


def test_a_node_that_is_no_later_gets_every_prompt() -> None:
    trial = IdleTrial()
    assert all(trial.is_due(likely_s, 0.1, doubt_s=0.02) for likely_s in (0.01, 0.1, 0.12) * MOST)
    assert not trial.is_due(1.0, 0.1), "those saved nothing up"


def test_a_prompt_that_was_faster_than_told_counts_until_the_next() -> None:
    trial = IdleTrial()
    assert trial.likely_s(2.0) == 2.0
    trial.note(0.5, 1.0)
    assert trial.likely_s(2.0) == 1.0
    trial.note(3.0, 1.0)
    assert trial.likely_s(2.0) == 2.0, "a slow one is no reason to leave it more than its own word is"
    trial.note(0.5, 0.0)
    assert trial.likely_s(2.0) == 2.0, "it tells no pace"
    trial.note(0.5, 1.0)
    trial.note(0.018, SHORT_S)
    assert trial.likely_s(2.0) == 1.0, "a short one says nothing: the way to the node takes as long"


@pytest.mark.parametrize("factor", [1.5, 3.0, 20.0, 1000.0])
def test_an_idle_node_with_a_long_pace_is_tried_and_used_if_it_is_fast(factor: float) -> None:
    world = World()
    p = world.table.nodes[0]
    world.tell(p, factor * TOKEN_S)
    routes = world.routes(2 * MOST)
    assert set(routes) == {BUSY, TRIED}
    first = routes.index(TRIED)
    assert first < MOST
    world.read(p, 1.1 * factor * TOKEN_S * NUM_TOKENS)  # as slow as it says
    assert world.routes(MOST).count(TRIED) < MOST / 4
    world.read(p, TOKEN_S * NUM_TOKENS)
    assert set(world.routes(3 * MOST)) == {TRIED}
    world.tell(p, factor * TOKEN_S, queued=NUM_TOKENS)
    assert set(world.routes(3 * MOST)) == {BUSY}, "it is not idle"
    world.tell(p)
    assert set(world.routes(MOST)) == {"p-first; reason=default"}, "its own word is true again"


def test_requests_with_an_order_or_a_target_and_cut_streams_try_nothing() -> None:
    for slo_ttft_ms, facts in (
        (0.0, {"asked": HandoffOrder.DIRECT}),
        (150.0, {}),
        (0.0, {"goes_on": True}),
        (0.0, {"is_several": True}),
        (0.0, {"shows_logprobs": True}),
    ):
        world = World(slo_ttft_ms=slo_ttft_ms)
        world.tell(world.table.nodes[0], 3 * TOKEN_S)
        assert not [route for route in world.routes(3 * MOST, **facts) if "idle" in route], (slo_ttft_ms, facts)
    world = World(slo_ttft_ms=400.0)
    world.tell(world.table.nodes[0], 3 * TOKEN_S)
    assert TRIED in world.routes(MOST), "it meets this target"


def test_a_prompt_that_d_has_cached_stays_there() -> None:
    world = World()
    world.tell(world.table.nodes[0], 3 * TOKEN_S)
    assert set(world.routes(2 * MOST, cached={world.d: 550})) == {"direct; reason=cached"}
    world.tell(world.table.nodes[0], 1.05 * TOKEN_S)
    assert set(world.routes(2 * MOST, cached={world.d: 400})) == {"direct; reason=cached"}, "its pace is no reason"


def test_a_system_prompt_that_only_d_has_cached_hinders_no_trial() -> None:
    """A P that was killed has lost it, and gets none back: before, each prompt was `cached` at D for good."""
    world = World()
    world.tell(world.table.nodes[0], 3 * TOKEN_S)
    assert set(world.routes(2 * MOST, cached={world.d: 200})) == {"direct; reason=cached", TRIED}


def test_a_trial_stays_due_until_the_node_has_a_prompt() -> None:
    """A request that waits for its turn is chosen for twice, and may be refused between. Before, 48 prompts that were
    chosen for twice lost each trial."""
    world = World()
    p = world.table.nodes[0]
    world.tell(p, 30 * TOKEN_S)
    routes = [world.choose(turn=turn).text for turn in range(MOST + 5)]
    assert routes == [BUSY] * (MOST - 1) + [TRIED] * 6
    with Charge(p, lambda: world.now_s, prefill_bytes=400):
        pass
    assert world.choose().text == BUSY
    world.routes(MOST - 3)
    world.tell(p, 30 * TOKEN_S, queued=1)  # another router's trial
    world.tell(p, 30 * TOKEN_S)
    assert set(world.routes(MOST - 1)) == {BUSY}


@pytest.mark.parametrize("workers", [1, 2, 4, 64])
def test_the_prompts_of_all_workers_wait_for_one_trial(workers: int) -> None:
    world = World(workers=workers)
    world.tell(world.table.nodes[0], 30 * TOKEN_S)
    assert world.routes(MOST).index(TRIED) == max(FEWEST, MOST // workers) - 1


@pytest.mark.parametrize("factor", [1.5, 3.0, 1000.0])
@pytest.mark.parametrize(("num_routers", "workers"), [(1, 1), (2, 1), (2, 2), (4, 4)])
def test_several_routers_use_an_idle_node_within_100_prompts(num_routers: int, workers: int, factor: float) -> None:
    """Its pace was long; it is as fast as D, and tells so from its fourth prompt on."""
    routers, pace_s, num_read = [World(workers=workers) for _ in range(num_routers)], factor * TOKEN_S, 0
    for turn in range(100):
        for router in routers:
            router.tell(router.table.nodes[0], pace_s)
        router = routers[turn % num_routers]
        if router.choose(turn=turn).order is HandoffOrder.DIRECT:
            continue
        for other in routers:
            if other is not router:
                other.tell(other.table.nodes[0], pace_s, queued=NUM_TOKENS)
        router.read(router.table.nodes[0], TOKEN_S * NUM_TOKENS)
        num_read += 1
        pace_s = TOKEN_S if num_read >= 4 else pace_s
    assert num_read >= 9


def test_no_trial_waits_for_memory_or_at_a_node_that_may_be_busy() -> None:
    world = World()
    p = world.table.nodes[0]
    world.tell(p, 30 * TOKEN_S, free_blocks=15)  # of 64 tokens; the prompt has 1,000
    assert set(world.routes(2 * MOST)) == {BUSY}
    world.tell(p, 30 * TOKEN_S, free_blocks=16)
    assert TRIED in world.routes(MOST)
    p.view.forget()
    p.speed.note(4 * 10_000, 0.0, world.now_s)
    assert set(world.routes(2 * MOST)) == {BUSY}


def test_a_system_prompt_that_all_nodes_have_cached_hinders_no_trial() -> None:
    world = World()
    world.tell(world.table.nodes[0], 3 * TOKEN_S)
    assert TRIED in world.routes(2 * MOST, cached=dict.fromkeys(world.table.nodes, 200))


def test_the_slowest_of_several_is_tried_too() -> None:
    """It would get nothing as long as the others are idle, so its pace would stay."""
    world = World(num_prefill=3)
    p0, p1, p2 = world.table.nodes[:3]
    world.tell(p1, 3 * TOKEN_S)
    choices = world.choices(2 * MOST)
    tried = [choice for choice in choices if choice.text == TRIED]
    assert 1 <= len(tried) <= 5
    assert {choice.prefills[0] for choice in tried} == {p1}
    assert all(set(choice.prefills) == {p0, p1, p2} for choice in choices)
    assert {choice.prefills[0] for choice in choices if choice.text != TRIED} == {p0, p2}
    world.read(p1, TOKEN_S * NUM_TOKENS)
    assert world.choose().prefills[0] is p1
    world.tell(p1, 3 * TOKEN_S, queued=10)
    assert TRIED not in world.routes(2 * MOST)
    world.tell(p1, 1.05 * TOKEN_S)
    assert TRIED not in world.routes(2 * MOST), "it takes its turns"


def test_a_node_that_tells_no_pace_yet_is_as_fast_as_others_tell() -> None:
    """Not as its legs were before it was killed: those were of another process, and of another measure."""
    world = World()
    p, d = world.table.nodes
    p.speed.note(4 * 10_000, 0.0, world.now_s)  # 100 s
    world.tell(p, 0.0)
    assert set(world.routes(2 * MOST)) == {"p-first; reason=default"}
    assert world.choose().costs.reading_s(p) == pytest.approx(TOKEN_S * NUM_TOKENS)
    p.view.forget()  # it has no feed: what it taught is all that is known
    assert world.choose().costs.reading_s(p) > 50 * TOKEN_S * NUM_TOKENS
    world.tell(p, 2 * TOKEN_S)
    world.tell(d, 0.0)
    assert world.choose().costs.reading_s(d) == pytest.approx(4 * TOKEN_S * NUM_TOKENS)


def test_only_a_prompt_that_found_the_node_idle_says_how_fast_it_is() -> None:
    world = World()
    p = world.table.nodes[0]
    world.tell(p, 3 * TOKEN_S, queued=100)
    world.read(p, 0.01)
    assert p.view.trial.likely_s(1.0) == 1.0
    world.tell(p, 3 * TOKEN_S)
    with Charge(p, lambda: world.now_s, prefill_bytes=400):
        world.read(p, 0.01)
    assert p.view.trial.likely_s(1.0) == 1.0
    world.read(p, 0.03)
    assert p.view.trial.likely_s(1.0) == pytest.approx(0.1)
