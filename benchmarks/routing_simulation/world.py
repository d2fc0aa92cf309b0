"""One run: arrivals, routers, feeds with their delay, and nodes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from benchmarks.routing_simulation.nodes import LruBlocks, Prompt, SimNode
from benchmarks.routing_simulation.routers import CostRouter, LeastLoadedRouter, OracleRouter
from pd_cluster.planning.event_queue import EventQueue

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from random import Random

    from benchmarks.routing_simulation.routers import Booking, SimRoute, SimRouter
    from benchmarks.routing_simulation.trace import SimRequest

POLICIES = ("cost", "least-loaded", "round-robin", "bound")
LINK_S = 0.001  # router to node, one way
PAUSE_S = 0.005  # between two messages of a feed
PROGRESS_S = 0.05  # a busy node tells at least so often how far it is
HANDOVER_S = 0.004  # from P's first token to the client's


@dataclass(frozen=True, slots=True, kw_only=True)
class Cluster:
    """What is simulated. `num_blocks`: of each node's prefix cache."""

    num_prefill: int
    num_decode: int  # or mixed ones, where there is no prefill node
    num_routers: int = 1
    num_blocks: int = 5000
    policy: str = "cost"
    shortest_first: bool = True
    decode_reads: bool = True


@dataclass(frozen=True, slots=True)
class SimAnswer:
    """What its client saw of a request."""

    times_s: Sequence[float]  # of its tokens
    route: SimRoute
    num_cached: int


@dataclass(frozen=True, slots=True)
class Outcome:
    """Seconds until the first token of each request, and the share of prompt tokens that were cached."""

    ttft_s: tuple[float, ...]
    hit_share: float
    direct_share: float  # of the requests
    ratios: dict[str, list[float]]  # of these seconds and the predicted ones, by route

    @property
    def mean_s(self) -> float:
        return sum(self.ttft_s) / len(self.ttft_s)

    def percentile_s(self, share: float) -> float:
        ranked = sorted(self.ttft_s)
        return ranked[min(len(ranked) - 1, int(share * len(ranked)))]


