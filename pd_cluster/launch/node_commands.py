"""`pd-cluster nodes`: lists a router's nodes and sends signed orders about them.

Only the router that gets an order obeys it. With several routers, send it to each.
"""

from __future__ import annotations

import sys
import time
from typing import TYPE_CHECKING, Any, Literal, TypeAlias
from urllib.parse import quote, urlsplit

import httpx

from pd_cluster.errors import PdError, StartupError
from pd_connectors.protocol.adapters import AdapterRecord
from pd_connectors.protocol.keys import load_cluster_key
from pd_connectors.protocol.ticket import ALL_NODES, NodeOrder, sign
from pd_http.endpoints import LOAD_PATH, NODE_ACTIONS, UNLOAD_PATH
from pd_http.tls import TlsFiles

if TYPE_CHECKING:
    import argparse
    from collections.abc import Callable, Sequence

Action: TypeAlias = Literal[
    "add", "remove", "drain", "resume", "role", "reset_cache", "start_profile", "stop_profile",
    "load_adapter", "unload_adapter",
]  # fmt: skip
Row: TypeAlias = dict[str, Any]  # a node as `GET /nodes` shows it

CALL_S = 10.0  # deadline of a router's answer
LOAD_S = 960.0  # of one about an adapter, which the router has three groups of nodes prepare
_ADAPTERS = {"load_adapter": LOAD_PATH, "unload_adapter": UNLOAD_PATH}
ORDER_LIFETIME_S = 30.0  # more than clocks differ; within it an order that was overheard can be sent again
LOOK_EVERY_S = 0.5  # between two looks at a draining node
_METHODS = {
    "remove": ("DELETE", ""),
    "drain": ("POST", "/drain"),
    "resume": ("DELETE", "/drain"),
    "role": ("POST", "/role"),
}
_COLUMNS = ("node_id", "role", "state", "healthy", "source", "url")
_LOAD_COLUMNS = ("feed", "queued_tokens", "free_tokens")


class OrderRefused(PdError):
    """The router cannot be reached or refuses; the message names the cause."""


class RouterOrders:
    """Client of one router. `key`: the cluster's. Calls raise OrderRefused and end within CALL_S."""

    def __init__(self, client: httpx.Client, key: bytes, wall_clock: Callable[[], float] = time.time) -> None:
        self._client = client
        self._key = key
        self._wall_clock = wall_clock

    def list(self) -> Sequence[Row]:
        rows: Sequence[Row] = self._call("GET", "/nodes", {}, "nodes")["nodes"]
        return rows

    def give(self, action: Action, node: str, role: str = "", *, is_forced: bool = False) -> Row:
        """Send an order. Returns the node's row after it. `node`: the base URL for "add", else the id or host:port."""
        now_s = self._wall_clock()
        return self._call(*order_request(self._key, action, node, role, now_s, is_forced=is_forced), "outstanding")

    def give_all(self, action: Action) -> Row:
        """Send an order of NODE_ACTIONS to all nodes. Returns what each of them answered, by its id."""
        path = next(path for path, one in NODE_ACTIONS.items() if one == action)
        _, _, headers = order_request(self._key, action, ALL_NODES, "", self._wall_clock())
        reported: Row = self._call("POST", path, headers, "nodes")["nodes"]
        return reported

    def about_adapter(self, action: Action, adapter: AdapterRecord, *, in_place: bool = False) -> Row:
        """ "load_adapter" or "unload_adapter". Returns the router's answer, with the digest of what is loaded."""
        order = NodeOrder(action, ALL_NODES, self._wall_clock() + ORDER_LIFETIME_S, is_forced=in_place, adapter=adapter)
        return self._call("POST", _ADAPTERS[action], {"x-pd-order": sign(self._key, order)}, "digest", LOAD_S)

    def _call(self, method: str, path: str, headers: dict[str, str], wanted: str, timeout_s: float = CALL_S) -> Row:
        """`wanted`: a field that a router's answer has, and that tells it from another server's."""
        try:
            answer = self._client.request(method, path, headers=headers, timeout=timeout_s)
            reported: Row = answer.json()
        except (httpx.HTTPError, ValueError) as error:
            raise OrderRefused(f"no answer from a router on {self._client.base_url}: {error}") from error
        if answer.is_error:
            detail = reported.get("error") if isinstance(reported, dict) else None
            why = detail.get("message") if isinstance(detail, dict) else None
            raise OrderRefused(f"{answer.status_code}: {why or answer.reason_phrase}")
        if not isinstance(reported, dict) or wanted not in reported:
            raise OrderRefused(f"{self._client.base_url} is not a pd-cluster router")
        return reported


