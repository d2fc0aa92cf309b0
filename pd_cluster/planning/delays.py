"""What a request waits for beside steps, in seconds, as measured constants."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Delays:
    """Defaults: what the handover of 8B took on two H200s of one host (benchmarks/results/handover_gpu.jsonl)."""

    first_token_s: float = 1.5e-3  # from P's step to the client
    link_s: float = 4e-3  # from P's step until D has the KV: announce, post, link, confirm, schedule
    api_s: float = 0.0  # from the client to the engine
    feed_s: float = 0.0  # age of a node's word at the router, at most