class SimWorld:
    """Runs one trace through one cluster."""

    def __init__(
        self, cluster: Cluster, arrivals: Sequence[SimRequest], random: Random, events: EventQueue | None = None
    ) -> None:
        self.cluster = cluster
        self.events = EventQueue() if events is None else events
        self._arrivals = arrivals
        self._ttft_s: list[float] = []
        self._num_direct = 0
        self._ratios: dict[str, list[float]] = {}
        self.nodes: list[SimNode] = []
        for number in range(cluster.num_prefill + cluster.num_decode):
            self.nodes.append(self._make_node(number))
        self.routers = [self._make_router(random.randrange(1 << 16)) for _ in range(cluster.num_routers)]
        self._is_telling = [False] * len(self.nodes)
        self._told_s = [-PAUSE_S] * len(self.nodes)
        self._charges: list[list[list[int]]] = [[[] for _ in self.nodes] for _ in self.routers]
        for arrival in arrivals:
            router = random.randrange(len(self.routers))
            self.events.at(arrival.at_s, lambda arrival=arrival, router=router: self._arrive(arrival, router))  # type: ignore[misc]

    def run(self) -> Outcome:
        for number in range(len(self.nodes)):
            self._tell(number)
        self.events.run(lambda: len(self._ttft_s) == len(self._arrivals))
        hits = sum(node.hit_tokens for node in self.nodes)
        computed = sum(node.computed_tokens for node in self.nodes)
        direct = self._num_direct / len(self._arrivals)
        return Outcome(tuple(self._ttft_s), hits / (hits + computed), direct, self._ratios)

    def _make_node(self, number: int) -> SimNode:
        cluster = self.cluster
        is_prefill = number < cluster.num_prefill
        first = 0 if is_prefill else cluster.num_prefill
        if cluster.policy != "bound":
            cache = LruBlocks(cluster.num_blocks)
        elif number == first:
            cache = LruBlocks(cluster.num_blocks * (cluster.num_prefill if is_prefill else cluster.num_decode))
        else:
            cache = self.nodes[first].cache
        is_mixed = not cluster.num_prefill
        node = SimNode(self.events, cache, is_prefill, is_mixed, shortest_first=cluster.shortest_first)
        node.changed = lambda: self._change(number)
        return node

    def _make_router(self, turn: int) -> SimRouter:
        cluster, clock = self.cluster, lambda: self.events.now_s
        sizes = cluster.num_prefill, cluster.num_decode
        if cluster.policy == "bound":
            return OracleRouter(self.nodes, cluster.num_prefill, clock, decode_reads=cluster.decode_reads)
        if cluster.policy == "cost":
            return CostRouter(*sizes, clock, decode_reads=cluster.decode_reads, turn=turn)
        in_turn = cluster.policy == "round-robin"
        return LeastLoadedRouter(*sizes, clock, in_turn=in_turn, decode_reads=cluster.decode_reads, turn=turn)

    # --- requests

    def _arrive(self, arrival: SimRequest, router: int, heard: Callable[[SimAnswer], None] = lambda one: None) -> None:
        route = self.routers[router].route(arrival)
        if route.prefill is None:
            self._num_direct += 1
            self.events.after(LINK_S, lambda: self._read_directly(arrival, router, route, heard))
        else:
            self.events.after(LINK_S, lambda: self._prefill(arrival, router, route, heard))

    def _read_directly(
        self, arrival: SimRequest, router: int, route: SimRoute, heard: Callable[[SimAnswer], None]
    ) -> None:
        number, booking = route.decode()
        first_s = 0.0

        def done() -> None:
            nonlocal first_s
            first_s = self._first_token(arrival, route, LINK_S)
            booking.prefill_done()

        def ended(steps_s: Sequence[float]) -> None:
            booking.release()
            heard(SimAnswer([first_s, *(end_s + LINK_S for end_s in steps_s)], route, prompt.cached))

        self._charges[router][number].append(booking.number)
        prompt = Prompt(arrival, self.events.now_s, done, ended)
        self.nodes[number].add_prompt(prompt)

    def _prefill(self, arrival: SimRequest, router: int, route: SimRoute, heard: Callable[[SimAnswer], None]) -> None:
        assert route.prefill is not None
        assert route.booking is not None
        booking = route.booking
        taken: list[tuple[int, Booking]] = []
        first_s = 0.0

        def done() -> None:
            nonlocal first_s
            booking.prefill_done()
            booking.release()
            first_s = self._first_token(arrival, route, HANDOVER_S)
            self.events.after(HANDOVER_S, hand_over)

        def hand_over() -> None:
            number, charge = taken[0]

            def ended(steps_s: Sequence[float]) -> None:
                charge.release()
                heard(SimAnswer([first_s, *(end_s + LINK_S for end_s in steps_s)], route, prompt.cached))

            self._charges[router][number].append(charge.number)
            self.nodes[number].add_sequence(arrival, ended)

        self._charges[router][route.prefill].append(booking.number)
        self.events.after(LINK_S, lambda: taken.append(route.decode()))  # the ticket
        prompt = Prompt(arrival, self.events.now_s, done)
        self.nodes[route.prefill].add_prompt(prompt)

    def _first_token(self, arrival: SimRequest, route: SimRoute, link_s: float) -> float:
        """When the client has it: `link_s` from now."""
        first_s = self.events.now_s + link_s
        ttft_s = first_s - arrival.at_s
        self._ttft_s.append(ttft_s)
        if route.predicted_s is not None:
            name = "direct" if route.prefill is None else "p-first"
            self._ratios.setdefault(name, []).append(ttft_s / route.predicted_s)
        return first_s

    # --- feeds

    def _change(self, number: int) -> None:
        if self.cluster.policy == "cost" and not self._is_telling[number]:
            self._is_telling[number] = True
            self.events.at(max(self.events.now_s, self._told_s[number] + PAUSE_S), lambda: self._tell(number))

    def _tell(self, number: int) -> None:
        node = self.nodes[number]
        self._is_telling[number] = False
        self._told_s[number] = self.events.now_s
        load, news = node.load, node.news
        node.news = {}
        evicted = [name for name, block in news.items() if block is None]
        stored = [block for block in news.values() if block is not None]
        for router, charges in zip(self.routers, self._charges, strict=True):
            told, charges[number] = charges[number], []
            self.events.after(
                LINK_S,
                lambda router=router, told=told: router.receive(number, load, stored, evicted, told),  # type: ignore[misc]
            )
        if node.has_prompts and not self._is_telling[number]:
            self._is_telling[number] = True
            self.events.after(PROGRESS_S, lambda: self._tell(number))