def order_request(
    key: bytes, action: Action, node: str, role: str, now_s: float, *, is_forced: bool = False
) -> tuple[str, str, dict[str, str]]:
    """Method, path and headers of a signed order. `now_s`: wall clock."""
    order = NodeOrder(action=action, node=node, role=role, expires_at_s=now_s + ORDER_LIFETIME_S, is_forced=is_forced)
    method, what = _METHODS.get(action, ("POST", ""))
    path = "/nodes" if action == "add" else f"/nodes/{quote(node, safe=':[]')}{what}"
    return method, path, {"x-pd-order": sign(key, order)}


def run_nodes(namespace: argparse.Namespace) -> int:
    """Returns 1 when the router refuses, or a node still runs requests after --wait-s; else 0.

    Raises StartupError for a key that cannot be read or an invalid address.
    """
    try:
        key = b"" if namespace.action == "list" else load_cluster_key(namespace.cluster_key_file)
        tls = TlsFiles(tls_ca=namespace.tls_ca)
        # Of the environment, certificates count ($SSL_CERT_FILE) and proxies do not: the router is the cluster's own
        trusted = tls.client_context() if tls.tls_ca else httpx.create_ssl_context()
        client = httpx.Client(base_url=namespace.router, timeout=CALL_S, verify=trusted, trust_env=False)
    except (OSError, ValueError, httpx.InvalidURL) as error:
        raise StartupError(f"--router {namespace.router}, or the cluster key: {error}") from error
    with client:
        try:
            return _carry_out(RouterOrders(client, key), namespace)
        except OrderRefused as refusal:
            sys.stderr.write(f"pd-cluster nodes: {refusal}\n")
            return 1


def _carry_out(orders: RouterOrders, namespace: argparse.Namespace) -> int:
    if namespace.action == "list":
        _show(orders.list())
        return 0
    if namespace.action in _ADAPTERS:
        adapter = AdapterRecord(namespace.name, getattr(namespace, "path", ""), getattr(namespace, "digest", ""))
        told = orders.about_adapter(namespace.action, adapter, in_place=getattr(namespace, "in_place", False))
        sys.stdout.write("".join(f"{node}: {what}\n" for node, what in told["nodes"].items()))
        return 0
    if namespace.action in NODE_ACTIONS.values():
        sys.stdout.write("".join(f"{node}\n" for node in orders.give_all(namespace.action)))
        return 0
    role, is_forced = getattr(namespace, "role", ""), getattr(namespace, "force", False)
    node = namespace.node
    if namespace.action != "add" and "://" in node:  # routers call a node by its id or by host:port
        node = urlsplit(node).netloc or node
    row = orders.give(namespace.action, node, role, is_forced=is_forced)
    end_s = time.monotonic() + getattr(namespace, "wait_s", 0.0)
    while _is_busy(row) and time.monotonic() < end_s:
        time.sleep(LOOK_EVERY_S)
        row = orders.give(namespace.action, node)
    _show([row])
    return 1 if getattr(namespace, "wait_s", 0.0) and _is_busy(row) else 0


def _is_busy(row: Row) -> bool:
    return any(row["outstanding"].values())


def _show(rows: Sequence[Row]) -> None:
    """Print a table with one line per node."""
    lines = [
        (
            *(title.upper() for title in _COLUMNS),
            "SEQUENCES",
            "PROMPT_BYTES",
            *(title.upper() for title in _LOAD_COLUMNS),
        )
    ]
    for row in rows:
        outstanding = row["outstanding"]
        load = row.get("load", {})  # absent: a router of before feeds
        own = (str(outstanding["sequences"]), str(outstanding["prefill_bytes"]))
        reported = (_word(load.get(column)) for column in _LOAD_COLUMNS)
        lines.append((*(_word(row[column]) for column in _COLUMNS), *own, *reported))
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    for line in lines:
        sys.stdout.write("  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip() + "\n")


def _word(value: object) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    return "-" if value is None else str(value)
