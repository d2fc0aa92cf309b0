"""The engine with the real worker on CPU and a tiny cache before a tier in host memory: no answer is altered."""

from __future__ import annotations

from math import inf
from typing import TYPE_CHECKING

import pytest

from pd_cluster.worker.copy_streams import CopyStreams
from tests.engine.drafting_node import Node, Told, expect_same, roomy
from tests.engine.host_nodes import host_node, tenants_requests
from tests.engine.test_core_pipeline import CONFIG
from tests.worker.driver import poison

if TYPE_CHECKING:
    from collections.abc import Iterator

    from pd_cluster.protocol.messages import AddRequest
    from tests.engine.drafting_node import Answered

__all__ = ["roomy"]

HOST_GB = 0.004
WAVE = 8


@pytest.fixture(scope="module")
def small() -> Iterator[Node]:
    """A cache of 14 blocks, and more of them in host memory."""
    for node in host_node(HOST_GB):
        assert node.executor.num_host_blocks > 14
        yield node


ASKED = tenants_requests(24, 1, 4, (32, 48, 64), 24)


def serve(bench: Told, asked: list[AddRequest]) -> Answered:
    """The answers to requests of which WAVE are open at once."""
    for first in range(0, len(asked), WAVE):
        for one in asked[first : first + WAVE]:
            bench.send(one)
        bench.run()
    return bench.answered()


def tiered(node: Node, kind: str = "", mode: str = "off", block_s: float = 0.0) -> Told:
    """A bench that loads whatever is there, or what is worth so many seconds a block, with NaN in all host memory."""
    for tensor in node.executor._cache.hosts:
        poison(tensor)
    bench = node.bench(kind, mode, host_cache_gb=HOST_GB)
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


@pytest.fixture(scope="module")
def single(roomy: Node, small: Node) -> Answered:
    """Without any cache of prefixes. Drafters know the answers."""
    found = serve(roomy.bench(prefix_caching=False), ASKED)
    prompts = {one.request_id: one.prompt_token_ids for one in ASKED}
    small.answers = [[*prompts[name], *ids] for (name, _), ids in found.ids.items()]
    return found


@pytest.mark.parametrize(
    ("kind", "mode", "runs_early"), [("", "off", False), ("", "on", True), ("", "on", False), ("mixed", "on", False)]
)
def test_hits_in_host_memory_alter_no_answer(
    small: Node, single: Answered, kind: str, mode: str, runs_early: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Beside preemptions and swaps; with steps that overlap, and with drafts."""
    monkeypatch.setattr(CopyStreams, "runs_early", runs_early)
    bench = tiered(small, kind, mode)
    expect_same(serve(bench, ASKED), single)
    expect_hits(bench, 100)


def test_prices_of_loads_alter_no_answer(small: Node, single: Answered) -> None:
    """A block takes a quarter of what computing it does at first, so that it is dear beside streams and in a queue."""
    bench = tiered(small, mode="on", block_s=CONFIG.cache.block_size * 5e-6)
    expect_same(serve(bench, ASKED), single)
    expect_hits(bench, 1)


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("runs_early", [False, True])
def test_hits_alter_none_of_500_answers(
    roomy: Node, small: Node, runs_early: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(CopyStreams, "runs_early", runs_early)
    asked = tenants_requests(500, 2, 4, (32, 48, 64), 24)
    single = serve(roomy.bench(prefix_caching=False), asked)
    bench = tiered(small, mode="on")
    expect_same(serve(bench, asked), single)
    expect_hits(bench, 3000)
