"""Models with latent attention under the scheduler: each draw's logits beside those of transformers, and drafts."""

from __future__ import annotations

from math import inf
from typing import TYPE_CHECKING

import pytest
import torch

from pd_cluster.errors import StartupError
from pd_cluster.protocol.messages import AddRequest, Work
from pd_cluster.protocol.sampling_params import SamplingParams
from tests.drafters import KINDS
from tests.engine.drafting_node import Answered, Node
from tests.engine.test_core_pipeline import make_connector
from tests.worker.conftest import VOCAB_SIZE, ModelStore
from tests.worker.driver import make_executor, random_prompts
from tests.worker.scheduled import ScheduledWorker, largest_error

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from tests.worker.conftest import SavedModel

TOLERANCE = 1e-5  # of the logits' deviation
NAMES = ["deepseek-v3", "moonlight", "glm4-lite", "mistral4"]


@pytest.fixture(params=NAMES)
def saved(request: pytest.FixtureRequest, models: ModelStore) -> SavedModel:
    return models.get(request.param)


@pytest.fixture
def start(saved: SavedModel) -> Iterator[Callable[..., ScheduledWorker]]:
    """Starts a node. Memory that nothing has written is NaN."""
    executors = []

    def make(num_blocks: int = 60, **options: object) -> ScheduledWorker:
        executors.append(make_executor(saved.directory, num_blocks=num_blocks))
        return ScheduledWorker(executors[-1], **options)  # type: ignore[arg-type]

    yield make
    for executor in executors:
        executor.close()


@pytest.mark.slow_cases
@pytest.mark.parametrize("depth", [1, 2])
def test_chunks_beside_decodes_have_the_logits_of_whole_prompts(
    saved: SavedModel, start: Callable[..., ScheduledWorker], depth: int
) -> None:
    worker = start(budget=37, depth=depth)
    for number, ids in enumerate(random_prompts((1, 5, 64, 75, 130), VOCAB_SIZE)):
        worker.add(f"{number}", ids, max_tokens=9 + number)
    worker.run()
    assert largest_error(worker, saved.model) < TOLERANCE


def test_hits_and_answers_of_one_prompt_have_the_logits_of_whole_prompts(
    saved: SavedModel, start: Callable[..., ScheduledWorker]
) -> None:
    """A prompt after another's blocks, one of the same blocks alone, and answers that copy the last block on write."""
    worker = start(budget=50)
    head, one, other = random_prompts((200, 21, 30), VOCAB_SIZE)
    worker.add("first", [*head, *one], max_tokens=20)
    worker.run()
    hit = worker.add("hit", [*head, *other])
    same = worker.add("same", [*head, *one], n=4, max_tokens=6, temperature=1.0)
    worker.run()
    assert hit.sequences[0].num_cached_tokens == 192
    assert same.sequences[0].num_cached_tokens == 208
    assert len(set(map(tuple, worker.outputs["same"]))) > 1
    assert largest_error(worker, saved.model) < TOLERANCE


@pytest.mark.slow_cases
@pytest.mark.parametrize("swaps", [False, True])
def test_a_preempted_sequence_goes_on(saved: SavedModel, start: Callable[..., ScheduledWorker], swaps: bool) -> None:
    worker = start(num_blocks=16, budget=48, swaps=swaps)
    for number, ids in enumerate(random_prompts((20, 30, 25, 18, 22), VOCAB_SIZE)):
        worker.add(f"{number}", ids, max_tokens=40)
    worker.run()
    assert worker.scheduler.counters[f"preemptions_{'swap' if swaps else 'recompute'}_total"] > 0
    assert largest_error(worker, saved.model) < TOLERANCE


