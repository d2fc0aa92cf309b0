"""Simulated routers: the product's own choice over its own table, and the baselines that it is measured against."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from pd_router.config import HandoffOrder, RouterConfig
from pd_router.nodes.node_table import NodeTable
from pd_router.nodes.prefix_index import PrefixIndex
from pd_router.nodes.speed import ReadingSpeed
from pd_router.policy.candidates import to_generate
from pd_router.policy.charge import Charge
from pd_router.policy.cost_policy import CostPolicy
from pd_router.policy.prompt_facts import PromptFacts

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from benchmarks.routing_simulation.nodes import SimNode
    from benchmarks.routing_simulation.scheduled_node import ScheduledNode
    from benchmarks.routing_simulation.trace import SimRequest
    from pd_connectors.protocol.feed import NodeLoad, StoredBlock
    from pd_router.nodes.node import Node

BYTES_PER_TOKEN = 4
# The rule before the feed, as it was at 4a06a6b: fewest outstanding prompt bytes; a decode node that is sooner by this.
MARGIN, SLACK_S, D_GUESS = 0.25, 0.03, 0.5


class Booking(Protocol):
    """What a router has booked on a node for one leg."""

    @property
    def number(self) -> int:
        """By which the feed names it; 0: the node need not name it."""

    def prefill_done(self) -> None: ...
    def release(self) -> None: ...


@dataclass(frozen=True, slots=True)
class SimRoute:
    """Numbers of nodes: prefill nodes come first. `prefill` None: `decode` reads the prompt itself."""

    prefill: int | None
    decode: Callable[[], tuple[int, Booking]]  # chosen when the ticket is there
    booking: Booking | None  # of the prefill node's leg
    predicted_s: float | None = None  # until the first token
    text: str = ""  # as x-pd-route tells it


class SimRouter(Protocol):
    def route(self, arrival: SimRequest) -> SimRoute:
        """Choose, and book the first leg."""

    def receive(
        self, number: int, load: NodeLoad, stored: Sequence[StoredBlock], evicted: Sequence[int], charges: Sequence[int]
    ) -> None:
        """Take a message of a node's feed."""


class CostRouter:
    """The product's table, index, ledger and choice. `decode_reads`: whether decode nodes may read prompts."""

    def __init__(
        self, num_prefill: int, num_decode: int, clock: Callable[[], float], *, decode_reads: bool = True,
        prefill_decodes: bool = False, turn: int = 0,
    ) -> None:  # fmt: skip
        self.config = RouterConfig(
            prefill=tuple(f"http://p{number}:1" for number in range(num_prefill)),
            decode=tuple(f"http://d{number}:1" for number in range(num_decode)),
            prefill_on_decode="auto" if decode_reads else "never",
            decode_on_prefill="auto" if prefill_decodes else "never",
        )
        self.table = NodeTable(self.config, clock)
        self.index: PrefixIndex[Node] = PrefixIndex()
        self._policy = CostPolicy(self.config)
        self.most_output = 512.0
        self._turn = turn
        self._numbers = {node: number for number, node in enumerate(self.table.nodes)}
        for node in self.table.nodes:
            node.reachable = True

    def route(self, arrival: SimRequest) -> SimRoute:
        self._turn += 1
        facts = PromptFacts(
            arrival.num_tokens * BYTES_PER_TOKEN, cached=self.cached(arrival), most_output=self.most_output
        )
        clock = self.table.clock
        candidates = to_generate(self.table, None, facts, self.config, self._turn)
        choice = self._policy.choose(facts, candidates, clock())
        text = f"{choice.order.value}; reason={choice.reason}"

        def book(node: Node, *, reads: bool) -> Charge:
            tokens = facts.num_missing(node) if reads else 0
            cached, context = facts.num_cached(node), arrival.num_tokens
            return Charge(node, clock, prompt_tokens=tokens, cached_tokens=cached, sequences=1, context=context)

        if choice.order is HandoffOrder.DIRECT:
            direct = choice.best(choice.decodes, clock())
            assert direct is not None
            predicted_s = choice.predicted_s(direct, clock())
            number, booking = self._numbers[direct], book(direct, reads=True)
            return SimRoute(None, lambda: (number, booking), None, predicted_s, text)
        first = choice.prefills[0]
        predicted_s = choice.predicted_s(first, clock())

        def decode() -> tuple[int, Booking]:
            node = choice.best(choice.decodes, clock())
            assert node is not None
            return self._numbers[node], book(node, reads=False)

        work = facts.work(first)
        charge = Charge(first, clock, prompt_tokens=work.tokens, cached_tokens=work.cached_tokens)
        return SimRoute(self._numbers[first], decode, charge, predicted_s, text)

    def cached(self, arrival: SimRequest) -> dict[Node, int]:
        return self.index.hits(arrival.blocks)

    def receive(
        self, number: int, load: NodeLoad, stored: Sequence[StoredBlock], evicted: Sequence[int],
        charges: Sequence[int],
    ) -> None:  # fmt: skip
        node = self.table.nodes[number]
        if evicted:
            self.index.evict(node, evicted)
        if stored:
            self.index.store(node, stored)
        node.view.receive(load, charges)


