"""The choice of orders and nodes, by their costs: over a table without processes."""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from msgspec.structs import replace

from pd_connectors.protocol.feed import NodeLoad
from pd_http.errors import ModelNotFound
from pd_router.config import HandoffOrder, RouterConfig
from pd_router.errors import NoNode
from pd_router.nodes.node import FULL_KV, Node, Role
from pd_router.nodes.node_table import NodeTable
from pd_router.policy.charge import Charge
from pd_router.policy.cost import LOCAL_TOKENS, SPEEDS, STREAM_SHARE, Costs
from pd_router.policy.prompt_facts import PromptFacts
from tests.router.choosing import choose

if TYPE_CHECKING:
    from pd_router.policy.cost_policy import CostRoute

NOW_S = 100.0
TOKEN_S, KEY_S = 20e-6, 1e-9
# A node of a live feed: 5 ms a step, of which prompts get 160 tokens beside decodes.
LOAD = NodeLoad(num_slots=64, free_blocks=5000, num_blocks=5000, block_size=64, token_s=TOKEN_S, key_s=KEY_S)
BESIDE = {"step_s": 0.005, "step_tokens": 160}


def table(num_prefill: int = 2, num_decode: int = 2, num_mixed: int = 0, **settings: Any) -> NodeTable:
    """All healthy, without a feed."""
    made = NodeTable(config(num_prefill, num_decode, num_mixed, **settings), lambda: NOW_S)
    for node in made.nodes:
        node.reachable = True
        node.models = frozenset({"demo"})
    return made


def config(num_prefill: int = 2, num_decode: int = 2, num_mixed: int = 0, **settings: Any) -> RouterConfig:
    return RouterConfig(
        prefill=tuple(f"http://p{i}:1" for i in range(num_prefill)),
        decode=tuple(f"http://d{i}:1" for i in range(num_decode)),
        mixed=tuple(f"http://m{i}:1" for i in range(num_mixed)),
        **settings,
    )


def tell(node: Node, **load: Any) -> None:
    """A message of the node's feed."""
    beside = BESIDE if load.get("num_running") and node.role is not Role.PREFILL else {}
    node.view.receive(NodeLoad(**{name: getattr(LOAD, name) for name in LOAD.__struct_fields__} | beside | load), ())


def chosen(
    nodes: NodeTable, num_tokens: int = 1000, turn: int = 0, asked: HandoffOrder | None = None, **facts: Any
) -> CostRoute:
    """For a prompt of so many tokens, by the usual ratio."""
    settings = {name: facts.pop(name) for name in list(facts) if name in RouterConfig.__dataclass_fields__}
    prompt = PromptFacts(num_tokens * 4, **facts)
    return choose(nodes, "demo", prompt, config(**settings), asked, turn)


def learned(node: Node, tokens_per_s: float) -> None:
    node.speed.note(round(tokens_per_s * 4 * 100), 0.0, NOW_S)  # for so long that no guess matters


def surely_learned(node: Node, tokens_per_s: float) -> None:
    """For so long that the guess is nothing, where each choice of many depends on it."""
    node.speed.note(round(tokens_per_s * 4e6), NOW_S - 1e6, NOW_S)


def keep_busy(node: Node, seconds: float, tokens_per_s: float = 25_000.0) -> Charge:
    """A prefill node with a learned speed that this router has given so much."""
    learned(node, tokens_per_s)
    return Charge(node, lambda: NOW_S, prompt_tokens=round(seconds * tokens_per_s))


# --- orders and reasons


def test_reasons() -> None:
    nodes = table()
    assert (chosen(nodes).order, chosen(nodes).reason) == (HandoffOrder.P_FIRST, "default")
    assert chosen(nodes, route="d-first").text == "d-first; reason=default"
    assert chosen(nodes, asked=HandoffOrder.D_FIRST).text == "d-first; reason=header"
    assert chosen(nodes, asked=HandoffOrder.P_FIRST, is_several=True).text == "d-first; reason=several-prompts"
    for is_several, order in itertools.product((False, True), (None, HandoffOrder.P_FIRST, HandoffOrder.D_FIRST)):
        told = chosen(nodes, asked=order, shows_logprobs=True, is_several=is_several)
        assert (told.text, told.prefills) == ("direct; reason=prompt-logprobs", ())
    assert chosen(nodes).direct("prefill-failed").text == "direct; reason=prefill-failed"
    for node in nodes.nodes[:2]:
        node.reachable = False
    alone = chosen(nodes, asked=HandoffOrder.P_FIRST)
    assert (alone.text, alone.prefills) == ("direct; reason=no-prefill-node", ())