def test_two_runs_of_one_prompt_write_equal_bits(saved: SavedModel, start: Callable[..., ScheduledWorker]) -> None:
    runs = [start(budget=37) for _ in range(2)]
    for worker in runs:
        for number, ids in enumerate(random_prompts((75, 40), VOCAB_SIZE)):
            worker.add(f"{number}", ids, max_tokens=6)
        worker.run()
    (first,), (second,) = (worker.executor._cache.tensors for worker in runs)
    written = first.isfinite()
    assert written.sum() >= (75 + 40) * first.shape[2] * first.shape[-1]
    assert torch.equal(written, second.isfinite())
    assert torch.equal(first[written].view(torch.int32), second[written].view(torch.int32))


@pytest.mark.slow_cases
@pytest.mark.parametrize("length", [5, 64, 75])
def test_a_prompt_is_handed_over(saved: SavedModel, start: Callable[..., ScheduledWorker], length: int) -> None:
    """Also when its whole blocks are cached here."""
    prefill, decode = start(budget=23), start()
    (prompt,) = random_prompts((length,), VOCAB_SIZE, seed=length)
    for name in ("first", "again"):
        prefill.add(name, prompt, work=Work.PREFILL)
        prefill.run()
        decode.take_over(decode.add(name, prompt, max_tokens=5, work=Work.TAKE_OVER), prefill, f"lease-{name}")
        decode.run()
    assert decode.outputs["first"] == decode.outputs["again"]
    assert largest_error(prefill, saved.model) < TOLERANCE
    assert largest_error(decode, saved.model) < TOLERANCE


def test_blocks_that_the_device_evicted_are_found_in_host_memory(
    saved: SavedModel, start: Callable[..., ScheduledWorker]
) -> None:
    worker = start(num_blocks=12, budget=64, host_cache=True)
    worker.blocks.host.gb_s, worker.blocks.copies.wait_s = inf, 0.0  # whatever is there is loaded
    head, one, other = random_prompts((64, 10, 20), VOCAB_SIZE)
    worker.add("first", [*head, *one], max_tokens=1)
    worker.run()
    for number, ids in enumerate(random_prompts((140, 150, 160), VOCAB_SIZE, seed=5)):  # of 3 one has experts at a tie
        worker.add(f"{number}", ids, max_tokens=1)
        worker.run()
    before = worker.blocks.host.num_loaded
    worker.add("second", [*head, *other])
    worker.run()
    assert worker.blocks.host.num_loaded > before
    assert largest_error(worker, saved.model) < TOLERANCE


def test_a_float8_cache_ends_the_start(models: ModelStore) -> None:
    with pytest.raises(StartupError, match="--kv-cache-dtype fp8 is not served for DeepseekV3ForCausalLM, which cach"):
        make_executor(models.get("deepseek-v3").directory, kv_cache_dtype="fp8")


PROMPTS = random_prompts((40, 70, 3, 25, 90), VOCAB_SIZE, 8)
SAMPLINGS = [SamplingParams(max_tokens=24, temperature=t, seed=3, ignore_eos=True) for t in (0.0, 0.8, 1.0, 0.0, 0.6)]


def served(node: Node, kind: str, mode: str) -> Answered:
    bench = node.bench(kind, mode)
    for index, (prompt, sampling) in enumerate(zip(PROMPTS, SAMPLINGS, strict=True)):
        bench.send(AddRequest(f"r{index}", list(prompt), sampling))
    bench.run(bench.core._blocks.check)
    return bench.answered()


@pytest.mark.slow_cases
@pytest.mark.parametrize("mode", ["off", "on"])
@pytest.mark.parametrize("name", ["deepseek-v3", "moonlight"])
def test_drafts_change_no_token(models: ModelStore, name: str, mode: str) -> None:
    executor = make_executor(models.get(name).directory, num_blocks=120)
    for connector in make_connector(executor):
        node = Node(executor, connector)
        single = served(node, "", mode)
        node.answers = [[*PROMPTS[int(name[1:])], *ids] for (name, _), ids in single.ids.items()]
        for kind in KINDS:
            found = served(node, kind, mode)
            assert (found.ids, found.hashes, found.free) == (single.ids, single.hashes, single.free)
    executor.close()
