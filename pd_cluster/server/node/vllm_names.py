"""Our metrics under the names of vLLM, for dashboards, autoscalers and endpoint pickers that know those. Pure.

Names and meanings are those of vLLM's v1 engine, in its document "Production Metrics". A series has the labels
`model_name` and `engine`, and sums ours over their labels but those of _KEPT. What has no counterpart here is left out.
"""

from __future__ import annotations

from collections import defaultdict
from typing import TYPE_CHECKING

from prometheus_client.core import Metric

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

NAMES = {
    "pd_num_running": ("num_requests_running",),
    "pd_num_waiting": ("num_requests_waiting",),
    "pd_time_to_first_token_seconds": ("time_to_first_token_seconds",),
    # the second is the older name of the first
    "pd_inter_token_latency_seconds": ("inter_token_latency_seconds", "time_per_output_token_seconds"),
    "pd_time_per_output_token_seconds": ("request_time_per_output_token_seconds",),
    "pd_request_latency_seconds": ("e2e_request_latency_seconds",),
    "pd_queue_seconds": ("request_queue_time_seconds",),
    "pd_prefill_seconds": ("request_prefill_time_seconds",),
    "pd_prompt_tokens": ("prompt_tokens",),
    "pd_generation_tokens": ("generation_tokens",),
    "pd_prefix_cache_queried_tokens": ("prefix_cache_queries",),
    "pd_prefix_cache_hit_tokens": ("prefix_cache_hits",),
    "pd_host_cache_hit_tokens": ("external_prefix_cache_hits",),  # ours are among `prefix_cache_hits`, theirs are not
    "pd_spec_decode_num_drafts": ("spec_decode_num_drafts",),
    "pd_spec_decode_num_draft_tokens": ("spec_decode_num_draft_tokens",),
    "pd_spec_decode_num_accepted_tokens": ("spec_decode_num_accepted_tokens",),
    "pd_spec_decode_num_accepted_tokens_per_pos": ("spec_decode_num_accepted_tokens_per_pos",),
    "pd_lora_requests_info": ("lora_requests_info",),
    "pd_lora_adapter_loaded": ("lora_adapter_loaded",),
}
"""Our family -> theirs, without `vllm:`."""
_KEPT = (  # labels that theirs have, too
    "le", "position", "lora_name", "level", "running_lora_adapters", "waiting_lora_adapters", "max_lora",
)  # fmt: skip
# Theirs asks what is outside for the tokens that the device has not. Our hits are those of both tiers
_EXTERNAL = ("pd_prefix_cache_queried_tokens", "pd_prefix_cache_hit_tokens", "pd_host_cache_hit_tokens")
_PREEMPTIONS = ("pd_preemptions_recompute", "pd_preemptions_swap")


def vllm_metrics(families: Iterable[Metric], model: str) -> Iterator[Metric]:
    """The families of NAMES under their other names, and those that are computed from several."""
    labels = {"model_name": model, "engine": "0"}
    known = {family.name: family for family in families}
    for name, theirs in NAMES.items():
        if name in known:
            yield from (_renamed(known[name], f"vllm:{one}", labels) for one in theirs)
    if "pd_kv_blocks" in known and "pd_kv_num_blocks" in known:
        in_use = sum(one.value for one in known["pd_kv_blocks"].samples if one.labels["state"] == "in_use")
        usage = Metric("vllm:kv_cache_usage_perc", "Share of the KV cache in use, 0 to 1.", "gauge")
        usage.add_sample(usage.name, labels, in_use / max(1.0, known["pd_kv_num_blocks"].samples[0].value))
        yield usage
    if all(name in known for name in _EXTERNAL):
        queried, found, in_host = (sum(one.value for one in known[name].samples) for name in _EXTERNAL)
        external = Metric("vllm:external_prefix_cache_queries", "Prompt tokens that the device has not.", "counter")
        external.add_sample("vllm:external_prefix_cache_queries_total", labels, queried - found + in_host)
        yield external
    preemptions = Metric("vllm:num_preemptions", "Preempted sequences.", "counter")
    total = sum(sample.value for name in _PREEMPTIONS if name in known for sample in known[name].samples)
    preemptions.add_sample("vllm:num_preemptions_total", labels, total)
    yield preemptions


def _renamed(family: Metric, name: str, labels: dict[str, str]) -> Metric:
    sums: dict[tuple[str, tuple[tuple[str, str], ...]], float] = defaultdict(float)  # by suffix and kept labels
    for sample in family.samples:
        kept = tuple((label, sample.labels[label]) for label in _KEPT if label in sample.labels)
        sums[sample.name.removeprefix(family.name), kept] += sample.value
    renamed = Metric(name, family.documentation, family.type)
    for (suffix, kept), value in sums.items():
        renamed.add_sample(name + suffix, labels | dict(kept), value)
    return renamed
