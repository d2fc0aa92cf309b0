"""How much more the nodes can take at once, and so when the router lets requests wait. Reads the node table only.

The nodes are kept busy, and no more: what waits at a node waits in the order of arrival, what waits at the router waits
in turns of the keys.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import inf
from typing import TYPE_CHECKING

from pd_router.nodes.node import Role

if TYPE_CHECKING:
    from pd_router.nodes.node import Node
    from pd_router.nodes.node_table import NodeTable

LOOK_S = 0.01  # between two looks at all nodes; what is let through meanwhile is subtracted
MAX_MODELS = 64  # with a room; a client may name any model while a node does not tell its own
AHEAD_S = 0.05  # of prompts that wait at a prefill node: it begins the next one without asking the router
# Of all slots, beyond them: a sequence occupies none before its prompt is computed
MORE_SLOTS = 1 / 8
# Of all slots, for keys that have less than their share: one that comes back finds a place at once. With 1/8 a greedy
# key got 8% less (simulated, 16 and 64 slots), with none the others' p99 was 2 to 3 times that alone, not 1.1.
RESERVE = 1 / 16


@dataclass(slots=True)
class Room:
    """Of the nodes that serve one model. `inf`: not known, so nothing waits."""

    sequences: float = 0.0  # that would run soon
    tokens: float = 0.0  # of prompts that may be queued at the nodes
    slots: float = 0.0
    tokens_per_s: float = 0.0  # of all nodes that compute prompts; 0: not known
    looked_s: float = -inf


class NodeRoom:
    """The room of each model. `running`: sequences that this router has admitted and that have not ended, by model."""

    def __init__(self, table: NodeTable) -> None:
        self._table = table
        self._rooms: dict[str | None, Room] = {}
        self.running: dict[str | None, int] = {}

    def of(self, model: str | None) -> Room:
        now_s = self._table.clock()
        room = self._rooms.get(model)
        if room is None or now_s >= room.looked_s + LOOK_S:
            if len(self._rooms) > MAX_MODELS:
                self._rooms.clear()
            room = self._rooms[model] = self._look(model, now_s)
        return room

    def take(self, model: str | None, sequences: int, tokens: float) -> None:
        """Note a request that goes to the nodes."""
        if sequences:
            self.running[model] = self.running.get(model, 0) + sequences
        room = self._rooms.get(model)
        if room is not None:
            room.sequences -= sequences
            room.tokens -= tokens

    def free(self, model: str | None, sequences: int) -> None:
        """Note that it has ended."""
        if sequences:
            self.running[model] -= sequences
            if not self.running[model]:
                del self.running[model]
        if (room := self._rooms.get(model)) is not None:
            room.sequences += sequences

    def look_again(self) -> None:
        """Look at the nodes when they are asked for next: requests wait, and 10 ms matter to them."""
        for room in self._rooms.values():
            room.looked_s = -inf

    def _look(self, model: str | None, now_s: float) -> Room:
        nodes = [node for node in self._table.nodes if node.is_healthy(now_s) and node.serves(model)]
        decodes = [node for node in nodes if node.role is not Role.PREFILL]
        room = Room(looked_s=now_s)
        booked, free = sum(node.decode_sequences for node in nodes), 0.0  # a prefill node may keep streams
        for node in decodes:
            load = node.view.ledger.total
            slots = load.num_slots if node.view.load is not None else node.num_slots or inf
            room.slots += slots
            free += max(0.0, slots * (1 + MORE_SLOTS) - load.num_sequences) if load.free_tokens > 0 else 0.0
        room.sequences = free - max(0, self.running.get(model, 0) - booked)  # admitted, on the way to a node
        for node in [node for node in nodes if node.role is Role.PREFILL] or decodes:
            token_s = _token_s(node, now_s)
            room.tokens += max(0.0, AHEAD_S / token_s - node.view.queued_tokens) if token_s else inf
            room.tokens_per_s += 1 / token_s if token_s else 0.0
        if not nodes:
            room.sequences = room.tokens = room.slots = inf  # the choice of nodes says what is missing
        return room


def _token_s(node: Node, now_s: float) -> float:
    """Seconds for a prompt token; 0: not known."""
    if token_s := node.view.ledger.reported.token_s:
        return token_s
    speed = node.speed.at(now_s)
    return 1 / (speed * node.view.ratio.value) if speed else 0.0
