"""The Grafana dashboard of the chart. `python -m docs.generate` writes helm/pd-cluster/files/dashboard.json.

Every expression has the selector NS, the dashboard's namespaces. Nodes are told apart by role through `pd_node_info`,
so that it needs no labels of Kubernetes.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import Any

DOCUMENT = "helm/pd-cluster/files/dashboard.json"
NS = 'namespace=~"$namespace"'
RATE = "[$__rate_interval]"
_SOURCE = {"type": "prometheus", "uid": "${datasource}"}
_LETTERS = "ABCDEFGHIJ"


@dataclass(frozen=True)
class Panel:
    """`queries`: (expression, legend). `steps`: (value, color) of thresholds, drawn as lines."""

    title: str
    text: str
    queries: tuple[tuple[str, str], ...]
    unit: str = "short"
    width: int = 6
    stacked: bool = False
    steps: tuple[tuple[float, str], ...] = ()
    options: dict[str, Any] = field(default_factory=dict)


def rate(name: str, selector: str = "") -> str:
    return f"rate({name}{{{NS}{',' if selector else ''}{selector}}}{RATE})"


def quantile(q: float, name: str, selector: str = "", by: str = "") -> str:
    return f"histogram_quantile({q}, sum by (le{', ' if by else ''}{by}) ({rate(name + '_bucket', selector)}))"


def mean(name: str, selector: str = "") -> str:
    return f"sum({rate(name + '_sum', selector)}) / sum({rate(name + '_count', selector)})"


def by_role(expression: str) -> str:
    """Sum over the nodes of a role. Scrapes of one node have the same `instance`; in Kubernetes also `pod`."""
    info = f"max by (namespace, instance, role) (pd_node_info{{{NS}}})"
    return f"sum by (role) (({expression}) * on (namespace, instance) group_left (role) {info})"


def quantiles(name: str, label: str, selector: str = "") -> tuple[tuple[str, str], ...]:
    return tuple((quantile(q, name, selector), f"{label} p{q * 100:g}") for q in (0.5, 0.95, 0.99))


_TAKE, _PREFILL, _HERE = 'work="take_over"', 'work="prefill"', 'work="generate"'
_COMPUTED = 'work!="take_over"'
_HANDED = 'order!="direct"'
_MET, _MISSED = 'result="met"', 'result!="met"'
_IN_USE = 'state="in_use"'
ROWS: tuple[tuple[str, tuple[Panel, ...]], ...] = (
    (
        "What users feel",
        (
            Panel("Requests", "By how they ended. broken: the stream had begun and could not be finished.",
                  ((f"sum by (outcome) ({rate('pd_router_requests_total')})", "{{outcome}}"),), "reqps", stacked=True),
            Panel("Time to first token", "Streams, at the router: from arrival to the first piece for the client.",
                  quantiles("pd_router_time_to_first_token_seconds", "TTFT"), "s", steps=((2, "orange"), (5, "red"))),
            Panel("First token over prediction", "Time to the first token by what the router predicted when it chose: "
                  "far from 1 the router's sums are wrong.",
                  tuple((quantile(q, "pd_router_time_to_first_token_ratio", by="order"), f"{{{{order}}}} p{q * 100:g}")
                        for q in (0.5, 0.9))),
            Panel("Between tokens", "Streams, at the router: time between two pieces over the tokens of the later one, "
                  "and the longest time between two pieces of a stream.",
                  (*quantiles("pd_router_inter_token_latency_seconds", "ITL"),
                   (quantile(0.95, "pd_router_longest_gap_seconds"), "longest gap p95")), "s",
                  steps=((0.1, "orange"), (0.25, "red"))),
            Panel("SLO attainment", "Share of requests within --slo-ttft-ms and --slo-tpot-ms of the router; what was "
                  "missed first. Empty without targets.",
                  ((f'sum({rate("pd_router_slo_requests_total", _MET)})'
                    f" / sum({rate('pd_router_slo_requests_total')})", "met"),
                   (f'sum by (result) ({rate("pd_router_slo_requests_total", _MISSED)})'
                    f" / on () group_left () sum({rate('pd_router_slo_requests_total')})", "missed: {{result}}")),
                  "percentunit", steps=((0, "red"), (0.95, "orange"), (0.99, "green"))),
            Panel("Why this way", "Order of each request, and the reason for it.",
                  ((f"sum by (order, reason) ({rate('pd_router_requests_total')})", "{{order}}: {{reason}}"),),
                  "reqps", stacked=True),
            Panel("Tokens", "As clients sent and got them: each prompt counts once.",
                  ((f"sum by (model) ({rate('pd_router_prompt_tokens_total')})", "{{model}} prompt"),
                   (f"sum by (model) ({rate('pd_router_cached_tokens_total')})", "{{model}} cached"),
                   (f"sum by (model) ({rate('pd_router_generation_tokens_total')})", "{{model}} output"))),
            Panel("Healthy nodes", "As the routers see them.",
                  ((f"sum by (role) (max by (role, url) (pd_router_node_healthy{{{NS}}}))", "{{role}}"),),
                  steps=((0, "red"), (1, "green"))),
        ),
    ),
    (
        "More prefill or more decode nodes?",
        (
            Panel("Prompt tokens waiting for prefill nodes", "Seconds of work at the pace of the last minutes: above "
                  "the TTFT target, add prefill nodes.",
                  ((f'sum(max by (url) (pd_router_node_queued_tokens{{{NS},role="prefill"}}))'
                    f" / sum({rate('pd_prompt_tokens_total', _COMPUTED)})",
                    "queue of P"),), "s", 8, steps=((1, "orange"), (5, "red"))),
            Panel("Generations and slots of decode nodes", "Sequences that run, and those that wait for a slot or for "
                  "blocks: if they wait, add decode nodes.",
                  ((by_role(f"pd_num_running{{{NS}}}"), "{{role}} running"),
                   (by_role(f"pd_num_waiting{{{NS}}}"), "{{role}} waiting"),
                   (by_role(f"pd_num_waiting_for_remote_kv{{{NS}}}"), "{{role}} waiting for KV")), width=8),
            Panel("KV blocks in use by role", "Leased and quarantined ones are part of it; the rest is free or cache.",
                  ((f'{by_role(f"sum by (namespace, instance) (pd_kv_blocks{{{NS},{_IN_USE}}})")}'
                    f" / {by_role(f'pd_kv_num_blocks{{{NS}}}')}", "{{role}}"),),
                  "percentunit", 8, steps=((0.9, "orange"), (0.97, "red"))),
        ),
    ),
    (
        "Where the first token's time goes",
        (
            Panel("Handed over: mean seconds, stacked", "At the prefill node, then until the client has the token. "
                  "Time at the router and between processes is in the rest.",
                  ((mean("pd_prefill_queue_seconds", _TAKE), "P: queue"),
                   (f"{mean('pd_prefill_leg_seconds', _TAKE)} - ({mean('pd_prefill_queue_seconds', _TAKE)})",
                    "P: compute"),
                   (f"clamp_min({mean('pd_router_time_to_first_token_seconds', _HANDED)}"
                    f" - ({mean('pd_prefill_leg_seconds', _TAKE)}), 0)", "handoff and router")),
                  "s", 8, stacked=True),
            Panel("Second token after a handoff: mean seconds, stacked", "At the decode node: blocks, KV, slot, step.",
                  tuple((mean(f"pd_{name}_seconds", _TAKE), f"D: {name.replace('_', ' ')}")
                        for name in ("queue", "transfer", "admit", "first_decode")), "s", 8, stacked=True),
            Panel("Not handed over: mean seconds, stacked", "Prompts that the node that generates has computed.",
                  tuple((mean(f"pd_{name}_seconds", _HERE), name) for name in ("queue", "prefill")),
                  "s", 8, stacked=True),
            Panel("p95 at prefill nodes", "Queue and compute of prompts for other nodes.",
                  tuple((quantile(0.95, f"pd_{name}_seconds", _PREFILL), name) for name in ("queue", "prefill")),
                  "s", 8, steps=((2, "orange"), (5, "red"))),
            Panel("p95 at decode nodes", "Of requests taken over.",
                  tuple((quantile(0.95, f"pd_{name}_seconds", _TAKE), name.replace("_", " "))
                        for name in ("queue", "transfer", "admit", "first_decode")), "s", 8),
            Panel("Steps of a handoff, p95", "From the announcement of the prompt's end.",
                  ((quantile(0.95, "pd_handover_step_seconds", by="step"), "{{step}}"),
                   (quantile(0.95, "pd_router_ticket_seconds"), "ticket at the router")), "s", 8),
        ),
    ),
    (
        "Handoff",
        (
            Panel("Handoffs and fallbacks", "Which node computed the prompt, and why handoffs did not go as asked.",
                  ((f"sum by (prefill) ({rate('pd_handoffs_total')})", "prefill {{prefill}}"),
                   (f"sum by (reason) ({rate('pd_handoff_fallbacks_total')})", "fallback: {{reason}}")), "reqps"),
            Panel("KV read", "Bytes per second into decode nodes, and while a read runs.",
                  ((f"sum({rate('pd_kv_transfer_bytes_total')})", "all nodes"),
                   (f"sum({rate('pd_kv_transfer_bytes_total')}) / sum({rate('pd_kv_transfer_seconds_total')})",
                    "per second of reading"),
                   (f"max by (peer) (pd_kv_peer_bytes_per_second{{{NS}}})", "link to {{peer}}")), "Bps"),
            Panel("Loads", "Open now; failed ones by reason, per second.",
                  ((f"sum(pd_loads_open{{{NS}}})", "open"),
                   (f"sum by (reason) ({rate('pd_loads_failed_total')})", "failed: {{reason}}"),
                   (f"sum({rate('pd_loads_done_total')})", "done"))),
            Panel("Leases and quarantine", "Leases that readers hold on prefill nodes; blocks that a failed read may "
                  "still write.",
                  ((f"sum(pd_leases_open{{{NS}}})", "leases"),
                   (f"sum(pd_quarantined_blocks{{{NS}}})", "quarantined blocks")), steps=((1, "orange"),)),
        ),
    ),
    (
        "Nodes",
        (
            Panel("Tokens computed by role", "Prompt tokens less those of the node's own cache; output tokens.",
                  ((by_role(f"sum by (namespace, instance) ({rate('pd_prompt_tokens_total', _COMPUTED)}"
                            f" - {rate('pd_cached_tokens_total', _COMPUTED)})"),
                    "{{role}} prompt"),
                   (by_role(rate("pd_generation_tokens_total")), "{{role}} output"))),
            Panel("Running and waiting", "Sequences by node.",
                  ((f"pd_num_running{{{NS}}}", "{{pod}}{{instance}} running"),
                   (f"pd_num_waiting{{{NS}}}", "{{pod}}{{instance}} waiting"))),
            Panel("Prefix cache hits by role", "Share of prompt tokens found in the node's own cache.",
                  ((f"{by_role(rate('pd_prefix_cache_hit_tokens_total'))}"
                    f" / {by_role(rate('pd_prefix_cache_queried_tokens_total'))}", "{{role}}"),), "percentunit"),
            Panel("Failed legs", "Calls of the router to nodes that failed.",
                  ((f"sum by (leg, node, kind) ({rate('pd_router_leg_failures_total')})",
                    "{{leg}} {{node}} {{kind}}"),), "reqps"),
            Panel("Step time", "Mean length of an engine step.",
                  ((f"{rate('pd_engine_step_seconds_total')} / {rate('pd_engine_steps_total')}",
                    "{{pod}}{{instance}}"),), "s", 8),
            Panel("Tokens per step", "How full steps are: computed tokens, also drafts that were refused.",
                  ((f"{rate('pd_engine_step_tokens_total')} / {rate('pd_engine_steps_total')}",
                    "{{pod}}{{instance}}"),), width=8),
            Panel("Preemptions", "Sequences that lost their blocks.",
                  ((f"sum({rate('pd_preemptions_recompute_total')})", "recomputed"),
                   (f"sum({rate('pd_preemptions_swap_total')})", "swapped")), "reqps", 8, steps=((0.5, "orange"),)),
        ),
    ),
    (
        "Host cache (nodes with --host-cache-gb)",
        (
            Panel("Hits by tier", "Share of prompt tokens found on the device, and in host memory.",
                  ((f"({by_role(rate('pd_prefix_cache_hit_tokens_total'))}"
                    f" - {by_role(rate('pd_host_cache_hit_tokens_total'))})"
                    f" / {by_role(rate('pd_prefix_cache_queried_tokens_total'))}", "{{role}} device"),
                   (f"{by_role(rate('pd_host_cache_hit_tokens_total'))}"
                    f" / {by_role(rate('pd_prefix_cache_queried_tokens_total'))}", "{{role}} host")), "percentunit"),
            Panel("Copies", "Bytes per second to and from host memory.",
                  ((by_role(rate("pd_host_cache_loaded_bytes_total")), "{{role}} loaded"),
                   (by_role(rate("pd_host_cache_saved_bytes_total")), "{{role}} saved"),
                   (f"min(pd_host_cache_bytes_per_second{{{NS}}})", "what routers reckon a node loads, least")), "Bps"),
            Panel("Blocks saved and lost", "Lost: given up by the device before they had a copy. Many of them: prompts "
                  "come faster than copies.",
                  ((by_role(rate("pd_host_cache_saved_blocks_total")), "{{role}} saved"),
                   (by_role(rate("pd_host_cache_evicted_unsaved_blocks_total")), "{{role}} lost"))),
            Panel("Host memory", "Blocks that are pinned so far, and those with a content.",
                  ((by_role(f'pd_host_cache_blocks{{{NS},state="ready"}}'), "{{role}} ready"),
                   (by_role(f'pd_host_cache_blocks{{{NS},state="cached"}}'), "{{role}} cached"))),
        ),
    ),
    (
        "Drafts (nodes with --speculation)",
        (
            Panel("Drafts", "Runs of drafts, of one sequence in one step, and tokens in them.",
                  ((by_role(rate("pd_spec_decode_num_drafts_total")), "{{role}} runs"),
                   (by_role(rate("pd_spec_decode_num_draft_tokens_total")), "{{role}} drafts"),
                   (by_role(rate("pd_spec_decode_num_accepted_tokens_total")), "{{role}} accepted"))),
            Panel("Acceptance", "Share of the drafts that were accepted.",
                  ((f"{by_role(rate('pd_spec_decode_num_accepted_tokens_total'))}"
                    f" / {by_role(rate('pd_spec_decode_num_draft_tokens_total'))}", "{{role}}"),), "percentunit"),
            Panel("Accepted drafts of a run", "Mean. The stream gets one token more: the one after them.",
                  ((f"{by_role(rate('pd_spec_decode_num_accepted_tokens_total'))}"
                    f" / {by_role(rate('pd_spec_decode_num_drafts_total'))}", "{{role}}"),)),
            Panel("Acceptance by place", "Share of all runs of which the draft at this place was accepted.",
                  ((f"sum by (position) ({rate('pd_spec_decode_num_accepted_tokens_per_pos_total')})"
                    f" / on () group_left () sum({rate('pd_spec_decode_num_drafts_total')})", "place {{position}}"),),
                  "percentunit"),
        ),
    ),
)  # fmt: skip


def _drawn(panel: Panel, number: int, x: int, y: int) -> dict[str, Any]:
    custom: dict[str, Any] = {"fillOpacity": 40 if panel.stacked else 10, "showPoints": "never"}
    defaults: dict[str, Any] = {"unit": panel.unit, "min": 0, "custom": custom}
    if panel.stacked:
        custom["stacking"] = {"mode": "normal", "group": "A"}
    if panel.steps:
        custom["thresholdsStyle"] = {"mode": "line"}
        first = {"color": "transparent", "value": None}
        steps = [first, *({"color": color, "value": value} for value, color in panel.steps)]
        defaults["thresholds"] = {"mode": "absolute", "steps": steps}
    return {
        "id": number,
        "type": "timeseries",
        "title": panel.title,
        "description": panel.text,
        "datasource": _SOURCE,
        "gridPos": {"h": 8, "w": panel.width, "x": x, "y": y},
        "fieldConfig": {"defaults": defaults, "overrides": []},
        "options": {
            "legend": {"displayMode": "list", "placement": "bottom"},
            "tooltip": {"mode": "multi", "sort": "desc"},
        },
        "targets": [
            {"refId": letter, "expr": expression, "legendFormat": legend}
            for letter, (expression, legend) in zip(_LETTERS, panel.queries, strict=False)
        ],
    }


def dashboard() -> dict[str, Any]:
    panels: list[dict[str, Any]] = []
    y = 0
    for title, row in ROWS:
        grid = {"h": 1, "w": 24, "x": 0, "y": y}
        panels.append({"id": len(panels) + 1, "type": "row", "title": title, "collapsed": False, "gridPos": grid,
                       "panels": []})  # fmt: skip
        x, y = 0, y + 1
        for panel in row:
            if x + panel.width > 24:
                x, y = 0, y + 8
            panels.append(_drawn(panel, len(panels) + 1, x, y))
            x += panel.width
        y += 8
    variables: list[dict[str, Any]] = [
        {"name": "datasource", "type": "datasource", "query": "prometheus", "label": "Prometheus"},
        {
            "name": "namespace", "type": "query", "label": "Namespace", "datasource": _SOURCE,
            "query": "label_values(pd_node_info, namespace)", "refresh": 2, "includeAll": True, "allValue": ".*",
            "current": {"text": "All", "value": "$__all"},
        },
    ]  # fmt: skip
    return {
        "title": "pd-cluster", "uid": "pd-cluster", "tags": ["llm", "pd-cluster"], "schemaVersion": 39, "version": 2,
        "editable": True, "refresh": "10s", "time": {"from": "now-30m", "to": "now"}, "timezone": "browser",
        "templating": {"list": variables}, "panels": panels,
    }  # fmt: skip


def text() -> str:
    return json.dumps(dashboard(), indent=1) + "\n"
