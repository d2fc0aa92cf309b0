"""The prefix index beside a real prefix cache, over connections that lose, repeat and reorder messages."""

from __future__ import annotations

import functools
import json
import random
from collections import deque
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import TYPE_CHECKING, cast

import pytest

from pd_cluster.scheduling.prefix_cache import PrefixCache
from pd_connectors.protocol.feed import DEVICE, HOST, FeedDelta, FeedMessage, FeedSnapshot, NodeLoad, StoredBlock
from pd_connectors.protocol.text_chain import AS_ALWAYS, LastTurn
from pd_router.calls.body import RequestBody
from pd_router.nodes import prefix_index
from pd_router.nodes.adapter_table import AdapterTable
from pd_router.nodes.answer_lengths import AnswerLengths
from pd_router.nodes.node import Node, Role
from pd_router.nodes.node_feed import FeedLost, NodeFeed
from pd_router.nodes.prefix_index import PrefixIndex
from pd_router.policy.prompt_facts import prompt_facts

if TYPE_CHECKING:
    from pd_router.nodes.node_table import NodeTable

Truth = dict[str, tuple[int, int]]  # prompt -> tokens that the caches have, and those of them on the device
BLOCK_TOKENS = 16
NUM_BLOCKS = 12  # of a node: fewer than the prompts have, so that it evicts
# Prompts as documents that branch: the words of one prompt are its blocks.
PROMPTS = [first + second + third for first in ("ab", "cd") for second in ("", "ef", "g") for third in ("h", "ijk")]


def prefixes(prompt: str) -> list[str]:
    return [prompt[: n + 1] for n in range(len(prompt))]


@functools.cache
def name_of(prefix: str, what: str) -> int:
    return random.Random(f"{what} {prefix}").getrandbits(64)


@functools.cache
def chain(prompt: str) -> list[int]:
    """Two steps of text for a block, so that every other step has no block."""
    return [name_of(prefix, f"step{half}") for prefix in prefixes(prompt) for half in (0, 1)]


@dataclass
class SimulatedNode:
    """A node with a real prefix cache, a tier below it, and the messages of its feed."""

    seed: int
    num_below: int = 0  # blocks of the lower tier
    cache: PrefixCache = field(default_factory=PrefixCache)
    free: list[int] = field(default_factory=lambda: list(range(NUM_BLOCKS)))
    stored: dict[int, str] = field(default_factory=dict)  # block of the cache -> its prefix
    below: dict[str, None] = field(default_factory=dict)  # prefixes
    epoch: int = 0
    number: int = 0

    def snapshot(self) -> FeedSnapshot:
        self.number += 1
        stored = (*map(self._name, self.stored.values()), *(self._name(prefix, HOST) for prefix in self.below))
        return FeedSnapshot(self.epoch, self.number, NodeLoad(), stored)

    def restart(self) -> None:
        self.cache, self.free, self.stored, self.below = PrefixCache(), list(range(NUM_BLOCKS)), {}, {}
        self.epoch += 1

    def compute(self, prompt: str) -> FeedDelta:
        """Compute a prompt, and load what lies below: what it evicts, stores and moves."""
        held = self.cache.match(prefix.encode() for prefix in prefixes(prompt))
        for block in held:
            self.cache.take_up(block)
        evicted, stored, moved = [], [], {}
        for prefix in prefixes(prompt)[len(held) :]:
            if not self.free:
                gone, _ = self.cache.evict()
                prefix_gone = self.stored.pop(gone)
                self.free.append(gone)
                if len(self.below) < self.num_below:
                    self.below[prefix_gone] = None
                    moved[name_of(prefix_gone, "block")] = HOST
                else:  # the lower tier's hits on it end too
                    for one in (prefix_gone, *filter(lambda one: one.startswith(prefix_gone), tuple(self.below))):
                        self.below.pop(one, None)
                        moved.pop(name_of(one, "block"), None)
                        evicted.append(name_of(one, "block"))
            block = self.free.pop()
            self.cache.insert(prefix.encode(), block, held[-1] if held else None)
            self.stored[block] = prefix
            if prefix in self.below:
                del self.below[prefix]
                moved[name_of(prefix, "block")] = DEVICE
            else:
                stored.append(self._name(prefix))
            held.append(block)
        for block in reversed(held):
            self.cache.let_go(block)
        self.number += 1
        return FeedDelta(self.number, NodeLoad(), tuple(evicted), tuple(stored), moved=tuple(moved.items()))

    def truth(self) -> Truth:
        found = {}
        for prompt in PROMPTS:
            on_device = len(self.cache.match(prefix.encode() for prefix in prefixes(prompt)))
            num_blocks = on_device
            while prefixes(prompt)[num_blocks : num_blocks + 1] and prefixes(prompt)[num_blocks] in self.below:
                num_blocks += 1
            if num_blocks:
                found[prompt] = num_blocks * BLOCK_TOKENS, on_device * BLOCK_TOKENS
        return found

    def _name(self, prefix: str, tier: int = DEVICE) -> StoredBlock:
        return StoredBlock(name_of(prefix, "block"), name_of(prefix, "step1"), len(prefix) * BLOCK_TOKENS, tier)


