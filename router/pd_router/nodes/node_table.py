"""The nodes behind the router: which there are, which of them are healthy, and what they serve."""

from __future__ import annotations

import asyncio
import itertools
import logging
import secrets
from typing import TYPE_CHECKING
from urllib.parse import urlsplit
from weakref import WeakValueDictionary
from zlib import crc32

from pd_connectors.protocol.adapters import AdapterState, newer
from pd_http.body import longest_body
from pd_http.errors import ModelNotFound
from pd_router.nodes.adapter_table import AdapterTable
from pd_router.nodes.answer_lengths import AnswerLengths
from pd_router.nodes.ledger import ChargeLedger
from pd_router.nodes.node import DECODERS, Node, NodeSpec, Role
from pd_router.nodes.node_view import NodeView, TextRatio
from pd_router.nodes.prefix_index import PrefixIndex
from pd_router.nodes.told_context import ToldContext

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from pd_connectors.protocol.adapters import AdapterRecord
    from pd_router.config import RouterConfig

log = logging.getLogger("pd_router")
_NOT_KNOWN = -1  # of a length that is looked up when it is asked for
FLAGS = "flags"  # the source of nodes named on the command line


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
            self.learn(state.record)
        self._set_names(node, node.base_models)

    def learn(self, record: AdapterRecord) -> None:
        """Note what a name means. No node serves one that was unloaded: those that stood still are told later."""
        if self.adapters.learn(record) and not record.is_live:
            for node in self.nodes:
                self._set_names(node, node.models)

    def tell_answer(self, node: Node, record: AdapterRecord) -> None:
        """Note what the node has answered to an order. Its feed may have said as much before, and where it lies."""
        self.learn(record)
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
        if names is not None:
            ended = (name for name in names if self.adapters.is_unloaded(name))
            names = names.difference(name for name in ended if name not in (node.base_models or ()))
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
        return found or [node for node in self.leaving if node.goes_by(name)]

    @property
    def leaving(self) -> list[Node]:
        """The nodes that no source names any more, with requests under way."""
        return [node for node in self._leaving if not node.is_idle]

    def healthy(self, roles: Iterable[Role], model: str | None) -> list[Node]:
        now_s = self.clock()
        wanted = tuple(roles)
        found = [n for n in self.nodes if n.role in wanted and n.is_healthy(now_s) and n.serves(model)]
        return self.current(found, model)

    def current(self, nodes: list[Node], model: str | None) -> list[Node]:
        """Those where the name of an adapter means what it last came to mean; all, while no node has that yet.

        A node that stood still during an order has the adapter of before until it is told, and tells nothing at first.
        """
        if (record := self.adapters.find(model)) is None:
            return nodes
        states = {n: (n.adapters or {}).get(record.name) for n in nodes if n.models is not None}  # else it has none
        return [n for n, one in states.items() if (one.record.stamp if one else 0) >= record.stamp] or list(states)

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
