"""Answers with drafts and grammars of steps that are replayed are those of steps that are launched, without drafts."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import pytest

from pd_cluster.worker.cuda_graphs.graph_sizes import GraphSizes, decode_sizes, draft_sizes
from pd_cluster.worker.device_executor import DeviceExecutor
from tests.engine.drafting_node import Node, Wanted, expect_same, num_drafts
from tests.engine.test_core_pipeline import CONFIG, make_connector
from tests.engine.test_drafted_answers import WANTED as OF_ALL_KINDS
from tests.engine.test_drafted_grammars import WANTED as OF_GRAMMARS
from tests.patient_masks import be_patient
from tests.worker.repeated_graphs import Repeated, near_sizes, with_graphs

if TYPE_CHECKING:
    from collections.abc import Iterator

MAX_SEQS, MAX_TOKENS = CONFIG.scheduler.max_num_seqs, CONFIG.scheduler.max_num_batched_tokens
SIZES = [*decode_sizes(MAX_SEQS), *draft_sizes(2 * MAX_SEQS, MAX_SEQS), *near_sizes(MAX_TOKENS, MAX_SEQS)]


@dataclass(frozen=True)
class Replaying:
    """A node that replays each step of which it has a size, or none."""

    node: Node
    repeated: Repeated

    def replays(self, *, all_steps: bool) -> Repeated:
        repeated = self.repeated
        self.node.executor._graph_sizes = GraphSizes(repeated.graphs.sizes if all_steps else ())
        repeated.replayed.clear()
        repeated.drawn.clear()
        return repeated


@pytest.fixture(scope="module", params=[14, 96], ids=["small", "roomy"])
def replaying(request: pytest.FixtureRequest) -> Iterator[Replaying]:
    config = replace(
        CONFIG, cache=replace(CONFIG.cache, num_blocks=request.param),
        scheduler=replace(CONFIG.scheduler, speculation="lookup"),
    )  # fmt: skip
    executor = DeviceExecutor.started(config, lambda _: None)
    repeated = with_graphs(executor, SIZES)
    for connector in make_connector(executor):
        yield Replaying(Node(executor, connector), repeated)
    executor.close()


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["off", "on"])
@pytest.mark.parametrize("wanted", [OF_ALL_KINDS, OF_GRAMMARS], ids=["kinds", "grammars"])
def test_replays_change_no_answer(
    replaying: Replaying, wanted: Wanted, mode: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With masks that wait, penalties, log-probabilities and n answers beside each other; with preemptions."""
    be_patient(monkeypatch)
    replaying.replays(all_steps=False)
    single = wanted.answered(replaying.node)
    repeated = replaying.replays(all_steps=True)
    bench = replaying.node.bench("mixed", mode)
    wanted.send(bench)
    found = bench.answered()
    expect_same(found, single)
    assert num_drafts(bench) > 20
    kinds = Counter((size.num_chunks > 0, size.has_drafts) for size in repeated.replayed)
    assert kinds[False, True] > 10, "decodes with drafts"
    assert kinds[True, False] > 0, "beside prompts"
