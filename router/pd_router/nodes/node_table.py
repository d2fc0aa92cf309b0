"""The nodes behind the router: identity, health and outstanding work."""

from __future__ import annotations

import asyncio
import itertools
import logging
import secrets
from dataclasses import dataclass, field
from enum import StrEnum
from math import inf
from typing import TYPE_CHECKING
from urllib.parse import urlsplit
from weakref import WeakValueDictionary
from zlib import crc32

from pd_connectors.protocol.adapters import LEVELS, ON_FILE, AdapterState, newer
from pd_http.body import longest_body
from pd_http.errors import ModelNotFound
from pd_router.nodes.adapter_table import AdapterTable
from pd_router.nodes.answer_lengths import AnswerLengths
from pd_router.nodes.ledger import ChargeLedger
from pd_router.nodes.liveness import NodeLiveness
from pd_router.nodes.node_view import NodeView, TextRatio
from pd_router.nodes.prefix_index import PrefixIndex
from pd_router.nodes.speed import ReadingSpeed
from pd_router.nodes.told_context import ToldContext

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from pd_connectors.protocol.adapters import AdapterRecord
    from pd_router.config import RouterConfig
    from pd_router.nodes.role_order_note import RoleOrderNote

log = logging.getLogger("pd_router")
FULL_KV = 0.9  # share of the KV cache in use from which prompts probably wait for blocks
_NOT_KNOWN = -1  # of a length that is looked up when it is asked for
FLAGS = "flags"  # the source of nodes named on the command line


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