def test_no_choice_without_a_decoder_or_for_an_unknown_model() -> None:
    nodes = table()
    with pytest.raises(ModelNotFound, match="'other'"):
        choose(nodes, "other", PromptFacts(10), config(), None, 0)
    for node in nodes.nodes[2:]:
        node.reachable = False
    with pytest.raises(NoNode):
        chosen(nodes)
    nodes.nodes[2].models = None  # a node that never told might serve anything
    with pytest.raises(NoNode):
        choose(nodes, "other", PromptFacts(10), config(), None, 0)


@pytest.mark.parametrize("feed", [False, True])
def test_equal_nodes_take_turns(feed: bool) -> None:
    nodes = table(num_prefill=3, num_decode=2)
    if feed:
        for node in nodes.nodes:
            tell(node)
    choices = [chosen(nodes, turn=turn) for turn in range(6)]
    ds = [choice.best(choice.decodes, NOW_S) for choice in choices]
    assert [choice.prefills[0].url for choice in choices] == ["http://p0:1", "http://p1:1", "http://p2:1"] * 2
    assert [d.url for d in ds if d] == ["http://d0:1", "http://d1:1"] * 3


@pytest.mark.parametrize("feed", [False, True])
@pytest.mark.parametrize("num_prefill", [3, 0])
def test_equal_nodes_take_turns_however_their_measured_paces_differ(feed: bool, num_prefill: int) -> None:
    """A model of step times is some percent off: the fastest by that must not get all that find its like idle."""
    nodes = table(num_prefill=num_prefill, num_decode=0, num_mixed=3)
    for node, percent in zip(nodes.nodes, (0, 1, -1) * 2, strict=False):
        if feed:
            tell(node, token_s=TOKEN_S * (1 + percent / 100), key_s=KEY_S * (1 - percent / 100))
        else:
            learned(node, 25_000 * (1 + percent / 100))
    choices = [chosen(nodes, turn=turn) for turn in range(6)]
    if num_prefill:
        assert [choice.prefills[0] for choice in choices] == [*nodes.nodes[:3]] * 2
    ds = [choice.best(choice.decodes, NOW_S) for choice in choices]
    assert ds == [*nodes.nodes[num_prefill:]] * 2


# --- prefill nodes


def test_the_node_with_the_least_to_do_is_first_and_retries_take_the_next() -> None:
    nodes = table(num_prefill=3)
    p0, p1, p2 = nodes.nodes[:3]
    with Charge(p0, lambda: NOW_S, prompt_tokens=900), Charge(p2, lambda: NOW_S, prompt_tokens=100):
        for turn in range(3):
            assert chosen(nodes, turn=turn).prefills == (p1, p2, p0)
            assert chosen(nodes, turn=turn).offered(NOW_S, without=p1) == [p2, p0]
    choice = chosen(nodes)
    p0.reachable = False
    assert choice.best_prefill(choice.prefills, NOW_S) is p1


def test_cached_tokens_count_as_seconds_against_a_queue() -> None:
    nodes = table()
    p0, p1 = nodes.nodes[:2]
    for node in nodes.nodes:
        tell(node)
    cached = {p1: 800}
    choice = chosen(nodes, cached=cached)
    assert (choice.prefills[0], choice.text) == (p1, "p-first; reason=cached")
    tell(p1, queued_tokens=700)
    assert chosen(nodes, cached=cached).prefills[0] is p1
    tell(p1, queued_tokens=900)
    choice = chosen(nodes, cached=cached)
    assert (choice.prefills[0], choice.reason) == (p0, "default")


def test_a_queued_token_far_into_its_prompt_takes_longer() -> None:
    nodes = table()
    p0, p1 = nodes.nodes[:2]
    for node in nodes.nodes:
        tell(node)
    tell(p0, queued_tokens=20_000, queued_keys=20_000 * 10_000)  # one long prompt
    tell(p1, queued_tokens=21_000, queued_keys=21_000 * 500)  # 21 short ones
    assert chosen(nodes).prefills == (p1, p0)


@pytest.mark.long
def test_a_faster_node_gets_more() -> None:
    nodes = table()
    fast, slow = nodes.nodes[:2]
    tell(fast, token_s=TOKEN_S / 2)
    tell(slow)
    taken = {fast: 0, slow: 0}
    for turn in range(300):
        node = chosen(nodes, turn=turn, prefill_on_decode="never").prefills[0]
        Charge(node, lambda: NOW_S, prompt_tokens=1000)
        taken[node] += 1
    assert taken[fast] == pytest.approx(200, abs=15), "attention makes up the rest"


# --- decode nodes


