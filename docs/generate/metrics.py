"""The tables of `docs/operations.md`: metrics of router and nodes, and the alerts of the chart."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import yaml

from docs.generate.document import ROOT, code, table
from pd_cluster.protocol.messages import EngineStats, KvStats
from pd_cluster.server.node.metrics import NodeMetrics
from pd_router.config import RouterConfig
from pd_router.nodes.node_table import NodeTable
from pd_router.records.metrics import RouterMetrics

if TYPE_CHECKING:
    from prometheus_client import CollectorRegistry

DOCUMENT = "docs/operations.md"
_NODE_INFO = ("node_id", "role", "model", "engine_id", "connector", "version")  # as `pd_cluster.server.app` has it


class Meaning(NamedTuple):
    """What a metric of the engine or its connector says, and its labels."""

    text: str
    label: str = ""


# A node exports them under these names after `pd_`. The engine and the connectors write them in several places.
ENGINE: dict[str, Meaning] = {
    "engine_steps_total": Meaning("Steps of the engine."),
    "engine_step_tokens_total": Meaning("Tokens that the steps computed, also drafts that were refused."),
    "engine_step_seconds_total": Meaning("Time in which a step was under way."),
    "draws_sat_out_total": Meaning("Draws that a row with a grammar sat out because its mask was not there in time."),
    "spec_decode_num_drafts_total": Meaning("With `--speculation`: runs of drafts, of one sequence in one step."),
    "spec_decode_num_draft_tokens_total": Meaning("Drafts in them."),
    "spec_decode_num_accepted_tokens_total": Meaning("Drafts that were accepted."),
    "spec_decode_num_accepted_tokens_per_pos_total": Meaning("The same by their place in the run.", "position"),
    "preemptions_recompute_total": Meaning("Preempted sequences that were computed again."),
    "preemptions_swap_total": Meaning("Preempted sequences with their KV moved to host memory (`--swap-gb`)."),
    "prefix_cache_queried_tokens_total": Meaning("Prompt tokens for which the node's prefix cache was asked."),
    "prefix_cache_hit_tokens_total": Meaning("Prompt tokens that it had."),
    "prefix_cache_evicted_blocks_total": Meaning("Blocks that the prefix cache gave up for others."),
    "host_cache_hit_tokens_total": Meaning(
        "With `--host-cache-gb`: prompt tokens that were loaded from host memory, or will be. "
        "`pd_prefix_cache_hit_tokens_total` has them too."
    ),
    "host_cache_loaded_blocks_total": Meaning("Blocks that were copied from host memory to the device."),
    "host_cache_saved_blocks_total": Meaning("Blocks that were copied from the device to host memory."),
    "host_cache_evicted_unsaved_blocks_total": Meaning(
        "Blocks that the device gave up without a copy, but not at a reset."
    ),
    "host_cache_loaded_bytes_total": Meaning("Bytes that were loaded, of all ranks."),
    "host_cache_saved_bytes_total": Meaning("Bytes that were saved, of all ranks."),
    "host_cache_blocks": Meaning(
        "Blocks of host memory: `ready` (pinned so far), `cached` (with a content that may be found).", "state"
    ),
    "host_cache_bytes_per_second": Meaning(
        "The speed of loads with which the node and routers reckon, for each rank: 25/53 of what the idle link of "
        "rank 0 copied each way at start; 25 GB/s where that was not measured."
    ),
    "prefills_local_total": Meaning("Requests with a handoff that this node prefilled by itself."),
    "prefills_remote_total": Meaning("Requests with KV from another node."),
    "first_token_redraws_total": Meaning("First tokens that D drew because P sampled otherwise.", "reason"),
    "orphaned_loads": Meaning("Loads with reads under way after their request has ended."),
    "kv_transfer_bytes_total": Meaning("Bytes of KV that this node has read from others."),
    "kv_group_transfer_bytes_total": Meaning("The same by KV group of the model.", "group"),
    "kv_transfer_seconds_total": Meaning("Time from the first read of a load to its confirmation, summed."),
    "kv_peer_bytes_per_second": Meaning(
        "Bandwidth of the last reads from a prefill node; `memory` is `cuda` or `cpu`.", "peer, memory"
    ),
    "kv_peer_slow": Meaning(
        "1 while that is less than a hundredth of the most that it was, or than 2 GB/s between GPUs of one host.",
        "peer, memory",
    ),
    "lora_adapter_loaded": Meaning("With adapters: 1 for each, by where it lies.", "lora_name, level"),
    "lora_requests_info": Meaning(
        "Unix time; the labels name adapters of requests under way, on the device and not yet, at most 100 each.",
        "running_lora_adapters, waiting_lora_adapters, max_lora",
    ),
    "loads_done_total": Meaning("Loads that ended with confirmed KV."),
    "loads_failed_total": Meaning("Loads that ended without.", "reason"),
    "loads_open": Meaning("Loads under way."),
    "loads_reading": Meaning("Loads with reads under way."),
    "leases_open": Meaning("Leases that this node holds for readers."),
    "quarantined_blocks": Meaning("Blocks of failed loads that a late write may still reach."),
    "quarantined_loads": Meaning("Loads that hold such blocks."),
    "control_connections": Meaning("Connections to the control port."),
    "bad_frames_total": Meaning("Control messages that could not be verified or read."),
    "protocol_mismatches_total": Meaning("Of these, messages of another protocol version."),
    "frames_dropped_total": Meaning("Control messages that were dropped because a queue was full."),
    "handshakes_failed_total": Meaning("Connections to the control port without the cluster's key."),
    "pool_up": Meaning("1 while the pool's server answers."),
    "pool_lookups_total": Meaning("Searches of the pool."),
    "pool_hit_tokens_total": Meaning("Prompt tokens with KV from the pool."),
    "pool_misses_total": Meaning("Searches that brought less than the whole prefix.", "reason"),
    "pool_read_bytes_total": Meaning("Bytes read from the pool."),
    "pool_read_seconds_total": Meaning("Time spent reading from it."),
    "pool_blocks_known_total": Meaning("Blocks that the pool already had when they were offered."),
    "pool_blocks_stored_total": Meaning("Blocks that were stored."),
    "pool_blocks_dropped_total": Meaning("Blocks that were not stored.", "reason"),
    "pool_backlog_bytes": Meaning("Copied blocks that wait to be sent to the pool."),
    "pool_searches": Meaning("Searches under way."),
    "disk_up": Meaning("With `--disk-cache-dir`: 1 while files are read and written, 0 after the disk has failed."),
    "disk_files": Meaning("Files of blocks."),
    "disk_bytes": Meaning("Their bytes. `--disk-cache-gb` bounds them."),
    "disk_evicted_total": Meaning("Files that were deleted for others."),
    "disk_written_total": Meaning("Blocks that were written."),
    "disk_dropped_total": Meaning("Blocks that were not, because the disk has failed."),
    "disk_unwritten_total": Meaning("Blocks that host memory gave up before they were written."),
    "disk_backlog_bytes": Meaning("Blocks in host memory that wait to be written."),
    "disk_read_bytes_total": Meaning("Bytes of blocks that were read and whole."),
    "disk_read_seconds_total": Meaning("Time of the threads that read them, digests included."),
    "disk_misses_total": Meaning("Blocks that were to be read and did not come.", "reason"),
}


def router_registry() -> CollectorRegistry:
    return RouterMetrics(NodeTable(RouterConfig(start_empty=True), lambda: 0.0)).registry


def node_registry() -> CollectorRegistry:
    """With an engine's own states, and without what `ENGINE` lists."""
    metrics = NodeMetrics()
    kv = KvStats(num_blocks=1, free=1, cached=0, in_use=0, leased=0, quarantined=0)
    stats = EngineStats(kv=kv, num_running=0, num_waiting=0, num_waiting_for_remote_kv=0, counters={}, gauges={})
    metrics.add_engine(lambda: stats, lambda: dict.fromkeys(_NODE_INFO, ""))
    return metrics.registry


