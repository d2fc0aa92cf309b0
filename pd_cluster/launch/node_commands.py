"""`pd-cluster nodes`: what a router knows of its nodes, and signed orders about them.

An order is obeyed by the router that got it: with several routers, give it to each.
"""

from __future__ import annotations

import sys
import time
from typing import TYPE_CHECKING, Any, Literal, TypeAlias
from urllib.parse import quote

import httpx

from pd_cluster.errors import PdError, StartupError
from pd_connectors.protocol.keys import load_cluster_key
from pd_connectors.protocol.ticket import NodeOrder, sign

if TYPE_CHECKING:
    import argparse
    from collections.abc import Callable, Sequence

Action: TypeAlias = Literal["add", "remove", "drain", "resume"]
Row: TypeAlias = dict[str, Any]  # a node as `GET /nodes` shows it

CALL_S = 10.0  # until a router has answered
ORDER_LIFETIME_S = 30.0  # covers clocks that differ; until then whoever overhears the order may repeat it
LOOK_EVERY_S = 0.5  # at what a draining node still runs
_METHODS = {"remove": ("DELETE", ""), "drain": ("POST", "/drain"), "resume": ("DELETE", "/drain")}
_COLUMNS = ("node_id", "role", "state", "healthy", "source", "url")


class OrderRefused(PdError):
    """The router cannot be reached, or says no; the message says which."""


class RouterOrders:
    """Talks to one router. `key`: the cluster's. Every call raises OrderRefused, and ends within CALL_S."""

    def __init__(self, client: httpx.Client, key: bytes, wall_clock: Callable[[], float] = time.time) -> None:
        self._client = client
        self._key = key
        self._wall_clock = wall_clock

    def list(self) -> Sequence[Row]:
        rows: Sequence[Row] = self._call("GET", "/nodes", {}, "nodes")["nodes"]
        return rows

    def give(self, action: Action, node: str, role: str = "") -> Row:
        """The node after the order. `node`: its base URL for "add", else its id or host:port."""
        return self._call(*order_request(self._key, action, node, role, self._wall_clock()), "outstanding")

    def _call(self, method: str, path: str, headers: dict[str, str], wanted: str) -> Row:
        """wanted: what a router's answer has, and hardly anybody else's."""
        try:
            answer = self._client.request(method, path, headers=headers)
            told: Row = answer.json()
        except (httpx.HTTPError, ValueError) as error:
            raise OrderRefused(f"no answer from a router on {self._client.base_url}: {error}") from error
        if answer.is_error:
            detail = told.get("error") if isinstance(told, dict) else None
            why = detail.get("message") if isinstance(detail, dict) else None
            raise OrderRefused(f"{answer.status_code}: {why or answer.reason_phrase}")
        if not isinstance(told, dict) or wanted not in told:
            raise OrderRefused(f"what answers on {self._client.base_url} is no router")
        return told


def order_request(key: bytes, action: Action, node: str, role: str, now_s: float) -> tuple[str, str, dict[str, str]]:
    """Method, path and headers of a signed order. `now_s`: wall clock."""
    order = NodeOrder(action=action, node=node, role=role, expires_at_s=now_s + ORDER_LIFETIME_S)
    method, what = _METHODS.get(action, ("POST", ""))
    path = "/nodes" if action == "add" else f"/nodes/{quote(node, safe=':[]')}{what}"
    return method, path, {"x-pd-order": sign(key, order)}


def run_nodes(namespace: argparse.Namespace) -> int:
    """Exit status: 1 when the router does not do as told, or a node still runs something after --wait-s.

    Raises StartupError for a key that cannot be read or an address that is none.
    """
    try:
        key = b"" if namespace.action == "list" else load_cluster_key(namespace.cluster_key_file)
        client = httpx.Client(base_url=namespace.router, timeout=CALL_S)
    except (OSError, ValueError, httpx.InvalidURL) as error:
        raise StartupError(f"--router {namespace.router}, or the cluster key: {error}") from error
    with client:
        try:
            return _obey(RouterOrders(client, key), namespace)
        except OrderRefused as refusal:
            sys.stderr.write(f"pd-cluster nodes: {refusal}\n")
            return 1


def _obey(orders: RouterOrders, namespace: argparse.Namespace) -> int:
    if namespace.action == "list":
        _show(orders.list())
        return 0
    row = orders.give(namespace.action, namespace.node, getattr(namespace, "role", ""))
    end_s = time.monotonic() + getattr(namespace, "wait_s", 0.0)
    while _is_busy(row) and time.monotonic() < end_s:
        time.sleep(LOOK_EVERY_S)
        row = orders.give(namespace.action, namespace.node)
    _show([row])
    return 1 if getattr(namespace, "wait_s", 0.0) and _is_busy(row) else 0


def _is_busy(row: Row) -> bool:
    return any(row["outstanding"].values())


def _show(rows: Sequence[Row]) -> None:
    """A table with one line per node."""
    lines = [(*(title.upper() for title in _COLUMNS), "SEQUENCES", "PROMPT_BYTES")]
    for row in rows:
        outstanding = row["outstanding"]
        load = (str(outstanding["sequences"]), str(outstanding["prefill_bytes"]))
        lines.append((*(_word(row[column]) for column in _COLUMNS), *load))
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    for line in lines:
        sys.stdout.write("  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip() + "\n")


def _word(value: object) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    return "-" if value is None else str(value)