@pytest.mark.long
@given(loads=st.lists(st.tuples(st.integers(0, 3), st.booleans()), min_size=1, max_size=6), turn=st.integers(0, 20))
def test_without_a_feed_a_handoff_goes_where_the_fewest_generations_are(
    loads: list[tuple[int, bool]], turn: int
) -> None:
    nodes = table(num_decode=len(loads))
    for node, (count, is_up) in zip(nodes.nodes[2:], loads, strict=True):
        node.reachable = is_up
        Charge(node, lambda: NOW_S, sequences=count)
    if not any(is_up for _, is_up in loads):
        with pytest.raises(NoNode):
            chosen(nodes, turn=turn)
        return
    choice = chosen(nodes, turn=turn)
    best = choice.best(choice.decodes, NOW_S)
    assert best is not None
    assert best.reachable
    assert best.decode_sequences == min(count for count, is_up in loads if is_up)


def test_a_node_without_room_costs_the_wait_for_it() -> None:
    nodes = table(num_decode=3)
    for node in nodes.nodes:
        tell(node)
    slots, memory, free = nodes.nodes[2:]
    tell(slots, num_running=8, num_slots=8)
    tell(memory, num_running=8, free_blocks=10)
    tell(free, num_running=60)
    choice = chosen(nodes)
    assert choice.best(choice.decodes, NOW_S) is free
    tell(free, num_running=64, num_waiting=5)
    tell(slots, num_running=8, num_slots=8, num_waiting=20)
    choice = chosen(nodes)
    assert choice.best(choice.decodes, NOW_S) is memory, "nothing else waits there"
    tell(memory, num_running=8, free_blocks=16)
    assert chosen(nodes).costs.handing_over_s(memory) < 0.2, "1000 tokens fit into 16 blocks of 64"


def test_of_equal_decode_nodes_the_one_that_has_the_prefix_saves_the_transfer() -> None:
    nodes = table()
    for node in nodes.nodes:
        tell(node)
    d0, d1 = nodes.nodes[2:]
    for turn in range(2):
        choice = chosen(nodes, turn=turn, cached={d1: 512})
        assert choice.best(choice.decodes, NOW_S) is d1
    tell(d1, num_running=1)
    choice = chosen(nodes, cached={d1: 512})
    assert choice.best(choice.decodes, NOW_S) is d0, "a stream more costs more than half a millisecond"


# --- prompts that decode nodes read


def test_an_idle_decode_node_helps_a_prefill_node_that_queues() -> None:
    nodes = table(1, 1)
    p, d = nodes.nodes
    learned(p, 25_000.0)
    assert chosen(nodes).reason == "default", "it does not queue"
    p.speed = table(1, 1).nodes[0].speed
    with Charge(p, lambda: NOW_S, prompt_tokens=250_000):
        assert chosen(nodes).reason == "default", "for an unknown time"
    with keep_busy(p, 0.02):
        assert chosen(nodes).reason == "default", "for milliseconds"
    with keep_busy(p, 10.0):
        choice = chosen(nodes)
        assert (choice.text, choice.best([d], NOW_S)) == ("direct; reason=prefill-busy", d)
        assert choice.otherwise is not None
        assert choice.otherwise.text == "p-first; reason=default"
        with Charge(d, lambda: NOW_S, prompt_tokens=250_000):
            assert choice.best([d], NOW_S) is None
            assert chosen(nodes).reason == "default"
        d.reachable = False
        assert choice.best([d], NOW_S) is None
        d.reachable = True
        learned(d, 250.0)
        assert chosen(nodes, 5000).reason == "default", "it is too slow"


def test_an_order_that_is_asked_for_or_demanded_is_kept() -> None:
    nodes = table(1, 1)
    with keep_busy(nodes.nodes[0], 10.0):
        assert chosen(nodes).reason == "prefill-busy"
        assert chosen(nodes, asked=HandoffOrder.P_FIRST).reason == "header"
        several = chosen(nodes, asked=HandoffOrder.P_FIRST, is_several=True)
        assert several.text == "d-first; reason=several-prompts"
        assert chosen(nodes, prefill_on_decode="never").reason == "default"
        assert chosen(nodes, on_prefill_failure="fail").reason == "default"


def test_a_prompt_does_not_wait_for_a_slot_where_it_would_be_read() -> None:
    nodes = table(1, 2)
    p, full, free = nodes.nodes
    full.num_slots = free.num_slots = 8
    Charge(full, lambda: NOW_S, sequences=8)
    Charge(free, lambda: NOW_S, sequences=7, prompt_tokens=750)
    with keep_busy(p, 10.0):
        assert chosen(nodes).best([full], NOW_S) is None
        assert chosen(nodes).best([full, free], NOW_S) is free
        assert chosen(nodes, num_sequences=2).reason == "default"
        free.num_slots = 9
        assert chosen(nodes, num_sequences=2).reason == "prefill-busy"
        free.kv_in_use = FULL_KV
        assert chosen(nodes).reason == "default"


