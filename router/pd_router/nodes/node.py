"""One node behind the router: what a source says of it, and what the router has seen of it."""

from __future__ import annotations

import logging
from dataclasses import dataclass, field
from enum import StrEnum
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from pd_router.nodes.liveness import NodeLiveness
from pd_router.nodes.node_view import NodeView
from pd_router.nodes.speed import ReadingSpeed

if TYPE_CHECKING:
    from collections.abc import Iterable

    from pd_connectors.protocol.adapters import AdapterState
    from pd_router.nodes.role_order_note import RoleOrderNote

log = logging.getLogger("pd_router")
FULL_KV = 0.9  # share of the KV cache in use from which prompts probably wait for blocks


class Role(StrEnum):
    PREFILL = "prefill"
    DECODE = "decode"
    MIXED = "mixed"


READERS, DECODERS = (Role.PREFILL, Role.MIXED), (Role.DECODE, Role.MIXED)


@dataclass(frozen=True, slots=True)
class NodeSpec:
    """One node as a source names it. With another role it is another node, unless the node itself tells its role."""

    url: str  # base URL, no trailing slash
    role: Role  # until the node tells its own
    node_id: str = ""  # its id until /health names it; "": host:port


@dataclass(slots=True, eq=False)
class Node:
    """One node. Written by the node table, the health poller, its feed, failures of legs, and charges."""

    url: str  # base URL, no trailing slash
    role: Role
    node_id: str  # from /health; until then host:port
    reachable: bool = False  # the last /health was good, and no connection failed since
    polled: bool = False  # /health has been polled
    was_up: bool = False  # /health was good once, here or at the router before this one
    draining: bool = False  # gets no new requests until it is resumed or restarts
    drained_epoch: int | None = None  # that an order drained; another worker may have seen that boot first
    gone: bool = False  # no source names it any more; its running requests are finished
    ejected_until_s: float = 0.0
    failures_in_row: int = 0
    role_changes: int | None = None  # since its boot, by its own word for its role; None: it has not reported its role
    role_order: RoleOrderNote | None = None  # the last one that the node has told
    tells_orders: bool = False  # an earlier release obeys what is of another state, and tells no order
    num_ranks: int = 0  # GPUs of the node; 0: /health does not name them
    kv_version: str = ""  # nodes with an equal one use each other's KV; "": not reported, so it may pair with any node
    epoch: int | None = None  # of the engine's boot; None: /health does not name it
    restarts: int = 0  # changes of epoch seen by this router
    down_since_s: float | None = None  # since when it is not reachable; None: it is reachable
    logged_down: str = ""  # the cause that the log gave last for its not being healthy; "": it is healthy, or new
    models: frozenset[str] | None = None  # with adapters. None: not known, so requests for any model may go there
    base_models: frozenset[str] | None = None  # without adapters
    adapters: dict[str, AdapterState] | None = None  # by name, as its feed tells; None: it tells none
    adapter_errors: dict[str, str] = field(default_factory=dict)  # why it lacks an adapter of the others, by name
    lora_slots: int = 0  # 0: it serves no adapters, or is of an older release
    max_model_len: int | None = None  # in tokens; None: /health does not name it
    num_slots: int | None = None  # sequences that run at once; None: /health does not name it
    kv_in_use: float = 0.0  # share of its KV cache by the last /health; 0: /health does not name it
    slow_links: tuple[str, ...] = ()  # from prefill nodes, in words, by the last /health
    stream_version: str = ""  # nodes with an equal one continue each other's streams; "": it sends no frames
    prefill_bytes: int = 0  # outstanding prompt bytes
    decode_sequences: int = 0  # outstanding generations
    speed: ReadingSpeed = field(default_factory=ReadingSpeed)
    liveness: NodeLiveness = field(default_factory=NodeLiveness)
    view: NodeView = field(default_factory=NodeView)

    def is_healthy(self, now_s: float) -> bool:
        """Whether requests may go to this node now."""
        return self.reachable and not self.draining and not self.gone and now_s >= self.ejected_until_s

    def has_room(self, count: int) -> bool:
        """Whether `count` more generations would run at once, as far as this router knows."""
        has_slots = self.num_slots is None or self.decode_sequences + count <= self.num_slots
        return has_slots and self.kv_in_use < FULL_KV

    @property
    def is_idle(self) -> bool:
        return not self.prefill_bytes and not self.decode_sequences

    @property
    def state(self) -> str:
        return "leaving" if self.gone else "draining" if self.draining else "active"

    def goes_by(self, name: str) -> bool:
        """Whether `name` is the node's id or its host:port."""
        return name in (self.node_id, urlsplit(self.url).netloc)

    def pairs_with(self, kv_version: str) -> bool:
        """Whether this node and nodes of `kv_version` may hand KV over to each other."""
        return self.kv_version == kv_version or not self.kv_version or not kv_version

    def receive_role(self, role: object, changes: object) -> None:
        """Take the node's own word, which wins over the role that a source names. An older word is ignored."""
        if role == self.role and changes == self.role_changes:
            return  # in nearly every message of a feed
        if not isinstance(role, str) or role not in tuple(Role) or not isinstance(changes, int):
            return
        if changes < (self.role_changes or 0):
            return
        if role != self.role:
            log.info("node %s (%s) says that it is %s, no longer %s", self.node_id, self.url, role, self.role.value)
        self.role, self.role_changes = Role(role), changes

    def serves(self, model: str | None) -> bool:
        return model is None or self.models is None or model in self.models


def healthy(nodes: Iterable[Node], now_s: float) -> list[Node]:
    """`Node.is_healthy`, written out, because each leg asks it of each node: the calls take 7 us for 100 nodes."""
    return [
        node
        for node in nodes
        if node.reachable and not node.draining and not node.gone and now_s >= node.ejected_until_s
    ]