class OracleRouter(CostRouter):
    """The same choice, knowing all loads and caches at the moment of the choice: the bound, with pooled caches."""

    def __init__(
        self, nodes: Sequence[SimNode], num_prefill: int, clock: Callable[[], float], *, decode_reads: bool
    ) -> None:
        super().__init__(num_prefill, len(nodes) - num_prefill, clock, decode_reads=decode_reads)
        self._sim = nodes

    def route(self, arrival: SimRequest) -> SimRoute:
        for node, sim in zip(self.table.nodes, self._sim, strict=True):
            node.view.receive(sim.load, list(node.view.ledger._entries))
        return super().route(arrival)

    def cached(self, arrival: SimRequest) -> dict[Node, int]:
        hits = {node: sim.cache.match(arrival.blocks) for node, sim in zip(self.table.nodes, self._sim, strict=True)}
        return {node: hit for node, hit in hits.items() if hit}

    def receive(
        self, number: int, load: NodeLoad, stored: Sequence[StoredBlock], evicted: Sequence[int],
        charges: Sequence[int],
    ) -> None:  # fmt: skip
        """It needs no feed."""


class LookingRouter(CostRouter):
    """The same choice, which knows the caches of scheduled nodes at the moment of the choice, and their loads late."""

    def __init__(self, nodes: Sequence[ScheduledNode], num_prefill: int, clock: Callable[[], float], turn: int) -> None:
        super().__init__(num_prefill, len(nodes) - num_prefill, clock, prefill_decodes=True, turn=turn)
        self._looked = nodes

    def cached(self, arrival: SimRequest) -> dict[Node, int]:
        pairs = zip(self.table.nodes, self._looked, strict=True)
        return {node: hit for node, looked in pairs if (hit := looked.num_cached(arrival))}


@dataclass(slots=True, eq=False)
class OldNode:
    """What a router knew of a node before the feed: its own charges."""

    speed: ReadingSpeed
    prefill_bytes: int = 0
    sequences: int = 0


class OldBooking:
    def __init__(self, node: OldNode, clock: Callable[[], float], num_bytes: int, sequences: int) -> None:
        node.prefill_bytes += num_bytes
        node.sequences += sequences
        self.number = 0
        self._node, self._clock, self._begun_s = node, clock, clock()
        self._num_bytes, self._sequences = num_bytes, sequences

    def prefill_done(self) -> None:
        if self._num_bytes:
            self._node.speed.note(self._num_bytes, self._begun_s, self._clock())
        self._node.prefill_bytes -= self._num_bytes
        self._num_bytes = 0

    def release(self) -> None:
        self._node.prefill_bytes -= self._num_bytes
        self._node.sequences -= self._sequences
        self._num_bytes = self._sequences = 0


class LeastLoadedRouter:
    """The rule before the feed. `in_turn`: round-robin instead, and decode nodes read nothing."""

    def __init__(
        self, num_prefill: int, num_decode: int, clock: Callable[[], float], *, in_turn: bool = False,
        decode_reads: bool = True, turn: int = 0,
    ) -> None:  # fmt: skip
        self._nodes = [OldNode(ReadingSpeed()) for _ in range(num_prefill + num_decode)]
        self._num_prefill = num_prefill
        self._clock = clock
        self._in_turn = in_turn
        self._decode_reads = decode_reads and not in_turn
        self._turn = turn

    def route(self, arrival: SimRequest) -> SimRoute:
        self._turn += 1
        num_bytes = arrival.num_tokens * BYTES_PER_TOKEN
        prefills = self._rotated(self._nodes[: self._num_prefill])
        first = prefills[0] if self._in_turn else min(prefills, key=lambda node: node.prefill_bytes)
        turn = self._turn
        direct = self._sooner(first, num_bytes) if self._decode_reads else None
        if direct is not None:
            number, booking = self._nodes.index(direct), OldBooking(direct, self._clock, num_bytes, 1)
            return SimRoute(None, lambda: (number, booking), None)

        def decode() -> tuple[int, Booking]:
            decodes = self._rotated(self._nodes[self._num_prefill :], turn)
            node = decodes[0] if self._in_turn else min(decodes, key=lambda one: (one.sequences, one.prefill_bytes))
            return self._nodes.index(node), OldBooking(node, self._clock, 0, 1)

        return SimRoute(self._nodes.index(first), decode, OldBooking(first, self._clock, num_bytes, 0))

    def receive(
        self, number: int, load: NodeLoad, stored: Sequence[StoredBlock], evicted: Sequence[int],
        charges: Sequence[int],
    ) -> None:  # fmt: skip
        """It knows its own charges only."""

    def _rotated(self, nodes: list[OldNode], turn: int | None = None) -> list[OldNode]:
        start = (self._turn if turn is None else turn) % len(nodes)
        return nodes[start:] + nodes[:start]

    def _sooner(self, first: OldNode, num_bytes: int) -> OldNode | None:
        now_s = self._clock()
        speeds = [node.speed.at(now_s) for node in self._nodes[: self._num_prefill]]
        usual = max((speed for speed in speeds if speed is not None), default=None)
        if usual is None or not first.prefill_bytes:
            return None

        def wait_s(node: OldNode, guess: float) -> float:
            speed = node.speed.at(now_s, guess=guess * usual)
            assert speed is not None
            return (node.prefill_bytes + num_bytes) / speed

        def is_clearly_less(short_s: float, long_s: float) -> bool:
            return long_s - short_s > max(SLACK_S, MARGIN * short_s)

        first_s = wait_s(first, 1.0)
        waits = {node: wait_s(node, D_GUESS) for node in self._rotated(self._nodes[self._num_prefill :])}
        sooner = [node for node, long in waits.items() if is_clearly_less(long, first_s)]
        if not sooner:
            return None
        best_s = min(waits[node] for node in sooner)
        equals = [node for node in sooner if not is_clearly_less(best_s, waits[node])]
        return min(equals, key=lambda node: (node.sequences, waits[node]))