def test_generations_spread_over_those_that_read_about_as_soon() -> None:
    """The fastest by a hair is not given every generation; a node is not preferred because its speed is known."""
    nodes = table(1, 3)
    p, *ds = nodes.nodes
    learned(ds[0], 13_000.0)
    learned(ds[1], 12_500.0)
    with keep_busy(p, 10.0):
        for _ in range(12):  # each has been read before the next comes, and goes on
            node = chosen(nodes, 2500).best(ds, NOW_S)
            assert node is not None
            Charge(node, lambda: NOW_S, sequences=1)
    assert [node.decode_sequences for node in ds] == [4, 4, 4]


@pytest.mark.long
def test_what_the_streams_of_a_decode_node_pay_enters_its_cost() -> None:
    """Without streams D is chosen after a shorter queue at P. 30 streams make a difference of 15% of D's time."""
    nodes = table(1, 1)
    p, d = nodes.nodes

    def queue_s(num_running: int) -> float:
        """The shortest queue at P from which D reads the prompt."""
        tell(d, num_running=num_running, **BESIDE)
        for queued in range(0, 6000, 20):
            tell(p, queued_tokens=queued)
            if chosen(nodes, 2000).reason == "prefill-busy":
                return queued * TOKEN_S
        raise AssertionError

    alone_s, beside_s = queue_s(0), queue_s(30)
    assert beside_s - alone_s == pytest.approx(chosen(nodes, 2000).costs.reading_s(d) * 0.15, rel=0.03)


def test_a_prompt_that_a_decode_node_has_cached_goes_there() -> None:
    nodes = table(1, 1)
    p, d = nodes.nodes
    tell(p)
    tell(d, num_running=4)
    choice = chosen(nodes, 8000, cached={d: 7000})
    assert choice.text == "direct; reason=cached"
    almost = {d: 8000 - LOCAL_TOKENS + 1}
    choice = chosen(nodes, 8000, cached=almost)
    assert (choice.order, choice.reason) == (HandoffOrder.D_FIRST, "cached"), "D's own word decides, and it may ask P"
    assert choice.best(choice.decodes, NOW_S) is d
    assert chosen(nodes, 8000, cached={p: 7000, d: 7000}).order is HandoffOrder.P_FIRST
    assert chosen(nodes, 1000, cached={d: 700}).reason == "default", "it would save less than the doubt"


def test_the_target_decides_where_the_sum_does_not() -> None:
    nodes = table(1, 1)
    p, d = nodes.nodes
    tell(d, num_running=4)
    tell(p, queued_tokens=2300)  # 68 ms with this prompt; D needs 53 ms
    assert chosen(nodes).reason == "default"
    assert chosen(nodes, slo_ttft_ms=60.0).text == "direct; reason=prefill-late"
    assert chosen(nodes, slo_ttft_ms=90.0).reason == "default", "P meets it"
    assert chosen(nodes, slo_ttft_ms=40.0).reason == "default", "D would miss it, too"
    choice = chosen(nodes, slo_ttft_ms=60.0)
    assert choice.best([d], NOW_S) is d, "also when the leg begins"


@pytest.mark.long
@given(
    sizes=st.lists(st.integers(25, 12_500), min_size=1, max_size=60),
    d_share=st.sampled_from([0.0, 0.1, 0.5, 1.0]),
    num_decodes=st.integers(1, 3),
)
@example([10_206, 25, 25, 25, 25, 25, 140, 25, 503, 217, 2693, 495, 27], 0.1, 1)
def test_a_burst_spreads(sizes: list[int], d_share: float, num_decodes: int) -> None:
    """All at once: each is charged where it goes, and none goes where it would wait clearly longer.

    Of what a decode node has to read, a stream that is handed over waits for a share of its own.
    """
    nodes = table(1, num_decodes)
    p, *ds = nodes.nodes
    surely_learned(p, 25_000.0)
    d_speed = 25_000.0 * (d_share or SPEEDS[Role.DECODE])
    for d in ds:
        if d_share:
            surely_learned(d, d_speed)
    for size in sizes:
        choice = chosen(nodes, size)
        node = choice.best(ds, NOW_S) if choice.otherwise else p
        assert node is not None
        p_s = (p.view.queued_tokens + size) / 25_000.0
        if node is not p:
            queued = node.view.queued_tokens
            assert (queued + size) / d_speed < p_s + STREAM_SHARE * queued / d_speed
        Charge(node, lambda: NOW_S, prompt_tokens=size, sequences=node is not p)
    assert p.view.queued_tokens >= sizes[0], "the first one found an empty queue"


