"""Nodes with a tiny cache before a tier in host memory, and prompts that have heads in common."""

from __future__ import annotations

import random
from dataclasses import replace
from math import inf
from typing import TYPE_CHECKING

from pd_cluster.protocol.messages import AddRequest
from pd_cluster.protocol.sampling_params import SamplingParams
from pd_cluster.worker.device_executor import DeviceExecutor
from tests.engine.drafting_node import Node
from tests.engine.test_core_pipeline import CONFIG, make_connector
from tests.worker.driver import poison

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from tests.engine.drafting_node import Answered, Told

SALTS = ("", "", "one", "other")


def host_node(host_gb: float) -> Iterator[Node]:
    """A cache of 14 blocks before so much host memory, all of it ready. For a fixture."""
    cache = replace(CONFIG.cache, num_blocks=14, swap_gb=host_gb, host_cache_gb=host_gb)
    executor = DeviceExecutor.started(replace(CONFIG, cache=cache), lambda _: None)
    for connector in make_connector(executor):
        assert executor.num_host_blocks == executor.most_host_blocks
        yield Node(executor, connector)
    executor.close()


def tenants_requests(num: int, seed: int, num_heads: int, lengths: Sequence[int], most: int) -> list[AddRequest]:
    """Prompts of a few heads, of these lengths, and tails, by several tenants. Answers of 2 to `most` tokens."""
    rng = random.Random(seed)
    heads = [[rng.randrange(5, 200) for _ in range(64)] for _ in range(num_heads)]
    asked = []
    for index in range(num):
        prompt = rng.choice(heads)[: rng.choice(lengths)] + [rng.randrange(5, 200)] * rng.choice((5, 20, 37))
        sampling = SamplingParams(
            max_tokens=rng.randint(2, most), temperature=rng.choice((0.0, 0.9)), seed=index, ignore_eos=True, logprobs=1
        )
        asked.append(AddRequest(f"r{index}", prompt, sampling, salt=rng.choice(SALTS)))
    return asked


def serve(bench: Told, asked: list[AddRequest], wave: int = 8) -> Answered:
    """The answers to requests of which so many are open at once."""
    for first in range(0, len(asked), wave):
        for one in asked[first : first + wave]:
            bench.send(one)
        bench.run()
    return bench.answered()


def tiered(node: Node, kind: str, mode: str, host_gb: float, block_s: float = 0.0) -> Told:
    """A bench that loads whatever is there, or what is worth so many seconds a block, with NaN in all host memory."""
    for tensor in node.executor._cache.hosts:
        poison(tensor)
    bench = node.bench(kind, mode, host_cache_gb=host_gb)
    host = bench.core._blocks.host
    bench.core._blocks.copies.wait_s = 0.0
    host.gb_s = bench.core._blocks.pools[0].group.block_bytes / block_s / 1e9 if block_s else inf
    return bench


def expect_hits(bench: Told, num_tokens: int) -> None:
    assert bench.stats is not None
    counters = bench.stats.counters
    assert counters["host_cache_hit_tokens_total"] >= num_tokens
    assert counters["host_cache_loaded_blocks_total"] >= num_tokens // CONFIG.cache.block_size
    assert bench.core._blocks.host.idle
    assert bench.core._blocks.idle
