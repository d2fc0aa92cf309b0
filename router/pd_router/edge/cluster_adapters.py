"""`POST /v1/load_lora_adapter` and `/v1/unload_lora_adapter`: all nodes obey, or the cluster is as it was.

A load is prepared at every node before a request can name it anywhere: at one node alone, which refuses the second of
two orders for one name, then at the other prefill nodes, then at the rest. If one cannot, or has other files, all drop
it. Otherwise all hold it, prefill nodes first. A router that dies in between leaves nothing, or what every router's
`AdapterKeeper` completes. docs/adapters.md has the protocol.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import msgspec

from pd_connectors.protocol.adapters import MAX_PATH_CHARS, AdapterRecord
from pd_connectors.protocol.ticket import NOT_SEEN
from pd_http.body import read_body
from pd_http.endpoints import LOAD_PATH
from pd_http.errors import AdapterConflict, InvalidRequest, ModelNotFound
from pd_http.names import MAX_NAME_CHARS, is_name
from pd_http.reply import json_response
from pd_router.errors import NodeFailed, NoNode, WorkerLate
from pd_router.nodes.node import Role
from pd_router.watch.adapter_keeper import AdapterRefused

if TYPE_CHECKING:
    from collections.abc import Sequence

    from starlette.requests import Request
    from starlette.responses import Response

    from pd_router.edge.cluster_orders import ClusterOrders
    from pd_router.edge.workers import Workers
    from pd_router.nodes.node import Node
    from pd_router.requests.services import Services
    from pd_router.watch.adapter_keeper import AdapterKeeper, Step

MAX_BODY_BYTES = 1 << 16
MAX_ORDERS = 64  # that wait for the one under way; each may take minutes
ADAPTERS = "adapters"  # topic of `Workers.ask`: the stamp of each name
WORKERS_DEADLINE_S = 5.0  # for the feeds of all workers to tell what this one has ordered
LOOK_EVERY_S = 0.02


class AdapterBody(msgspec.Struct):
    """Of the peers' calls; their other fields are ignored."""

    lora_name: str
    lora_path: str = ""
    load_inplace: bool = False


