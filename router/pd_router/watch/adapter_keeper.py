"""Tells nodes what names of adapters mean, and keeps that true: a node that starts, restarts or joins is told.

Every router and every worker does so, whatever router took the order: a node's second time changes nothing. Until a
node has an adapter it does not list the name, so no request of that adapter goes there.
"""

from __future__ import annotations

import asyncio
import logging
from typing import TYPE_CHECKING, Any, Literal

import msgspec

from pd_connectors.protocol.adapters import AdapterRecord
from pd_connectors.protocol.ticket import NOT_SEEN, ORDER_HEADER, NodeOrder, sign
from pd_http.endpoints import LOAD_PATH, UNLOAD_PATH
from pd_http.node_answers import object_in
from pd_router.nodes.upstream import LegFailed, Refused

if TYPE_CHECKING:
    from collections.abc import Callable

    from pd_router.nodes.node import Node
    from pd_router.nodes.node_table import NodeTable
    from pd_router.nodes.upstream import Upstream

log = logging.getLogger("pd_router")
LOOK_EVERY_S = 0.25  # between two looks at what a node lacks
RETRY_S, MAX_RETRY_S = 10.0, 600.0  # after a node could not load an adapter; twice as long after each time
ORDER_LIFETIME_S = 30.0  # more than clocks differ
LOAD_DEADLINE_S = 300.0  # a node reads the files, then each of its ranks does, 130 s each at most

Step = Literal["prepare", "hold", "drop"]


class AdapterRefused(Exception):
    """A node does not obey. `status`: of its answer; 502: it gave none."""

    def __init__(self, node: Node, status: int, why: str) -> None:
        super().__init__(f"{node.node_id}: {why}")
        self.status = status


class AdapterKeeper:
    """Gives nodes orders about adapters."""

    def __init__(self, table: NodeTable, upstream: Upstream, key: bytes, wall_clock: Callable[[], float]) -> None:
        self._table = table
        self._upstream = upstream
        self._key = key
        self._wall_clock = wall_clock

    async def tell(self, node: Node, step: Step, record: AdapterRecord, seen_stamp: int = NOT_SEEN) -> AdapterRecord:
        """The record that the node has now, or has prepared. Raises AdapterRefused. `seen_stamp`: see NodeOrder."""
        is_load = record.is_live or step != "hold"
        expires_at_s = self._wall_clock() + ORDER_LIFETIME_S
        order = NodeOrder(
            "load_adapter" if is_load else "unload_adapter", node.node_id, expires_at_s, adapter=record, step=step,
            seen_stamp=seen_stamp,
        )  # fmt: skip
        headers = {ORDER_HEADER: sign(self._key, order)}
        try:
            path = LOAD_PATH if is_load else UNLOAD_PATH
            answer = await self._upstream.post_whole(node, path, headers, b"{}", LOAD_DEADLINE_S)
            told = msgspec.convert(list(object_in(answer.body)["adapter"].values()), AdapterRecord)
        except Refused as refusal:
            raise AdapterRefused(node, refusal.answer.status, _reason(object_in(refusal.answer.body))) from refusal
        except LegFailed as failure:
            why = _reason(object_in(failure.answer.body)) if failure.answer is not None else str(failure)
            raise AdapterRefused(node, 502, why) from failure
        except (KeyError, AttributeError, msgspec.ValidationError) as error:
            raise AdapterRefused(node, 502, "it is of another engine or release") from error
        if step == "hold":
            self._table.tell_answer(node, told)
        return told

    async def follow(self, node: Node) -> None:
        """Keep the node's adapters as the table says, until cancelled."""
        loop = asyncio.get_running_loop()
        waits: dict[AdapterRecord, tuple[float, float]] = {}  # seconds, and their end
        epoch = node.epoch
        while True:
            await asyncio.sleep(LOOK_EVERY_S)
            if node.epoch != epoch:
                epoch, waits, node.adapter_errors = node.epoch, {}, {}
            if not (node.reachable and node.lora_slots and node.adapters is not None):
                continue
            lacking = list(self._table.adapters.lacking(node.adapters))
            waits = {record: waits[record] for record in lacking if record in waits}
            names = {record.name for record in waits}
            node.adapter_errors = {name: why for name, why in node.adapter_errors.items() if name in names}
            for record in lacking:
                wait_s, ends_s = waits.get(record, (RETRY_S / 2, 0.0))
                if ends_s > loop.time():
                    continue
                wait_s = min(2 * wait_s, MAX_RETRY_S)
                waits[record] = wait_s, loop.time() + wait_s
                try:
                    await self.tell(node, "hold", record)
                    log.info("node %s was told of the adapter %s", node.node_id, record.name)
                except AdapterRefused as refusal:
                    log.warning("the adapter %s is not on a node, again in %g s: %s", record.name, wait_s, refusal)
                    node.adapter_errors[record.name] = str(refusal)
                except Exception:  # a bug that one node triggers must not stop the others
                    log.exception("node %s (%s) cannot be told of adapters", node.node_id, node.url)


def _reason(answer: dict[str, Any]) -> str:
    error = answer.get("error")
    return str(error.get("message", error) if isinstance(error, dict) else error or answer)