def a_node(name: str) -> Node:
    return Node(url=name, role=Role.PREFILL, node_id=name)


def told(index: PrefixIndex[Node], node: Node) -> Truth:
    hits = {prompt: index.hits(chain(prompt)) for prompt in PROMPTS}
    ready = {prompt: index.hits_on_device(chain(prompt)) for prompt in PROMPTS}
    return {prompt: (found[node], ready[prompt].get(node, 0)) for prompt, found in hits.items() if node in found}


def apply(feed: NodeFeed, message: FeedMessage) -> None:
    for _ in feed.apply(message):
        pass


@pytest.mark.long_cases
@pytest.mark.parametrize("seed", range(10))
def test_the_index_knows_what_the_caches_held_at_the_last_message(seed: int) -> None:
    """Whatever the connections do; and after the next snapshot it equals the caches again."""
    draw = random.Random(seed)
    index: PrefixIndex[Node] = PrefixIndex()
    nodes = [a_node(str(n)) for n in range(3)]
    sims = [SimulatedNode(seed, num_below) for num_below in (0, 4, 12)]
    feeds = [NodeFeed(index, node) for node in nodes]
    wires: list[deque[tuple[FeedMessage, Truth]]] = [deque([(s.snapshot(), s.truth())]) for s in sims]
    known: list[Truth] = [{} for _ in nodes]  # at the last message that was taken
    num_lost = num_hits = num_below = 0
    for _ in range(400):
        at = draw.randrange(len(nodes))
        sim, wire = sims[at], wires[at]
        event = draw.choices(
            ("compute", "deliver", "lose", "repeat", "swap", "restart", "cut"), (30, 40, 2, 2, 2, 1, 1)
        )[0]
        if event == "compute":
            wire.append((sim.compute(draw.choice(PROMPTS)), sim.truth()))
        elif event == "lose" and wire:
            wire.popleft()
        elif event == "repeat" and wire:
            wire.appendleft(wire[0])
        elif event == "swap" and len(wire) > 1:
            wire[0], wire[1] = wire[1], wire[0]
        elif event in ("restart", "cut"):
            if event == "restart":
                sim.restart()
            feeds[at].begin()
            wires[at] = deque([(sim.snapshot(), sim.truth())])
        elif event == "deliver" and wire:
            message, truth = wire.popleft()
            try:
                apply(feeds[at], message)
            except FeedLost:
                num_lost += 1
                feeds[at].begin()
                wires[at] = deque([(sim.snapshot(), sim.truth())])
            else:
                known[at] = truth
        assert told(index, nodes[at]) == known[at]
        num_hits += len(known[at])
        num_below += sum(num_tokens > on_device for num_tokens, on_device in known[at].values())
    for node, sim, feed in zip(nodes, sims, feeds, strict=True):
        feed.begin()
        apply(feed, sim.snapshot())
        assert told(index, node) == sim.truth()
    assert num_lost
    assert num_hits
    assert num_below
    for node in nodes:
        index.forget(node)
    while index.sweep(3):
        assert not any(told(index, node) for node in nodes), "forgotten at once"
    assert len(index) == 0, "nothing is left of nodes that are gone"
    assert index.num_lower == 0


