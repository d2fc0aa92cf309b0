"""Drafts on a GPU, in captured and in plain steps: answers and caches are those of single tokens."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import torch

from pd_cluster.protocol.sampling_params import SamplingParams
from tests.drafters import KINDS
from tests.engine.drafting_node import Answered, Node, Wanted, expect_handoff, expect_same, num_drafts
from tests.engine.test_core_pipeline import make_connector
from tests.worker.conftest import VOCAB_SIZE
from tests.worker.driver import random_prompts
from tests.worker.test_worker_cuda import cuda_executor

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.worker.conftest import ModelStore

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]
TEMPERATURES = (0.0, 0.8, 1.0, 0.0, 0.6)
WANTED = Wanted(
    random_prompts((40, 70, 3, 25, 90), VOCAB_SIZE, 8),
    [SamplingParams(max_tokens=40, temperature=t, seed=3, ignore_eos=True) for t in TEMPERATURES],
)


@pytest.fixture(scope="module", params=["qwen3", "qwen3-some-windows"])
def node(request: pytest.FixtureRequest, models: ModelStore) -> Iterator[Node]:
    executor = cuda_executor(models.get(request.param).directory, speculation="lookup")
    assert any(size.has_drafts for size in executor.graph_sizes)
    for connector in make_connector(executor):
        yield Node(executor, connector)
    executor.close()


@pytest.fixture(scope="module")
def single(node: Node) -> Answered:
    """Without a drafter."""
    return WANTED.answered(node)


@pytest.mark.parametrize("mode", ["off", "on"])
@pytest.mark.parametrize("kind", KINDS)
def test_drafts_change_no_answer_and_leave_no_trace(node: Node, single: Answered, kind: str, mode: str) -> None:
    bench = node.bench(kind, mode)
    WANTED.send(bench)
    found = bench.answered()
    expect_same(found, single)
    assert num_drafts(bench) > 100
    assert (found.hashes, found.free) == (single.hashes, single.free), "the cache is that of single tokens"


def test_drafts_after_a_handoff(node: Node, single: Answered) -> None:
    bench = node.bench("mixed", "on", prefix_caching=False)
    WANTED.hand_over(bench)
    expect_handoff(bench, single, "mixed")