class NodeTable:
    """The nodes that a source names, those of the flags first. `clock`: monotonic seconds."""

    def __init__(self, config: RouterConfig, clock: Callable[[], float]) -> None:
        self._eject_after = config.eject_after
        self._eject_s = config.eject_s
        self._keeps = config.decode_on_prefill == "auto"
        self.clock = clock
        self.nodes: tuple[Node, ...] = ()
        self._longest_body: int | None = _NOT_KNOWN
        self.changed = asyncio.Event()  # set when a node was added or removed; `NodeTasks` clears it
        self._named: dict[str, tuple[NodeSpec, ...]] = {}
        self._sources: dict[str, str] = {}  # by URL: the first source that names it
        self._leaving: list[Node] = []  # removed while they still had requests
        self.ratios: WeakValueDictionary[frozenset[str], TextRatio] = WeakValueDictionary()  # by a node's models
        self.answers = AnswerLengths()
        self.contexts = ToldContext()
        self.prefixes: PrefixIndex[Node] = PrefixIndex()
        self.adapters = AdapterTable()
        self.router_name = secrets.token_hex(8)  # of this process; a node tells routers apart by it
        self._charge_numbers = itertools.count(1)
        flags = ((Role.PREFILL, config.prefill), (Role.DECODE, config.decode), (Role.MIXED, config.mixed))
        self.apply(FLAGS, (NodeSpec(url.rstrip("/"), role) for role, urls in flags for url in urls))

    def apply(self, source: str, specs: Iterable[NodeSpec]) -> None:
        """Replace the nodes of `source` by `specs`. A node that no source names any more gets no new requests.

        If two sources name a URL, the first source decides its role, until the node tells its own.
        """
        self._named[source] = tuple(specs)
        self._sources = {}
        wanted: dict[str, NodeSpec] = {}
        for name, spec in ((name, spec) for name, specs_of_one in self._named.items() for spec in specs_of_one):
            self._sources.setdefault(spec.url, name)
            if wanted.setdefault(spec.url, spec).role is not spec.role:
                log.warning("%s is named twice; its second role, %s, is ignored", spec.url, spec.role.value)
        self._leaving = [node for node in self._leaving if not node.is_idle]
        known = {(node.url, node.role): node for node in (*self._leaving, *self.nodes)}
        sure = {node.url: node for node in self.nodes if node.role_changes is not None}  # of their role
        before = self.nodes
        self.nodes = tuple(
            sure.get(spec.url) or known.get((spec.url, spec.role)) or self._make_node(spec) for spec in wanted.values()
        )
        if left := set(before).difference(self.nodes):
            self._forget_lengths()
        for node in left:
            self._leave(node, source)
        for node in set(self.nodes).difference(before):
            self._enter(node, source)
        self._longest_body = _NOT_KNOWN

    def _make_node(self, spec: NodeSpec) -> Node:
        view = NodeView(ledger=ChargeLedger(self.router_name, self._charge_numbers), contexts=self.contexts)
        return Node(url=spec.url, role=spec.role, node_id=spec.node_id or urlsplit(spec.url).netloc, view=view)

    def _leave(self, node: Node, source: str) -> None:
        log.info("node %s (%s, %s) was removed (source: %s)", node.node_id, node.role.value, node.url, source)
        node.gone = True
        self._leaving.append(node)
        self.changed.set()

    def _enter(self, node: Node, source: str) -> None:
        if source != FLAGS:
            log.info("node %s (%s, %s) was added (source: %s)", node.node_id, node.role.value, node.url, source)
        if node.gone:  # a source names it again before its last request ended: of its state only the load is valid
            self._leaving.remove(node)
            node.gone = node.draining = node.reachable = node.polled = node.was_up = False
            node.models = node.base_models = node.adapters = node.role_changes = node.drained_epoch = None
            node.role_order = None
        self.changed.set()

    def source_of(self, node: Node) -> str | None:
        """The source that names the node; None: it is gone."""
        return None if node.gone else self._sources.get(node.url)

    def set_models(self, node: Node, models: frozenset[str] | None, adapters: frozenset[str] = frozenset()) -> None:
        """None: requests for any model may go to the node. Nodes with the same models count text alike.

        `adapters`: those of `models` that are adapters, of a node that tells none in a feed.
        """
        node.base_models = None if models is None else models - adapters
        self._set_names(node, models)
        if node.base_models is not None:
            node.view.ratio = self.ratios.setdefault(node.base_models, TextRatio())

    def tell_adapters(self, node: Node, states: Iterable[AdapterState] | None, *, is_whole: bool = False) -> None:
        """Note what the node says of its adapters. `is_whole`: of all of them. None: it says nothing any more."""
        if states is None:
            node.adapters = None
            return
        node.adapters = {} if is_whole or node.adapters is None else node.adapters
        for state in states:
            node.adapters[state.record.name] = state
            self.adapters.learn(state.record)
        self._set_names(node, node.base_models)

    def tell_answer(self, node: Node, record: AdapterRecord) -> None:
        """Note what the node has answered to an order. Its feed may have said as much before, and where it lies."""
        self.adapters.learn(record)
        if node.adapters is None:  # it has said nothing of the others
            if node.models is not None and record.is_live:
                self._set_names(node, node.models | {record.name})
        elif newer({name: one.record for name, one in node.adapters.items()}, record):
            self.tell_adapters(node, (AdapterState(record),))

    def is_adapter(self, name: str) -> bool:
        """Whether a node says so, or may have said so before its feed is read; or it is no model's name.

        An adapter may get such a name while a request waits for its turn.
        """
        is_model = not self.nodes or any(name in (node.base_models or (name,)) for node in self.nodes)
        listed = any(name in (node.models or ()) and name not in (node.base_models or ()) for node in self.nodes)
        return listed or not is_model or self.adapters.find(name) is not None

    def having(self, adapter: str) -> dict[Node, AdapterState]:
        """The nodes with the adapter of this name, and what each tells of it."""
        found = ((node, (node.adapters or {}).get(adapter)) for node in self.nodes)
        return {node: state for node, state in found if state is not None and state.record.is_live}

    def _set_names(self, node: Node, names: frozenset[str] | None) -> None:
        if names is not None and node.adapters is not None and node.base_models is not None:
            names = node.base_models.union(name for name, one in node.adapters.items() if one.record.is_live)
        has_changed, node.models = names != node.models, names
        if has_changed:
            self._forget_lengths()

    def _forget_lengths(self) -> None:
        """Of models that no node serves any more: names come and go with adapters."""
        self.answers.keep(frozenset().union(*(node.models or () for node in self.nodes)))

    @property
    def role_state(self) -> int:
        """Names the nodes with their boots, roles and drains: an order that saw another number is of another state.

        A sum of changes is not enough: one node that restarts and another that changes leave it as it was.
        """
        told = sorted((n.node_id, n.epoch or 0, n.role.value, n.role_changes or 0, n.draining) for n in self.nodes)
        return crc32(repr(told).encode())

    def find(self, name: str) -> list[Node]:
        """The nodes with the id or host:port `name`; if there are none, those that are leaving."""
        found = [node for node in self.nodes if node.goes_by(name)]
        return found or [node for node in self._leaving if node.goes_by(name) and not node.is_idle]

    def healthy(self, roles: Iterable[Role], model: str | None) -> list[Node]:
        now_s = self.clock()
        wanted = tuple(roles)
        found = [n for n in self.nodes if n.role in wanted and n.is_healthy(now_s) and n.serves(model)]
        return self.current(found, model)

    def current(self, nodes: list[Node], model: str | None) -> list[Node]:
        """Those where the name of an adapter means what it last came to mean; all, while no node has that yet.

        A node that stood still during an order has the adapter of before until it is told.
        """
        if (record := self.adapters.find(model)) is None:
            return nodes
        states = {n: (n.adapters or {}).get(record.name) for n in nodes if n.models is not None}  # else it has none
        return [n for n, one in states.items() if one is None or one.record.stamp >= record.stamp] or list(states)

    def answering(self, model: str | None, among: Callable[[list[Node]], list[Node]] = list) -> list[Node]:
        """The healthy nodes that may generate: those that decode, and where there is none, the prefill nodes that can.

        Those of other engines may be unable to. A node that writes frames is able to. `among`: those that may at all.
        """
        found = among(self.healthy(DECODERS, model))
        if found or not self._keeps:
            return found
        return among([node for node in self.healthy((Role.PREFILL,), model) if node.stream_version])

    def known_name(self, model: str | None) -> str:
        """`model` if a node tells that it serves it, else "": metrics and logs take no other text of clients."""
        return model if model and any(node.models and model in node.models for node in self.nodes) else ""

    def knows_model(self, model: str) -> bool:
        """Whether a node serves `model`, or may serve it: a node that gave no list of its models."""
        return not self.nodes or any(node.serves(model) for node in self.nodes)

    def require_model(self, model: str | None) -> None:
        """Raises ModelNotFound, which names what is served, for a model that no node serves."""
        if model is None or self.knows_model(model):
            return
        served = sorted(frozenset().union(*(node.models or () for node in self.nodes)))
        raise ModelNotFound(f"no node serves the model {model!r}; served: {', '.join(served)}", param="model")

    @property
    def longest_body(self) -> int | None:
        """Bytes of the longest body that a reachable node can serve. None: not known for all of them.

        Each request asks: a walk of 1,000 nodes takes 50 us.
        """
        if self._longest_body == _NOT_KNOWN:
            lengths = [node.max_model_len for node in self.nodes if node.reachable]
            known = [length for length in lengths if length is not None]
            self._longest_body = longest_body(max(known)) if known and len(known) == len(lengths) else None
        return self._longest_body

    def set_length(self, node: Node, max_model_len: int | None) -> None:
        """Note how long sequences of the node may become, which its /health tells."""
        if node.max_model_len != max_model_len:
            node.max_model_len = max_model_len
            self._longest_body = _NOT_KNOWN

    def answered(self, node: Node) -> None:
        node.failures_in_row = 0

    def failed(self, node: Node, *, unreachable: bool) -> None:
        """Note that a leg to `node` got no proper HTTP answer.

        `unreachable`: the node gets no requests until /health is good again. Other failures add up to an ejection.
        """
        if unreachable:
            self.set_down(node)
        node.failures_in_row += 1
        if node.failures_in_row >= self._eject_after:
            node.ejected_until_s = self.clock() + self._eject_s
            node.failures_in_row = 0

    def set_down(self, node: Node) -> None:
        """Send the node, which does not answer, no requests until /health is good again."""
        if node.reachable:
            node.reachable, self._longest_body = False, _NOT_KNOWN
        if node.down_since_s is None:
            node.down_since_s = self.clock()

    def set_up(self, node: Node) -> None:
        if not node.reachable:
            node.reachable, self._longest_body = True, _NOT_KNOWN
        node.down_since_s, node.was_up = None, True

    def report(self) -> list[dict[str, object]]:
        """The answer to `GET /nodes`: all nodes, and those that are leaving with requests under way."""
        leaving = (node for node in self._leaving if not node.is_idle)
        return [self.describe(node) for node in (*self.nodes, *leaving)]

    def describe(self, node: Node) -> dict[str, object]:
        """`down_s`: seconds without an answer; null: it answers. `restarts`: changes of epoch seen by this router."""
        now_s = self.clock()
        return {
            "node_id": node.node_id,
            "role": node.role.value,
            "role_changes": node.role_changes,
            "role_order": None if node.role_order is None else node.role_order.told(now_s),
            "tells_orders": node.tells_orders,
            "url": node.url,
            "healthy": node.is_healthy(now_s),
            "down_s": None if node.down_since_s is None else round(now_s - node.down_since_s, 1),
            "restarts": node.restarts,
            "state": node.state,
            "slow_links": list(node.slow_links),
            "down": None if node.liveness.down is None else node.liveness.down.why,
            "source": self.source_of(node),
            "outstanding": {"prefill_bytes": node.prefill_bytes, "sequences": node.decode_sequences},
            "load": self._describe_load(node),
            "epoch": node.epoch,
            "tp": node.num_ranks or None,
            "max_model_len": node.max_model_len,
            "kv_version": node.kv_version,
            "models": None if node.models is None else sorted(node.models),
            "adapters": {
                name: {"digest": one.record.digest, "level": LEVELS[min(one.tier, ON_FILE)]}
                for name, one in (node.adapters or {}).items() if one.record.is_live
            },
            "adapter_errors": node.adapter_errors,
        }  # fmt: skip

    def _describe_load(self, node: Node) -> dict[str, object]:
        """What this router takes for the node's load: with all routers' requests while `feed` is "live".

        `engine`: as the node's newest word says; None: it has none.
        """
        view = node.view
        return {
            "feed": view.feed.value,
            "queued_tokens": view.queued_tokens,
            "sequences": view.num_sequences,
            "free_tokens": _known(view.ledger.total.free_tokens),
            "stream_room": _known(view.ledger.total.stream_room),
            "cached_blocks": self.prefixes.num_blocks(node),
            "engine": None if (load := view.load) is None else {
                "running": load.num_running, "waiting": load.num_waiting, "slots": load.num_slots,
                "free_blocks": load.free_blocks, "num_blocks": load.num_blocks, "step_ms": round(load.step_s * 1e3, 3),
                "block_size": load.block_size, "context": load.num_context, "token_s": load.token_s,
                "key_s": load.key_s, "context_s": load.context_s,
            },
        }  # fmt: skip


def _known(value: float) -> int | None:
    return None if value == inf else int(value)
