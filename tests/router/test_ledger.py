"""A router's charges beside the load that the node tells: every request is counted once, whatever comes in between."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest
from msgspec.structs import replace

from pd_connectors.protocol.feed import FeedDelta, FeedMessage, FeedSnapshot, NodeLoad
from pd_router.config import HandoffOrder, RouterConfig
from pd_router.nodes.ledger import NodeWork
from pd_router.nodes.node import Node, Role
from pd_router.nodes.node_feed import NodeFeed
from pd_router.nodes.node_table import NodeTable
from pd_router.nodes.prefix_index import PrefixIndex
from pd_router.policy.charge import Charge, charge_for
from pd_router.policy.cost import Costs
from pd_router.policy.prompt_facts import PromptFacts
from pd_router.policy.route import Route

SIZES = (1, 10)  # prompt tokens of the two requests: the digits of a sum say which are counted, and how often


@dataclass
class World:
    """Two requests of a router at one node, and the feed between."""

    node: Node = field(default_factory=lambda: Node(url="", role=Role.PREFILL, node_id="p"))
    charges: list[Charge | None] = field(default_factory=lambda: [None, None])
    phases: list[str] = field(default_factory=lambda: ["new", "new"])  # new | sent | accepted | over | ended
    wire: list[FeedMessage] | None = None  # None: not connected
    number: int = 0
    epoch: int = 0
    num_cuts: int = 0
    num_restarts: int = 0

    def __post_init__(self) -> None:
        self.feed = NodeFeed(PrefixIndex(), self.node)

    def load(self) -> NodeLoad:
        queued = sum(size for size, phase in zip(SIZES, self.phases, strict=True) if phase == "accepted")
        return NodeLoad(queued_tokens=queued, num_waiting=self.phases.count("accepted"))

    def tell(self, *charges: int) -> None:
        if self.wire is not None:
            self.number += 1
            self.wire.append(FeedDelta(self.number, self.load(), charges=charges))

    # --- events: each method is one, its name and arguments are its name in a path

    def send(self, at: int) -> None:
        self.charges[at] = Charge(self.node, lambda: 0.0, prompt_tokens=SIZES[at], sequences=1)
        self.phases[at] = "sent"

    def accept(self, at: int) -> None:
        self.phases[at] = "accepted"
        self.tell(self.number_of(at))

    def refuse(self, at: int) -> None:
        self.phases[at] = "over"
        self.tell(self.number_of(at))

    def finish(self, at: int) -> None:
        self.phases[at] = "over"
        self.tell()

    def end(self, at: int) -> None:
        """The router's leg ends."""
        charge = self.charges[at]
        assert charge is not None
        charge.release()
        self.phases[at] = "ended"

    def deliver(self) -> None:
        assert self.wire is not None
        for _ in self.feed.apply(self.wire.pop(0)):
            pass

    def connect(self) -> None:
        self.number += 1
        live = tuple(self.number_of(at) for at in range(2) if self.phases[at] == "accepted")
        self.wire = [FeedSnapshot(self.epoch, self.number, self.load(), charges=live)]
        self.feed.begin()

    def cut(self) -> None:
        self.wire = None
        self.num_cuts += 1

    def forget(self) -> None:
        self.feed.forget()

    def restart(self) -> None:
        self.wire = None
        self.epoch += 1
        self.num_restarts += 1
        self.phases = ["over" if phase == "accepted" else phase for phase in self.phases]

    # --- what may happen, and what must hold

    def number_of(self, at: int) -> int:
        charge = self.charges[at]
        assert charge is not None
        return charge.number

    def events(self) -> list[tuple[str, tuple[int, ...]]]:
        after = {"new": ["send"], "sent": ["accept", "refuse"], "accepted": ["finish"], "over": ["end"]}
        found: list[tuple[str, tuple[int, ...]]] = []
        found += [(name, (at,)) for at in range(2) for name in after.get(self.phases[at], ())]
        if self.phases[0] == "new":  # the requests are alike: the first is sent first
            found.remove(("send", (1,)))
        if self.wire:
            found.append(("deliver", ()))
        if self.wire is None:
            found.append(("connect", ()))
            if self.node.view.load is not None:
                found.append(("forget", ()))
        elif not self.num_cuts:
            found.append(("cut", ()))
        if not self.num_restarts:
            found.append(("restart", ()))
        return found

    def key(self) -> object:
        """Equal for worlds with the same future."""
        view = self.node.view
        messages = [(type(m), m.load, m.charges) for m in self.wire] if self.wire is not None else None
        numbers = [charge and charge.number for charge in self.charges]
        own = (view.ledger.own_tokens, view.ledger.own_sequences, view.load)
        return repr((self.phases, numbers, messages, own, self.epoch, self.num_cuts, self.num_restarts))

    def check(self) -> None:
        view = self.node.view
        for digit, phase in ((view.queued_tokens % 10, self.phases[0]), (view.queued_tokens // 10, self.phases[1])):
            if phase in ("sent", "accepted"):
                assert digit == 1, "a request is counted once while it is under way"
            elif phase == "new":
                assert digit == 0
            else:  # over on the node: the router may have to hear of it
                assert digit in (0, 1)
        assert view.num_sequences == sum(map(int, str(view.queued_tokens))), "generations are counted alike"


@pytest.mark.long
def test_every_interleaving_of_two_requests_and_a_feed_counts_each_once() -> None:
    """All worlds that two requests, cuts of the feed and a restart of the node can lead to."""
    seen: set[object] = set()
    paths: list[tuple[tuple[str, tuple[int, ...]], ...]] = [()]
    num_quiet = 0
    while paths:
        path = paths.pop()
        world = World()
        for name, args in path:
            getattr(world, name)(*args)
        world.check()
        if (key := world.key()) in seen:
            continue
        seen.add(key)
        if world.phases == ["ended", "ended"] and world.wire == [] and world.node.view.load is not None:
            assert (world.node.view.queued_tokens, world.node.view.num_sequences) == (0, 0)
            num_quiet += 1
        paths += [(*path, event) for event in world.events()]
    assert num_quiet == 4, "with and without a cut, with and without a restart"
    assert len(seen) > 1000, len(seen)


def test_a_prompt_that_is_computed_before_its_number_comes_leaves_the_queue() -> None:
    node = Node(url="", role=Role.MIXED, node_id="m")
    charge = Charge(node, lambda: 0.0, prompt_tokens=100, cached_tokens=20, sequences=2)
    assert (node.view.ledger.own_tokens, node.view.ledger.own_keys, node.view.ledger.own_sequences) == (
        100,
        100 * 20 + 5000,
        2,
    )
    charge.prefill_over()
    assert (node.view.ledger.own_tokens, node.view.ledger.own_keys, node.view.ledger.own_sequences) == (0, 0, 2)
    node.view.receive(NodeLoad(num_running=2), [charge.number])
    assert node.view.num_sequences == 2
    node.view.forget()
    assert node.view.num_sequences == 2
    charge.release()
    charge.release()
    assert node.view.num_sequences == 0


def test_figures_are_made_when_something_has_changed() -> None:
    """A message with cached blocks alone, and a node without charges of this router, cost no sums."""
    view = Node(url="", role=Role.PREFILL, node_id="p").view
    view.receive(NodeLoad(num_running=3), ())
    told = view.ledger.reported
    assert view.ledger.total is told
    view.receive(NodeLoad(num_running=3), ())
    assert view.ledger.reported is told
    entry = view.ledger.open(NodeWork(tokens=10, sequences=1))
    view.receive(NodeLoad(num_running=3), ())
    assert view.num_sequences == 4
    view.receive(NodeLoad(num_running=3), [entry.number])
    assert view.num_sequences == 3, "the same load, which includes the charge"
    view.forget()
    view.receive(NodeLoad(num_running=3), ())
    assert view.num_sequences == 4, "a boot that knows nothing of it"


def test_the_context_of_a_charge_is_corrected_and_bounded_by_what_its_node_takes() -> None:
    table = NodeTable(RouterConfig(decode=("http://d",), prefill=("http://p",)), lambda: 0.0)
    p, d = table.nodes
    table.set_length(d, 8192)
    prompt = PromptFacts(40_000_000, num_sequences=2)
    route = Route(HandoffOrder.P_FIRST, "default", prompt, (p,), (d,))
    with charge_for(route, d, table.clock, reads=False, generates=True) as charge:
        assert d.view.ledger.own_context == 2 * 8192, "megabytes may be in fields that no node reads"
        charge.count_prompt(100)
        assert (d.view.ledger.own_context, d.view.ledger.own_tokens) == (200, 0)
        charge.count_prompt(20_000)
        assert d.view.ledger.own_context == 2 * 8192
    assert d.view.ledger.own_context == 0
    costs = [Costs(replace(prompt, num_bytes=num), (p,), 0.0, (d,)).handing_over_s(d) for num in (32_768, 40_000_000)]
    assert costs[0] == costs[1]


def test_a_charge_counts_the_prompt_by_its_bytes_until_its_tokens_are_known() -> None:
    """And teaches the nodes with the same models, of which a decode node is told by no ticket."""
    table = NodeTable(RouterConfig(prefill=("http://p",), decode=("http://d",), mixed=("http://other",)), lambda: 0.0)
    p, d, other = table.nodes
    table.set_models(p, frozenset({"a"}))
    table.set_models(d, frozenset({"a"}))
    table.set_models(other, frozenset({"b"}))
    with Charge(p, table.clock, prefill_bytes=40_000) as charge:
        assert p.view.ledger.own_tokens == 10_000
        charge.count_prompt(20_000)
        assert (p.view.ledger.own_tokens, p.view.ledger.own_keys) == (20_000, 20_000 * 10_000)
        charge.count_prompt(90_000)  # more than bytes: no text
    assert 0.45 < d.view.ratio.value == p.view.ratio.value < 0.5
    assert other.view.ratio.value == 0.25
    with Charge(p, table.clock, prefill_bytes=100, prompt_tokens=100, cached_tokens=60) as charge:
        charge.count_prompt(100)
        assert p.view.ledger.own_tokens == 40
    for _ in range(100):
        d.view.ratio.note(10_000, 100_000)
    assert 0.099 < d.view.ratio.value < 0.101, "the newest megabyte decides"
    d.view.ratio.note(10, 60_000_000)
    assert d.view.ratio.value > 0.099, "a stranger's body of fields that no node reads teaches nothing"