def test_all_nodes_are_found_by_one_look_up() -> None:
    """Each node has another length of the prompt. Nodes that have nothing are absent."""
    index: PrefixIndex[Node] = PrefixIndex()
    nodes = [a_node(str(n)) for n in range(70)]
    steps = [name_of("x" * n, "step") for n in range(len(nodes))]
    for n, node in enumerate(nodes):
        index.store(node, [StoredBlock(name_of("x" * i, "block"), steps[i], 16 * (i + 1)) for i in range(n)])
    expected = {node: 16 * n for n, node in enumerate(nodes) if n}
    assert index.hits(steps) == expected
    assert index.hits(steps[:10]) == {node: min(160, length) for node, length in expected.items()}
    assert index.hits([1, 2, 3]) == {}
    index.forget(nodes[4])
    assert index.hits(steps) == (
        expected := {node: length for node, length in expected.items() if node is not nodes[4]}
    )
    early, late = a_node("early"), a_node("late")
    index.store(early, [StoredBlock(5, steps[5], 96)])  # before the memory of the one that is gone is free
    assert index.hits(steps) == {**expected, early: 96}
    assert index.sweep(3), "it has four blocks"
    assert index.hits(steps) == {**expected, early: 96}
    assert not index.sweep(3)
    index.store(late, [StoredBlock(5, steps[6], 112)])  # takes over its bit
    assert index.hits(steps) == {**expected, early: 96, late: 112}


def test_two_blocks_of_a_node_may_end_at_one_place() -> None:
    """Tokens may differ where the text does not, as when two tokenizations are stored. The last to go ends the hit."""
    index: PrefixIndex[Node] = PrefixIndex()
    one, other = a_node("one"), a_node("other")
    index.store(one, [StoredBlock(block, 50, 16) for block in (1, 2, 3)])
    index.store(other, [StoredBlock(1, 50, 16)])
    for block in (1, 3):
        index.evict(one, [block, block, 99])
        assert index.hits([50]) == {one: 16, other: 16}
    index.evict(one, [2])
    assert index.hits([50]) == {other: 16}
    index.store(other, [StoredBlock(1, 51, 32)])  # named again, elsewhere
    assert index.hits([50, 51]) == {other: 32}
    assert index.hits([50]) == {}


def test_a_prompt_is_looked_up_as_each_kind_of_chat_template_names_it() -> None:
    """Nodes of several models, or of two releases."""
    index: PrefixIndex[Node] = PrefixIndex()
    table = cast("NodeTable", SimpleNamespace(prefixes=index, answers=AnswerLengths(), adapters=AdapterTable()))
    messages = [{"role": "user", "content": "q" * 600}, {"role": "assistant", "content": "a" * 600}]
    body = RequestBody(json.dumps({"messages": messages}).encode())
    kinds = {a_node("always"): AS_ALWAYS, a_node("by turn"): LastTurn(answers=True)}
    chains = {node: body.text_chain(b"key", last_turn) for node, last_turn in kinds.items()}
    for node, last_turn in kinds.items():
        stored = (StoredBlock(1, chains[node][0], 64), StoredBlock(2, chains[node][-1], 160))
        apply(NodeFeed(index, node), FeedSnapshot(1, 1, NodeLoad(), stored, last_turn=last_turn))
    first, second = kinds
    assert chains[first] != chains[second]
    assert prompt_facts(body, table, b"key").cached == dict.fromkeys(kinds, 160)
    index.forget(first)
    assert index.last_turns == {LastTurn(answers=True)}
    apply(NodeFeed(index, second), FeedSnapshot(1, 2, NodeLoad(), stored, last_turn=LastTurn(answers=True)))
    assert index.last_turns == {LastTurn(answers=True)}
    assert prompt_facts(body, table, b"key").cached == {second: 160}


def test_a_node_cannot_take_more_memory_than_its_share(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prefix_index, "MAX_BLOCKS", 100)
    index: PrefixIndex[Node] = PrefixIndex()
    node = a_node("hostile")
    index.store(node, (StoredBlock(n, n, 16) for n in range(1000)))
    assert index.num_blocks(node) == 100
    index.evict(node, range(50))
    index.store(node, [StoredBlock(2000, 2000, 16)])
    assert index.hits([2000]) == {node: 16}
    assert index.num_blocks(node) == 51


@pytest.mark.parametrize(
    "load",
    [
        NodeLoad(queued_tokens=-1), NodeLoad(step_s=float("nan")), NodeLoad(key_s=1e999),
        NodeLoad(token_s=5e-324),  # of which the inverse is infinite: a division by zero in every choice
    ],
)  # fmt: skip
def test_a_load_that_no_node_has_is_refused(load: NodeLoad) -> None:
    node = a_node("wrong")
    feed = NodeFeed(PrefixIndex(), node)
    with pytest.raises(FeedLost, match=r"negative or not finite|no node computes"):
        apply(feed, FeedSnapshot(1, 1, load))
    assert node.view.load is None
