"""Polls each node's /health in a task of its own, and reads its models after each boot."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from typing import TYPE_CHECKING

import orjson

from pd_connectors.protocol.clock import patiently
from pd_http.names import MAX_NAME_CHARS, is_name
from pd_http.node_answers import FailureKind, object_in
from pd_router.nodes.liveness import Down
from pd_router.nodes.role_order_note import RoleOrderNote
from pd_router.nodes.upstream import LegFailed, Upstream

if TYPE_CHECKING:
    from pd_router.config import RouterConfig
    from pd_router.nodes.node import Node
    from pd_router.nodes.node_table import NodeTable
    from pd_router.nodes.upstream import Answer

log = logging.getLogger("pd_router")
MAX_MODELS = 1000  # of one node, with the names of its adapters
MAX_REASON_CHARS = 500
MAX_SLOW_LINKS = 8  # of one node: to show
LEAST_INTERVAL_S = 0.05  # between two polls of a node, whatever its feed says
UNTOLD_PROTOCOL = 2  # of a node that tells no `kv_protocol`: the releases before it speak no later version


class HealthPoller:
    """Writes `reachable`, `liveness`, `models` and what /health tells of the nodes: identity, role, versions, size.

    A process without progress is judged frozen within `health_interval_s` + `health_timeout_s`. A frozen engine is
    known as soon as its node's feed says so, or with the next poll.
    """

    def __init__(self, config: RouterConfig, table: NodeTable, upstream: Upstream) -> None:
        self._table = table
        self._upstream = upstream
        self._interval_s = config.health_interval_s
        self._health_timeout_s = config.health_timeout_s
        self._models_timeout_s = config.health_timeout_s  # the next poll of /health waits for it

    async def poll_all(self) -> None:
        """Poll every node once. Ends within twice `health_timeout_s`."""
        await asyncio.gather(*(self.poll(node) for node in self._table.nodes))

    async def follow(self, node: Node) -> None:
        """Poll a node until cancelled: a new node at once, also one that says that its engine is frozen."""
        while True:
            if node.polled:
                await asyncio.sleep(min(LEAST_INTERVAL_S, self._interval_s))
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(max(0.0, self._interval_s - LEAST_INTERVAL_S)):
                        await node.liveness.doubted.wait()
            node.liveness.doubted.clear()
            try:
                await self.poll(node)
            except Exception:  # a bug that one node triggers must not stop the polls of the others
                log.exception("node %s (%s) cannot be polled", node.node_id, node.url)
                self._table.set_down(node)

    async def poll(self, node: Node) -> None:
        was_reachable = node.reachable
        node.polled = True
        node.liveness.num_polls += 1
        try:
            answer = await patiently(self._upstream.get(node, "/health", {}, None), self._health_timeout_s)
        except TimeoutError:
            why = f"/health did not answer within {self._health_timeout_s:g} s"
            self._set_down(node, why, FailureKind.FROZEN)
            return
        except LegFailed as failure:
            if failure.kind is FailureKind.OWN:  # no report of the node
                log.warning("node %s (%s) was not polled: %s", node.node_id, node.url, failure)
                return
            # A broken connection is not conclusive: the next poll decides
            self._set_down(node, str(failure), _gone(node, node.epoch) if failure.kind is FailureKind.CONNECT else None)
            return
        if answer.status != 200:
            self._set_ill(node, answer)
            return
        before = node.epoch
        restarted = self._read_identity(node, answer.body)
        if node.models is None or restarted or not was_reachable:
            await self._read_models(node)
        self._table.set_up(node)
        if restarted:
            node.liveness.restarted(Down(_gone(node, before), "the node has restarted"))
        node.liveness.judge(None)
        node.logged_down = ""
        if not was_reachable:
            log.info("node %s (%s, %s) is healthy", node.node_id, node.role.value, node.url)

    def _set_ill(self, node: Node, answer: Answer) -> None:
        """Handle an answer of the node with a status other than 200."""
        report = object_in(answer.body)
        status, reason, epoch = report.get("status"), report.get("reason"), report.get("epoch")
        if status == "draining" and isinstance(epoch, int):
            node.liveness.leaving_epoch = epoch
        kind = {"frozen": FailureKind.FROZEN, "dead": FailureKind.DIED}.get(str(status)) if "epoch" in report else None
        why = f"/health answers {answer.status}: {str(reason or status or 'no reason')[:MAX_REASON_CHARS]}"
        self._set_down(node, why, kind, f"{answer.status} {status}"[:MAX_REASON_CHARS])  # a reason may count seconds

    def _set_down(self, node: Node, why: str, kind: FailureKind | None, cause: str = "") -> None:
        """`kind` None: the node gets no new requests, but requests that wait for it continue to wait.

        A line in the log for each cause, not for each poll: also for a node that has never been healthy, such as one
        with a wrong address or with a certificate that this router does not trust. `cause`: default is `why`.
        """
        if node.logged_down != (cause or why):
            log.warning("node %s (%s) gets no requests: %s", node.node_id, node.url, why)
            node.logged_down = cause or why
        self._table.set_down(node)
        node.liveness.judge(None if kind is None else Down(kind, why))

    def _read_identity(self, node: Node, body: bytes) -> bool:
        """Read /health; other engines' has no epoch. Returns True if another boot of the node answers, or another node.

        A process at the address of a node that has ended may tell no epoch: it is not that node.
        """
        report = object_in(body)
        if "epoch" not in report and node.epoch is None:
            return False
        if is_name(node_id := report.get("node_id")):
            node.node_id = node_id
        epoch = report.get("epoch")
        restarted = node.epoch is not None and epoch != node.epoch
        if restarted:
            log.warning("node %s has restarted (epoch %s -> %s)", node.node_id, node.epoch, epoch)
            node.failures_in_row, node.ejected_until_s = 0, 0.0
            node.restarts += 1
            node.role_changes = None  # it has the role of its command line again
        if restarted or (isinstance(epoch, int) and node.drained_epoch is not None):
            node.draining = epoch == node.drained_epoch
        node.receive_role(report.get("role"), report.get("role_changes", 0))
        node.tells_orders = "role_order" in report
        node.role_order = RoleOrderNote.read(report.get("role_order"), self._table.clock())
        num_ranks = report.get("tp")
        node.num_ranks = num_ranks if isinstance(num_ranks, int) else 0
        node.epoch = epoch if isinstance(epoch, int) else None
        num_slots = report.get("max_num_seqs")
        node.num_slots = num_slots if isinstance(num_slots, int) else None
        lora_slots = report.get("lora_slots")
        node.lora_slots = lora_slots if isinstance(lora_slots, int) else 0
        max_model_len = report.get("max_model_len")
        is_length = isinstance(max_model_len, int) and max_model_len > 0
        self._table.set_length(node, max_model_len if is_length else None)
        version = report.get("stream_version")
        node.stream_version = version if is_name(version) else ""
        fingerprint, protocol = report.get("fingerprint"), report.get("kv_protocol", UNTOLD_PROTOCOL)
        is_reported = is_name(fingerprint) and isinstance(protocol, int)
        node.kv_version = f"{fingerprint}/{protocol}" if is_reported else ""
        kv_in_use = report.get("kv_in_use")
        node.kv_in_use = kv_in_use if isinstance(kv_in_use, float | int) else 0.0
        slow = report.get("slow_links")
        told = slow[:MAX_SLOW_LINKS] if isinstance(slow, list) else ()
        node.slow_links = tuple(one[:MAX_REASON_CHARS] for one in told if isinstance(one, str))
        return restarted

    async def _read_models(self, node: Node) -> None:
        """Read the node's models. Without an answer, requests for any model may go to the node."""
        try:
            answer = await self._upstream.get(node, "/v1/models", {}, self._models_timeout_s)
            listed = orjson.loads(answer.body)["data"] if answer.status == 200 else None
            names = {str(entry["id"]): entry.get("parent") for entry in (listed or ())[:MAX_MODELS]}
            names = {name: parent for name, parent in names.items() if len(name) <= MAX_NAME_CHARS}
            adapters = frozenset(name for name, parent in names.items() if parent is not None)
            self._table.set_models(node, None if listed is None else frozenset(names), adapters)
        except (LegFailed, orjson.JSONDecodeError, KeyError, TypeError, AttributeError) as error:
            node.models = node.base_models = None
            log.warning("node %s gave no list of its models: %s", node.node_id, error)


def _gone(node: Node, epoch: int | None) -> FailureKind:
    """How the boot `epoch` of a node, which is gone, has ended."""
    return FailureKind.LEFT if node.liveness.has_left(epoch) else FailureKind.DIED
