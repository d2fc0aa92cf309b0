"""Drafts of a model with windows: answers, caches of both groups and blocks that die are those of single tokens."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from pd_cluster.protocol.messages import AddRequest
from pd_cluster.protocol.sampling_params import SamplingParams
from tests.drafters import KINDS
from tests.engine.drafting_node import Answered, Node
from tests.engine.test_core_pipeline import make_connector
from tests.worker.conftest import VOCAB_SIZE
from tests.worker.driver import make_executor, random_prompts

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.worker.conftest import ModelStore

PROMPTS = random_prompts((40, 70, 3, 25, 90), VOCAB_SIZE, 8)
SAMPLINGS = [SamplingParams(max_tokens=28, temperature=t, seed=3, ignore_eos=True) for t in (0.0, 0.8, 1.0, 0.0, 0.6)]


@pytest.fixture(scope="module", params=["qwen3-some-windows", "gpt-oss-mxfp4"])
def node(request: pytest.FixtureRequest, models: ModelStore) -> Iterator[Node]:
    executor = make_executor(models.get(request.param).directory, num_blocks=120)
    assert [bool(group.window) for group in executor.layout.groups].count(True) == 1
    for connector in make_connector(executor):
        yield Node(executor, connector)
    executor.close()


def served(node: Node, kind: str, mode: str) -> tuple[Answered, list[int]]:
    """Also the most blocks that each group has held."""
    bench = node.bench(kind, mode)
    for index, (prompt, sampling) in enumerate(zip(PROMPTS, SAMPLINGS, strict=True)):
        bench.send(AddRequest(f"r{index}", list(prompt), sampling))
    blocks, most = bench.core._blocks, [0] * len(node.executor.layout.groups)

    def note() -> None:
        blocks.check()
        most[:] = [max(one, group.in_use) for one, group in zip(most, blocks.stats().groups, strict=True)]

    bench.run(note)
    return bench.answered(), most


@pytest.mark.slow_cases
@pytest.mark.parametrize("mode", ["off", "on"])
def test_drafts_of_a_model_with_windows(node: Node, mode: str) -> None:
    single, most_single = served(node, "", mode)
    node.answers = [[*PROMPTS[int(name[1:])], *ids] for (name, _), ids in single.ids.items()]
    for kind in KINDS:
        found, most = served(node, kind, mode)
        assert found.ids == single.ids
        assert found.hashes == single.hashes
        assert found.free == single.free
        for one, other in zip(most, most_single, strict=True):
            assert one <= other + len(PROMPTS), "a block that is dead is held, or one that was begun for drafts"