# --- without prefill nodes


def test_mixed_nodes_come_before_decode_nodes_and_share_by_what_they_have_to_read() -> None:
    nodes = table(0, 1, 2)
    d, m0, m1 = nodes.nodes
    choice = chosen(nodes)
    assert choice.best(choice.decodes, NOW_S) is m0
    Charge(m0, lambda: NOW_S, prompt_tokens=4000, sequences=1)
    assert choice.best(choice.decodes, NOW_S) is m1
    Charge(m1, lambda: NOW_S, prompt_tokens=6000, sequences=1)
    assert choice.best(choice.decodes, NOW_S) is d
    assert choice.best([m0, m1], NOW_S) is m0


def test_mixed_nodes_take_turns_however_their_few_samples_differ() -> None:
    """Else an idle cluster would send everything to the node that was a little faster."""
    nodes = table(0, 0, 2)
    for node, speed in zip(nodes.nodes, (25_000.0, 24_000.0), strict=True):
        learned(node, speed)
    choices = [chosen(nodes, turn=turn) for turn in range(4)]
    assert [choice.best(choice.decodes, NOW_S) for choice in choices] == [*nodes.nodes] * 2


def test_mixed_nodes_of_a_feed_are_chosen_by_their_caches() -> None:
    nodes = table(0, 1, 2)
    for node in nodes.nodes[1:]:
        tell(node, num_running=3)
    m1 = nodes.nodes[2]
    choice = chosen(nodes, cached={m1: 900})
    assert choice.best(choice.decodes, NOW_S) is m1


# --- the sums


@pytest.mark.long
@given(
    tokens=st.integers(1, 100_000), cached_share=st.floats(0, 1, exclude_max=True), queued=st.integers(0, 100_000),
    own=st.integers(0, 10_000), sequences=st.integers(0, 80),
)  # fmt: skip
def test_more_of_anything_never_costs_less(
    tokens: int, cached_share: float, queued: int, own: int, sequences: int
) -> None:
    (node,) = table(0, 1).nodes
    cached = int(tokens * cached_share)
    facts = PromptFacts(tokens * 4, cached={node: cached})

    def sums(prompt: PromptFacts, **load: int) -> list[float]:
        fields = {"queued_tokens": queued, "num_running": sequences} | load
        tell(node, **(fields | BESIDE))
        costs = Costs(prompt, (node,), NOW_S)
        return [costs.reading_s(node), costs.direct_s(node), costs.handing_over_s(node)]

    with Charge(node, lambda: NOW_S, prompt_tokens=own):
        base = sums(facts)
        assert all(cost > 0 for cost in base)
        more = [
            sums(replace(facts, num_bytes=facts.num_bytes + 400)), sums(facts, queued_tokens=queued + 100),
            sums(facts, num_running=sequences + 1), sums(facts, queued_keys=1000),
            sums(replace(facts, cached={node: max(0, cached - 100)})),
        ]  # fmt: skip
        with Charge(node, lambda: NOW_S, prompt_tokens=100, sequences=1):
            more.append(sums(facts))
    for other in more:
        assert all(one >= two - 1e-12 for one, two in zip(other, base, strict=True))


def test_a_counted_prompt_is_not_estimated_from_its_bytes() -> None:
    """7 bytes a token, as ids have: by the usual ratio both nodes would seem to need 1.75 times as long."""
    nodes = table(1, 1)
    p, d = nodes.nodes
    tell(p)
    tell(d, num_running=1)
    counted, estimated = PromptFacts(7 * 1000, num_tokens=1000), PromptFacts(7 * 1000)
    assert (counted.num_missing(p), estimated.num_missing(p)) == (1000, 1750)
    costs = choose(nodes, "demo", counted, config()).costs
    assert costs.reading_s(p) == pytest.approx(chosen(nodes, 1000).costs.reading_s(p))
    assert costs.direct_s(d) == pytest.approx(chosen(nodes, 1000).costs.direct_s(d))


def test_a_prefill_node_tells_its_pace_while_it_prefills() -> None:
    """Its running sequences are prompts, so no share of a step limits it."""
    nodes = table(1, 1)
    p, _ = nodes.nodes
    tell(p, num_running=1, queued_tokens=2000)
    assert chosen(nodes, 1000).costs.reading_s(p) == pytest.approx(3000 * TOKEN_S + 1000**2 / 2 * KEY_S)
