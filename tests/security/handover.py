"""One prefill node in a process of its own, one decode node here, and a handoff between them that must succeed."""

from __future__ import annotations

from itertools import count
from typing import TYPE_CHECKING

import psutil

from pd_connectors.base import LoadDone, LoadReady, LoadSpec
from tests.connectors.remote_node import is_stamped, runs
from tests.deadlines import HANG_S

if TYPE_CHECKING:
    from tests.connectors.remote_node import Node, RemoteNode

NUM_BLOCKS = 64
_serials = count(1)


def hand_over(prefill: RemoteNode, decode: Node) -> None:
    """One prompt's KV, which must arrive whole."""
    load_id = f"load-{next(_serials)}"
    ticket = prefill.open(32)
    decode.connector.begin_load(load_id, ticket, HANG_S)
    prefill.publish(ticket.lease.lease_id, (3, 4), 32)
    prefill.finish(ticket.lease.lease_id)
    decode.wait_for(LoadReady, load_id)
    for tensor in decode.cache.tensors:
        tensor[60:62] = -1.0
    decode.connector.recv_before([LoadSpec(load_id, runs(0, (60, 61)), 32)])
    decode.wait_for(LoadDone, load_id)
    assert is_stamped(decode.cache, 61, like=4, version=0)


def listeners(pid: int) -> set[tuple[str, int]]:
    """Address and port of every TCP socket on which a process listens."""
    connections = psutil.Process(pid).net_connections("tcp")
    return {(each.laddr.ip, each.laddr.port) for each in connections if each.status == psutil.CONN_LISTEN}
