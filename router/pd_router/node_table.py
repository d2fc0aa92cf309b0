"""The nodes behind the router: who they are, how they do, and how much they have been given."""

from __future__ import annotations

import asyncio
import logging
from dataclasses import dataclass, field
from enum import StrEnum
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from yarl import URL

from pd_http.body import longest_body
from pd_router.liveness import NodeLiveness
from pd_router.speed import ReadingSpeed

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable
    from types import TracebackType

    from pd_router.config import RouterConfig

log = logging.getLogger("pd_router")
FULL_KV = 0.9  # share in use from which prompts are likely to wait for memory
FLAGS = "flags"  # the source of the nodes that the command line names


class Role(StrEnum):
    PREFILL = "prefill"
    DECODE = "decode"
    MIXED = "mixed"


@dataclass(frozen=True, slots=True)
class NodeSpec:
    """What a source says of one node. A node is its URL and role: with another role it is another node."""

    url: str  # base URL, no trailing slash
    role: Role
    node_id: str = ""  # its name until /health tells it; "": host:port


@dataclass(slots=True, eq=False)
class Node:
    """One node. Written by the node table, by the health poller, by failures seen on legs, and by charges."""

    url: str  # base URL, no trailing slash
    role: Role
    node_id: str  # from /health; until then host:port
    reachable: bool = False  # the last /health was good, and nothing failed to connect since
    polled: bool = False  # /health has been asked
    draining: bool = False  # told to take no more, until it is resumed or boots anew
    gone: bool = False  # no source names it any more; what it still runs is seen through
    ejected_until_s: float = 0.0
    failures_in_row: int = 0
    epoch: int | None = None  # the engine's boot; None for nodes that tell none
    restarts: int = 0  # new epochs that this router has seen
    down_since_s: float | None = None  # when it ceased to be reachable, or was first found not to be; None: it is not
    models: frozenset[str] | None = None  # None: not known, so any model is tried
    max_model_len: int | None = None  # tokens; None for nodes that do not tell
    num_slots: int | None = None  # sequences that run there at once; None for nodes that do not tell
    kv_in_use: float = 0.0  # share of its KV cache, when last asked; 0 for nodes that do not tell
    prefill_bytes: int = 0  # outstanding prompt bytes: prefill work grows with the prompt
    decode_sequences: int = 0  # outstanding generations
    speed: ReadingSpeed = field(default_factory=ReadingSpeed)
    liveness: NodeLiveness = field(default_factory=NodeLiveness)
    urls: dict[str, URL] = field(default_factory=dict)

    def is_healthy(self, now_s: float) -> bool:
        """Whether a request may go there now."""
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
        """Whether `name` is its id, or its host:port."""
        return name in (self.node_id, urlsplit(self.url).netloc)

    def serves(self, model: str | None) -> bool:
        return model is None or self.models is None or model in self.models

    def at(self, path: str) -> URL:
        """The parsed URL of `path` on this node; parsing one costs more than looking it up."""
        url = self.urls.get(path)
        if url is None:
            url = self.urls[path] = URL(self.url + path)
        return url


class Charge:
    """Work booked on a node at the moment it is chosen, so that a burst spreads; given back exactly once."""

    __slots__ = ("_begun_s", "_clock", "_is_hidden", "_node", "_prefill_bytes", "_sequences", "_timer")

    def __init__(self, node: Node, clock: Callable[[], float], *, prefill_bytes: int = 0, sequences: int = 0) -> None:
        node.prefill_bytes += prefill_bytes
        node.decode_sequences += sequences
        self._node = node
        self._clock = clock
        self._begun_s = clock()
        self._prefill_bytes = prefill_bytes
        self._sequences = sequences
        self._is_hidden = False
        self._timer: asyncio.TimerHandle | None = None

    def hide_prefill(self, expected_s: float | None) -> None:
        """Nothing will show when the node has read the prompt: it is believed to have, `expected_s` from now.

        None: nobody can tell, so not before it is known to be over.
        """
        self._is_hidden = True
        if expected_s is not None:
            self._timer = asyncio.get_running_loop().call_later(expected_s, self.prefill_over)

    def prefill_done(self) -> None:
        """The node has read the prompt just now: that tells its speed. Ignored where it does not show."""
        if self._is_hidden:
            return
        if self._prefill_bytes:
            self._node.speed.note(self._prefill_bytes, self._begun_s, self._clock())
        self.prefill_over()

    def prefill_over(self) -> None:
        """It is not reading the prompt any more, or so it is believed."""
        self._node.prefill_bytes -= self._prefill_bytes
        self._prefill_bytes = 0
        if self._timer is not None:
            self._timer.cancel()

    def release(self) -> None:
        self.prefill_over()
        self._node.decode_sequences -= self._sequences
        self._sequences = 0

    def __enter__(self) -> Charge:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.release()