class ClusterAdapters:
    """Handles one order at a time in this process; nodes order those of several processes."""

    def __init__(self, services: Services, orders: ClusterOrders, keeper: AdapterKeeper, workers: Workers) -> None:
        self._s = services
        self._orders = orders
        self._keeper = keeper
        self._workers = workers
        self._turn = asyncio.Lock()
        self._num_orders = 0

    def stamps(self) -> dict[str, int]:
        """What this worker knows, for the others."""
        return {record.name: record.stamp for record in self._s.table.adapters.records}

    async def give(self, request: Request) -> Response:
        """200 when every reachable node obeys that serves adapters. Raises PdError."""
        is_load = request.url.path == LOAD_PATH
        asked, in_place = await self._asked(request, "load_adapter" if is_load else "unload_adapter")
        if self._num_orders > MAX_ORDERS:
            raise AdapterConflict(f"{MAX_ORDERS} orders about adapters wait already; try again later", status=503)
        self._num_orders += 1
        try:
            async with self._turn:
                return await self._given(asked, is_load=is_load, in_place=in_place)
        finally:
            self._num_orders -= 1

    async def _given(self, asked: AdapterRecord, *, is_load: bool, in_place: bool) -> Response:
        self._check(asked, is_load=is_load, in_place=in_place)
        nodes = [node for node in self._s.table.nodes if node.reachable and node.lora_slots]
        if not nodes and any(node.reachable for node in self._s.table.nodes):
            raise InvalidRequest("no node serves adapters: start nodes with --lora-dir or --lora-slots")
        if not nodes:
            raise NoNode("no node is reachable; try again later")
        stamp = self._s.table.adapters.next_stamp(self._s.wall_clock())
        record = AdapterRecord(asked.name, stamp=stamp)
        if is_load:
            seen_stamp = NOT_SEEN if in_place else self._s.table.adapters.seen_stamp(asked.name)
            record = await self._prepared(nodes, msgspec.structs.replace(asked, stamp=stamp), seen_stamp)
        await self._hold(nodes, record)
        await self._tell_workers(record)
        others = {node.node_id: "serves no adapters, or is not reachable" for node in self._s.table.nodes}
        told = others | {node.node_id: record.digest or "unloaded" for node in nodes}
        return json_response({"success": True, "name": record.name, "digest": record.digest, "nodes": told})

    async def _asked(self, request: Request, action: str) -> tuple[AdapterRecord, bool]:
        """What the order asks for, and whether in place of another. What is signed counts; the body may repeat it."""
        order = self._orders.allowed(request, action)
        raw = await read_body(request.scope, request.receive, MAX_BODY_BYTES)
        try:
            body = (
                msgspec.json.decode(raw, type=AdapterBody) if raw.strip() not in (b"", b"{}") or order is None else None
            )
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
            raise InvalidRequest(f"the body is not that of an order about an adapter: {error}") from error
        if order is None:
            assert body is not None
            return AdapterRecord(body.lora_name, body.lora_path), body.load_inplace
        signed = order.adapter
        if signed is None:
            raise InvalidRequest("the order names no adapter")
        given = (signed.name, signed.path, order.is_forced)
        if body is not None and (body.lora_name, body.lora_path, body.load_inplace) != given:
            raise InvalidRequest("the body asks for something else than the signed order")
        return AdapterRecord(signed.name, signed.path, signed.digest), order.is_forced

    def _check(self, asked: AdapterRecord, *, is_load: bool, in_place: bool) -> None:
        table, name = self._s.table, asked.name
        if not is_name(name) or len(asked.path) > MAX_PATH_CHARS:  # they go into a header of each node's order
            raise InvalidRequest(f"a name has up to {MAX_NAME_CHARS} ASCII characters, a path {MAX_PATH_CHARS}")
        if any(name in (node.base_models or ()) for node in table.nodes):
            raise InvalidRequest(f"{name!r} is the name of a model", "lora_name")
        is_known = table.adapters.find(name) is not None
        if is_load and not asked.path:
            raise InvalidRequest("lora_path is required", "lora_path")
        if is_load and is_known and not in_place:
            raise InvalidRequest(f"the adapter {name!r} is loaded already; load_inplace: true replaces it", "lora_name")
        if not is_load and not is_known:
            raise ModelNotFound(f"there is no adapter {name!r}", param="lora_name")

    async def _prepared(self, nodes: Sequence[Node], asked: AdapterRecord, seen_stamp: int) -> AdapterRecord:
        """The record that all nodes have prepared. Raises PdError when one has not: then all have dropped it."""
        first, *rest = sorted(nodes, key=lambda node: (node.role is not Role.PREFILL, node.node_id))
        reads = [node for node in rest if node.role is Role.PREFILL]
        found: dict[Node, AdapterRecord] = {}
        try:
            for some in ([first], reads, [node for node in rest if node not in reads]):
                found |= dict(zip(some, await self._all(some, "prepare", asked, seen_stamp), strict=True))
            if len({record.digest for record in found.values()}) > 1:
                digests = ", ".join(f"{node.node_id}: {record.digest}" for node, record in found.items())
                raise InvalidRequest(f"nodes have other files under {asked.path!r}: {digests}", "lora_path")
            return found[first]
        except BaseException:
            drops = (self._keeper.tell(node, "drop", asked) for node in nodes)
            await asyncio.shield(asyncio.gather(*drops, return_exceptions=True))  # one that fails ends by itself
            raise

    async def _hold(self, nodes: Sequence[Node], record: AdapterRecord) -> None:
        """Decided: what does not reach a node now reaches it by the keepers. Raises AdapterConflict, PdError."""
        self._s.table.learn(record)
        reads = [node for node in nodes if node.role is Role.PREFILL]
        held = await self._all(reads, "hold", record)
        held += await self._all([node for node in nodes if node not in reads], "hold", record)
        if any(one.stamp != record.stamp for one in held):
            raise AdapterConflict(f"a later order about the adapter {record.name!r} was obeyed in place of this one")

    async def _all(
        self, nodes: Sequence[Node], step: Step, record: AdapterRecord, seen_stamp: int = NOT_SEEN
    ) -> list[AdapterRecord]:
        """Waits for every node. Raises PdError for those that do not obey."""
        orders = (self._keeper.tell(node, step, record, seen_stamp) for node in nodes)
        told = await asyncio.gather(*orders, return_exceptions=True)
        done = [one for one in told if isinstance(one, AdapterRecord)]
        if refusals := [one for one in told if isinstance(one, AdapterRefused)]:
            status = max(one.status for one in refusals)
            text = f"not every node obeyed: {'; '.join(map(str, refusals))}"
            kind = AdapterConflict if status == 409 else NodeFailed if status >= 500 else InvalidRequest
            raise kind(text, status=status)
        assert len(done) == len(told), told  # a bug
        return done

    async def _tell_workers(self, record: AdapterRecord) -> None:
        """Return when the feeds of all workers have told them. Raises WorkerLate."""
        clock = self._s.table.clock
        ends_s = clock() + WORKERS_DEADLINE_S
        while late := [
            number
            for number, stamps in (await self._workers.ask(ADAPTERS)).items()
            if (stamps or {}).get(record.name, 0) < record.stamp
        ]:
            if clock() > ends_s:
                raise WorkerLate(f"the nodes have obeyed; workers {late} do not know it yet")
            await asyncio.sleep(LOOK_EVERY_S)