def _registered(registry: CollectorRegistry) -> str:
    labels: dict[str, tuple[str, ...]] = {}
    for collector, names in registry._collector_to_names.items():
        labels |= dict.fromkeys(names, getattr(collector, "_labelnames", ()))
    rows = []
    for family in registry.collect():
        name = f"{family.name}_total" if family.type == "counter" else family.name
        found = labels.get(family.name) or tuple(getattr(family, "_labelnames", ()))
        rows.append([code(name), family.type, ", ".join(map(code, found)), family.documentation])
    return table(["metric", "type", "labels", "meaning"], sorted(rows))


def _engine() -> str:
    rows = []
    for name, meaning in ENGINE.items():
        kind = "counter" if name.endswith("_total") else "gauge"
        rows.append([code(f"pd_{name}"), kind, _labels(meaning), meaning.text])
    return table(["metric", "type", "labels", "meaning"], rows)


def _labels(meaning: Meaning) -> str:
    return ", ".join(map(code, meaning.label.split(", ")))


def _alerts() -> str:
    groups = yaml.safe_load((ROOT / "helm" / "pd-cluster" / "files" / "alerts.yaml").read_text())["groups"]
    rows = [
        [code(rule["alert"]), rule["labels"]["severity"], rule.get("for", "at once"), _plain(rule["annotations"])]
        for group in groups
        for rule in group["rules"]
    ]
    return table(["alert", "severity", "after", "what it says, and where to look"], rows)


def _plain(annotations: dict[str, str]) -> str:
    """Summary and description without the template's words."""
    text = f"{annotations['summary']}. {annotations['description']}"
    for old, new in (
        ("{{ $labels.pod }}{{ $labels.instance }}", "a node"),
        ("{{ $labels.role }} node {{ $labels.node }}", "A node"),
        ("{{ $value | humanizePercentage }}", "a share above the limit"),
        ("{{ $value | humanizeDuration }}", "the limit"),
        ("{{ $labels.peer }}", "a prefill node"),
        ("{{ $value | humanize }}B/s", "less than 5 GB/s"),
        ("node source {{ $labels.source }}", "source of nodes"),
        ("{{ $value }} ", ""),
    ):
        text = text.replace(old, new)
    return text[0].upper() + text[1:]


PARTS = {
    "router-metrics": lambda: _registered(router_registry()),
    "node-metrics": lambda: _registered(node_registry()),
    "engine-metrics": _engine,
    "alerts": _alerts,
}