class NodeTable:
    """All nodes that some source names, those of the flags first. `clock`: monotonic seconds."""

    def __init__(self, config: RouterConfig, clock: Callable[[], float]) -> None:
        self._eject_after = config.eject_after
        self._eject_s = config.eject_s
        self.clock = clock
        self.nodes: tuple[Node, ...] = ()
        self.changed = asyncio.Event()  # set when a node has come or gone; whoever follows that clears it
        self._told: dict[str, tuple[NodeSpec, ...]] = {}
        self._leaving: list[Node] = []  # gone, but not idle when they went
        flags = ((Role.PREFILL, config.prefill), (Role.DECODE, config.decode), (Role.MIXED, config.mixed))
        self.apply(FLAGS, (NodeSpec(url.rstrip("/"), role) for role, urls in flags for url in urls))

    def apply(self, source: str, specs: Iterable[NodeSpec]) -> None:
        """Take over all that `source` names now. What no source names any more gets no request from here on.

        A URL that two sources name is the first one's.
        """
        self._told[source] = tuple(specs)
        wanted: dict[str, NodeSpec] = {}
        for spec in (spec for told in self._told.values() for spec in told):
            if wanted.setdefault(spec.url, spec).role is not spec.role:
                log.warning("%s is named twice, also as a %s node: that is ignored", spec.url, spec.role.value)
        self._leaving = [node for node in self._leaving if not node.is_idle]
        known = {(node.url, node.role): node for node in (*self._leaving, *self.nodes)}
        before = self.nodes
        self.nodes = tuple(known.get((spec.url, spec.role)) or _make_node(spec) for spec in wanted.values())
        for node in set(before).difference(self.nodes):
            self._leave(node, source)
        for node in set(self.nodes).difference(before):
            self._enter(node, source)

    def _leave(self, node: Node, source: str) -> None:
        log.info("node %s (%s, %s) leaves, says %s", node.node_id, node.role.value, node.url, source)
        node.gone = True
        self._leaving.append(node)
        self.changed.set()

    def _enter(self, node: Node, source: str) -> None:
        if source != FLAGS:
            log.info("node %s (%s, %s) comes, says %s", node.node_id, node.role.value, node.url, source)
        if node.gone:  # back before its last request was over: the same node, of which nothing is known but its load
            self._leaving.remove(node)
            node.gone = node.draining = node.reachable = node.polled = False
            node.models = None
        self.changed.set()

    def source_of(self, node: Node) -> str | None:
        """Whose word the node stands by; None when it is gone."""
        spoken = (name for name, told in self._told.items() if any(spec.url == node.url for spec in told))
        return None if node.gone else next(spoken, None)

    def find(self, name: str) -> list[Node]:
        """The nodes whose id or host:port is `name`; when there are none, those that are leaving."""
        found = [node for node in self.nodes if node.goes_by(name)]
        return found or [node for node in self._leaving if node.goes_by(name) and not node.is_idle]

    def healthy(self, roles: Iterable[Role], model: str | None) -> list[Node]:
        now_s = self.clock()
        wanted = tuple(roles)
        return [n for n in self.nodes if n.role in wanted and n.is_healthy(now_s) and n.serves(model)]

    def knows_model(self, model: str) -> bool:
        """Whether some node serves `model`, or might: a node that never told its models."""
        return not self.nodes or any(node.serves(model) for node in self.nodes)

    @property
    def longest_body(self) -> int | None:
        """Bytes of the longest body that any node that is up has a use for. None: not known of all of them."""
        lengths = [node.max_model_len for node in self.nodes if node.reachable]
        known = [length for length in lengths if length is not None]
        return longest_body(max(known)) if known and len(known) == len(lengths) else None

    def answered(self, node: Node) -> None:
        node.failures_in_row = 0

    def failed(self, node: Node, *, unreachable: bool) -> None:
        """A leg to `node` got no proper HTTP answer.

        Nobody listening puts the node out until /health answers again; other failures add up.
        """
        if unreachable:
            self.set_down(node)
        node.failures_in_row += 1
        if node.failures_in_row >= self._eject_after:
            node.ejected_until_s = self.clock() + self._eject_s
            node.failures_in_row = 0

    def set_down(self, node: Node) -> None:
        """It does not answer: it gets no request until /health is good again."""
        node.reachable = False
        if node.down_since_s is None:
            node.down_since_s = self.clock()

    def set_up(self, node: Node) -> None:
        node.reachable = True
        node.down_since_s = None

    def report(self) -> list[dict[str, object]]:
        """For `GET /nodes`: also what is leaving and not done yet."""
        leaving = (node for node in self._leaving if not node.is_idle)
        return [self.describe(node) for node in (*self.nodes, *leaving)]

    def describe(self, node: Node) -> dict[str, object]:
        """`down_s`: for how long it has not answered, null when it does. `restarts`: new epochs seen by this router."""
        now_s = self.clock()
        return {
            "node_id": node.node_id,
            "role": node.role.value,
            "url": node.url,
            "healthy": node.is_healthy(now_s),
            "down_s": None if node.down_since_s is None else round(now_s - node.down_since_s, 1),
            "restarts": node.restarts,
            "state": node.state,
            "down": None if node.liveness.down is None else node.liveness.down.why,
            "source": self.source_of(node),
            "outstanding": {"prefill_bytes": node.prefill_bytes, "sequences": node.decode_sequences},
            "epoch": node.epoch,
            "models": None if node.models is None else sorted(node.models),
        }


def _make_node(spec: NodeSpec) -> Node:
    return Node(url=spec.url, role=spec.role, node_id=spec.node_id or urlsplit(spec.url).netloc)
