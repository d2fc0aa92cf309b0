"""Conversations of `bench serve --turns` over simulated nodes: the same draws, records and statistics.

Nodes are the engine's scheduler over a virtual device, routers know their caches at the moment and their loads late.
Not simulated: text that is tokenized anew, HTTP, what launches and the network take.
"""

from __future__ import annotations

import re
from itertools import accumulate
from random import Random
from typing import TYPE_CHECKING

from benchmarks.routing_simulation.routers import LookingRouter
from benchmarks.routing_simulation.scheduled_node import ScheduledNode
from benchmarks.routing_simulation.trace import BLOCK_TOKENS, SimRequest
from benchmarks.routing_simulation.world import Cluster, SimAnswer, SimWorld
from benchmarks.slo.device import SHAPES
from pd_cluster.bench.statistics import RequestRecord
from pd_cluster.errors import StartupError
from pd_cluster.planning.simulated_node import VirtualTime

if TYPE_CHECKING:
    from collections.abc import Sequence

    from benchmarks.routing_simulation.scheduled_node import Lease
    from pd_cluster.bench.turns import Conversation

NUM_BLOCKS = 1640  # 105 GiB of 8B, bf16
_SETTING = re.compile(r"([1-9]\d*)P([1-9]\d*)D|([1-9]\d*)M")


def cluster_of(setting: str, num_blocks: int = NUM_BLOCKS) -> Cluster:
    """As in 2P1D or 4M. Raises StartupError."""
    found = _SETTING.fullmatch(setting)
    if found is None:
        raise StartupError(f"setting {setting!r} is not like 2P1D or 4M")
    num_prefill, num_decode, num_mixed = (int(number or 0) for number in found.groups())
    return Cluster(num_prefill=num_prefill, num_decode=num_decode or num_mixed, num_blocks=num_blocks)


class TurnsWorld(SimWorld):
    """Holds conversations on a cluster: `at_once` of them, or, if that is 0, each from its time on."""

    def __init__(
        self, cluster: Cluster, conversations: Sequence[Conversation], at_once: int, seed: int, shape: str = SHAPES[0]
    ) -> None:
        self._leases: dict[SimRequest, Lease] = {}
        self._time, self._shape = VirtualTime(seed), shape
        self._scheduled: list[ScheduledNode] = []
        super().__init__(cluster, (), Random(seed), self._time)
        self._num_turns = sum(len(one.turns) for one in conversations)
        self._records: list[RequestRecord] = []
        self._is_closed = at_once > 0
        self._later = iter(conversations[at_once:] if at_once else ())
        for one in conversations[: at_once or None]:
            self._wait(one, 0, one.at_s)

    def _make_node(self, number: int) -> ScheduledNode:  # type: ignore[override]
        cluster = self.cluster
        role = "prefill" if number < cluster.num_prefill else "decode" if cluster.num_prefill else "mixed"
        node = ScheduledNode(self._time, role, cluster.num_blocks, self._leases, self._shape)
        node.changed = lambda: self._change(number)
        self._scheduled.append(node)
        return node

    def _make_router(self, turn: int) -> LookingRouter:
        return LookingRouter(self._scheduled, self.cluster.num_prefill, lambda: self.events.now_s, turn)

    def talk(self) -> list[RequestRecord]:
        """Until all turns are answered. Records are in the order of conversations, then of turns."""
        for number in range(len(self.nodes)):
            self._tell(number)
        self.events.run(lambda: len(self._records) == self._num_turns)
        assert len(self._records) == self._num_turns
        return sorted(self._records, key=lambda one: (one.conversation, one.turn))

    def _wait(self, conversation: Conversation, number: int, ended_s: float) -> None:
        pause_s = conversation.turns[number].pause_s if number or self._is_closed else 0.0
        self.events.at(ended_s + pause_s, lambda: self._ask(conversation, number))

    def _ask(self, conversation: Conversation, number: int) -> None:
        num_input, num_output = prompt_tokens(conversation)[number], conversation.turns[number].num_output
        request = SimRequest(
            self.events.now_s, num_input, num_output, _blocks(conversation, num_input),
            _blocks(conversation, num_input + num_output),
            (-1 - conversation.head & 0xFFFF, conversation.num_head, conversation.index + 100),
        )  # fmt: skip
        self._arrive(request, 0, lambda answer: self._hear(conversation, number, request, answer))

    def _hear(self, conversation: Conversation, number: int, request: SimRequest, answer: SimAnswer) -> None:
        times_s = list(answer.times_s)
        assert len(times_s) == request.num_output
        record = RequestRecord(
            len(self._records), request.at_s, request.at_s, request.num_tokens, request.num_output, times_s,
            times_s[-1], route=answer.route.text, predicted_s=answer.route.predicted_s, num_cached=answer.num_cached,
            conversation=conversation.index, turn=number,
        )  # fmt: skip
        self._records.append(record)
        if number + 1 < len(conversation.turns):
            self._wait(conversation, number + 1, record.end_s)
        elif (following := next(self._later, None)) is not None:
            self._wait(following, 0, record.end_s)


def prompt_tokens(conversation: Conversation) -> list[int]:
    """Of each turn, if each answer has the length that is asked for."""
    answers = (0, *(turn.num_output for turn in conversation.turns))
    grown = (turn.num_new + before for turn, before in zip(conversation.turns, answers, strict=False))
    return list(accumulate(grown, initial=conversation.num_head))[1:]


def _blocks(conversation: Conversation, num_tokens: int) -> tuple[int, ...]:
    """Those of the head are named alike in all conversations that have it."""
    own, shared = conversation.index + 1 << 20, -(conversation.head + 1 << 20)
    in_head = conversation.num_head // BLOCK_TOKENS
    return tuple((shared if place < in_head else own) + place for place in range(num_tokens // BLOCK_TOKENS))
