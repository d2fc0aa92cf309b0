"""A node of conversations: the engine's scheduler and budgets over a virtual device, with a prefix cache of blocks."""

from __future__ import annotations

from itertools import count
from typing import TYPE_CHECKING, TypeAlias

from benchmarks.routing_simulation.trace import BLOCK_TOKENS
from benchmarks.slo.device import DEVICES, SHAPES
from pd_cluster.engine.news_report import NO_SHARE
from pd_cluster.planning.device import USUAL_BLOCK_SIZE as BLOCK
from pd_cluster.planning.simulated_node import DRAWN, Rule, SimulatedNode
from pd_cluster.protocol.messages import AddRequest, Work
from pd_cluster.protocol.sampling_params import SamplingParams
from pd_cluster.scheduling.sequence import Request
from pd_connectors.protocol.hashing import extend_hashes, root_hash
from pd_connectors.protocol.messages import SampledToken

if TYPE_CHECKING:
    from collections.abc import Callable

    from benchmarks.routing_simulation.nodes import Ended, Prompt
    from benchmarks.routing_simulation.trace import SimRequest
    from pd_cluster.planning.simulated_node import VirtualTime
    from pd_connectors.protocol.feed import StoredBlock

DEFAULTS = Rule("defaults", usual=True, shortest=True)
RETRY_S = 0.01  # until a decode node asks for memory again
OWN_TOKENS = 512  # after the head, that no other conversation has

Lease: TypeAlias = "tuple[ScheduledNode, str]"


class ScheduledNode(SimulatedNode):
    """Serves what `SimNode` does. Every answer has the same tokens, so that the next turn finds them."""

    def __init__(
        self, world: VirtualTime, role: str, num_blocks: int, leases: dict[SimRequest, Lease], shape: str = SHAPES[0]
    ) -> None:
        """`num_blocks`: of its KV memory, each of BLOCK_TOKENS. `leases`: open ones, of all nodes."""
        super().__init__(world, DEFAULTS, DEVICES[shape, 1], role=role, num_blocks=num_blocks * BLOCK_TOKENS // BLOCK)
        self.changed: Callable[[], None] = lambda: None
        self.news: dict[int, StoredBlock | None] = {}  # empty: routers look into the cache
        self.hit_tokens = self.computed_tokens = 0
        self._leases = leases
        self._names = count()
        self.blocks.news.switch(is_on=True)

    @property
    def has_prompts(self) -> bool:
        """Or had lately: their share of the time is told while it falls."""
        return self.scheduler.load.queued_tokens > 0 or round(NO_SHARE * self.room.share) > 0

    @property
    def num_running(self) -> int:
        return self.scheduler.num_running + self.scheduler.num_waiting

    def num_cached(self, arrival: SimRequest) -> int:
        """Tokens of the prompt that a request would find cached."""
        tokens, size = _tokens(arrival), self.blocks.block_size
        num_whole = (len(tokens) - 1) // size
        return self.blocks.num_cached(extend_hashes(root_hash(), tokens[: num_whole * size], size))

    def add_prompt(self, prompt: Prompt) -> None:
        name, times_s, arrival = str(next(self._names)), list[float](), prompt.arrival
        prompt.cached = self.num_cached(arrival)
        request = self._request(name, arrival, Work.PREFILL if prompt.ended is None else Work.GENERATE)

        def token() -> None:
            times_s.append(self.world.now_s)
            if len(times_s) == 1:
                prompt.cached = request.num_cached_tokens
                prompt.done()
            if prompt.ended is not None and len(times_s) == arrival.num_output:
                del self.on_token[name]
                prompt.ended(times_s[1:])
            self.changed()

        if request.lease_id is not None:
            self._leases[arrival] = self, name
        self.on_token[name] = token
        self.scheduler.add(request)
        self.wake()
        self.changed()

    def add_sequence(self, arrival: SimRequest, ended: Ended) -> None:
        """A sequence that was handed over, with its first token."""
        name, times_s = str(next(self._names)), list[float]()
        request = self._request(name, arrival, Work.TAKE_OVER)
        request.load_id = name
        self.scheduler.park(request)

        def token() -> None:
            times_s.append(self.world.now_s)
            if len(times_s) == arrival.num_output - 1:
                del self.on_token[name]
                ended(times_s)
            self.changed()

        def load() -> None:
            if self.scheduler.reserve(request) is None:
                self.world.at(self.world.now_s + RETRY_S, load)
                return
            node, lease = self._leases.pop(arrival)
            node.scheduler.end_lease(lease)
            node.wake()
            self.on_token[name] = token
            self.scheduler.admit_loaded(request)
            self.wake()
            if arrival.num_output == 1:
                ended(times_s)

        self.scheduler.set_first_tokens(request, (SampledToken(DRAWN),))
        load()
        self.changed()

    def _request(self, name: str, arrival: SimRequest, work: Work) -> Request:
        sampling = SamplingParams(max_tokens=arrival.num_output, ignore_eos=True)
        message = AddRequest(name, _tokens(arrival), sampling, work, received_s=self.world.now_s)
        return Request.from_message(message, lease_id=name if work is Work.PREFILL else None)


def _tokens(arrival: SimRequest) -> list[int]:
    """Of the prompt: those of the head, of the conversation, and then what every answer has."""
    head, num_head, own = arrival.text
    return [*[head] * num_head, *[own] * OWN_TOKENS, *[DRAWN] * arrival.num_tokens][: arrival.num_tokens]
