"""The engine with the real worker on CPU and a tiny cache before a tier in host memory: no answer is altered."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from pd_cluster.worker.copy_streams import CopyStreams
from tests.engine.drafting_node import Node, expect_same, roomy
from tests.engine.host_nodes import expect_hits, host_node, serve, tenants_requests, tiered
from tests.engine.test_core_pipeline import CONFIG

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.engine.drafting_node import Answered

__all__ = ["roomy"]

HOST_GB = 0.004


@pytest.fixture(scope="module")
def small() -> Iterator[Node]:
    """A cache of 14 blocks, and more of them in host memory."""
    for node in host_node(HOST_GB):
        assert node.executor.num_host_blocks > 14
        yield node


ASKED = tenants_requests(16, 1, 3, (48, 64), 20)


@pytest.fixture(scope="module")
def single(roomy: Node, small: Node) -> Answered:
    """Without any cache of prefixes. Drafters know the answers."""
    found = serve(roomy.bench(prefix_caching=False), ASKED)
    prompts = {one.request_id: one.prompt_token_ids for one in ASKED}
    small.answers = [[*prompts[name], *ids] for (name, _), ids in found.ids.items()]
    return found


@pytest.mark.parametrize(
    ("kind", "mode", "runs_early"),  # without drafts steps overlap as with some
    [
        ("", "off", False),
        ("", "on", True),
        pytest.param("", "on", False, marks=pytest.mark.slow),
        ("mixed", "on", False),
    ],
)
def test_hits_in_host_memory_alter_no_answer(
    small: Node, single: Answered, kind: str, mode: str, runs_early: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Beside preemptions and swaps; with steps that overlap, and with drafts."""
    monkeypatch.setattr(CopyStreams, "runs_early", runs_early)
    bench = tiered(small, kind, mode, HOST_GB)
    expect_same(serve(bench, ASKED), single)
    expect_hits(bench, 100)


def test_prices_of_loads_alter_no_answer(small: Node, single: Answered) -> None:
    """A block takes a quarter of what computing it does at first, so that it is dear beside streams and in a queue."""
    bench = tiered(small, "", "on", HOST_GB, CONFIG.cache.block_size * 5e-6)
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
    bench = tiered(small, "", "on", HOST_GB)
    expect_same(serve(bench, asked), single)
    expect_hits(bench, 3000)
