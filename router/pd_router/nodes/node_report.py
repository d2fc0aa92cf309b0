"""What `GET /nodes` tells of the nodes."""

from __future__ import annotations

from math import inf
from typing import TYPE_CHECKING

from pd_connectors.protocol.adapters import LEVELS, ON_FILE

if TYPE_CHECKING:
    from pd_router.nodes.node import Node
    from pd_router.nodes.node_table import NodeTable


def report(table: NodeTable) -> list[dict[str, object]]:
    """The answer to `GET /nodes`: all nodes, and those that are leaving with requests under way."""
    return [describe(table, node) for node in (*table.nodes, *table.leaving)]


def describe(table: NodeTable, node: Node) -> dict[str, object]:
    """`down_s`: seconds without an answer; null: it answers. `restarts`: changes of epoch seen by this router."""
    now_s = table.clock()
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
        "source": table.source_of(node),
        "outstanding": {"prefill_bytes": node.prefill_bytes, "sequences": node.decode_sequences},
        "load": _load(table, node),
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


def _load(table: NodeTable, node: Node) -> dict[str, object]:
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
        "cached_blocks": table.prefixes.num_blocks(node),
        "engine": None if (load := view.load) is None else {
            "running": load.num_running, "waiting": load.num_waiting, "slots": load.num_slots,
            "free_blocks": load.free_blocks, "num_blocks": load.num_blocks, "step_ms": round(load.step_s * 1e3, 3),
            "block_size": load.block_size, "context": load.num_context, "token_s": load.token_s,
            "key_s": load.key_s, "context_s": load.context_s,
        },
    }  # fmt: skip


def _known(value: float) -> int | None:
    return None if value == inf else int(value)
