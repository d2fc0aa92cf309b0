"""Blocks that were saved beside one step and loaded beside another one serve as if they had stayed."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from pd_cluster.protocol.sampling_params import SamplingParams
from pd_cluster.scheduling.batch import Batch, BlockCopies, SequenceChunk, SequenceStart
from pd_cluster.worker.copy_stream import CopyStream
from tests.shallow_model import shallow_model
from tests.worker.driver import make_executor, poison, random_prompts
from tests.worker.tables import table

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from pd_cluster.worker.device_executor import DeviceExecutor
    from pd_cluster.worker.executor import Executor

GREEDY = SamplingParams(max_tokens=8, temperature=0.0)
LATE = SamplingParams(max_tokens=8, temperature=0.0, grammar="start: /[a-z ]+/")
LENGTH = 41
BLOCKS, TAKEN, HOSTS, BACK = (5, 2, 9), (5, 2, 9), (3, 0, 1), (14, 12, 13)


def pairs(sources: tuple[int, ...], targets: tuple[int, ...]) -> tuple[tuple[int, int, int], ...]:
    return tuple((0, source, target) for source, target in zip(sources, targets, strict=True))


def run_tier(
    executor: Executor, beside: SamplingParams = GREEDY, before_load: Callable[[], None] = lambda: None
) -> list[int]:
    """Tokens of a sequence whose blocks went to the host and came back into others. Two steps are under way.

    beside: of the sequence whose prompt is computed in the steps with copies.
    """
    prompts = random_prompts([LENGTH, 33, 48], 3000, seed=3)
    tokens: list[int] = []
    steps = iter(range(100))
    executor.check(beside)

    def launch(**parts: Any) -> Any:
        return executor.launch(Batch(next(steps), **parts))

    def start(seq_id: int, ids: list[int], blocks: tuple[int, ...], sampling: SamplingParams) -> SequenceStart:
        return SequenceStart(seq_id, tuple(ids), len(prompts[seq_id]), table(blocks), sampling, 7)

    def chunk(seq_id: int) -> SequenceChunk:
        return SequenceChunk(seq_id, 0, len(prompts[seq_id]), num_samples=1)

    first = launch(starts=(start(0, prompts[0], BLOCKS, GREEDY),), chunks=(chunk(0),))
    tokens += [token.token_id for token in first.result().samples[0]]
    saving = launch(
        starts=(start(1, prompts[1], (6, 7, 8), beside),), chunks=(chunk(1),), departures=(0,),
        copies=BlockCopies(save=pairs(BLOCKS, HOSTS)),
    )  # fmt: skip
    saving.result()
    before_load()
    # The blocks get other content in the step that loads
    loading = launch(
        starts=(start(2, prompts[2], TAKEN, beside),), chunks=(chunk(2),), copies=BlockCopies(load=pairs(HOSTS, BACK))
    )
    back = start(0, [*prompts[0], *tokens], BACK, GREEDY)
    while len(tokens) < GREEDY.max_tokens:
        decode = SequenceChunk(0, LENGTH - 1 + len(tokens), 1, num_samples=1)
        last = launch(starts=(back,) if len(tokens) == 1 else (), chunks=(decode,))
        if len(tokens) == 1:
            loading.result()
        tokens += [token.token_id for token in last.result().samples[0]]
    launch(departures=(0, 1, 2)).result()
    return tokens


@pytest.fixture(scope="module")
def executor() -> Iterator[DeviceExecutor]:
    executor = make_executor(shallow_model(), num_blocks=20, num_threads=1)
    assert executor.num_host_blocks == executor.most_host_blocks >= 4
    yield executor
    executor.close()


@pytest.fixture(scope="module")
def expected(executor: DeviceExecutor) -> list[int]:
    """Of a sequence that keeps its blocks."""
    (prompt,) = random_prompts([LENGTH], 3000, seed=3)
    start = SequenceStart(0, tuple(prompt), LENGTH, table(BLOCKS), GREEDY, 7)
    tokens = []
    for step in range(GREEDY.max_tokens):
        first, count = (0, LENGTH) if not step else (LENGTH - 1 + step, 1)
        batch = Batch(step, (start,) if not step else (), (SequenceChunk(0, first, count, num_samples=1),))
        tokens += [token.token_id for token in executor.launch(batch).result().samples[0]]
    executor.launch(Batch(99, departures=(0,))).result()
    return tokens


@pytest.mark.parametrize("runs_early", [False, True], ids=["late", "early"])
@pytest.mark.parametrize("beside", [GREEDY, LATE], ids=["plain", "late rows"])
def test_a_sequence_goes_on_from_loaded_blocks(
    executor: DeviceExecutor, expected: list[int], beside: SamplingParams, runs_early: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """Whether copies run before the forward or after it. Blocks of the host that are not written are NaN."""
    monkeypatch.setattr(CopyStream, "runs_early", runs_early)
    for tensor in executor._cache.hosts:
        poison(tensor)
    for block in BACK:
        poison(executor._cache.tensors[0][block])
    assert run_tier(executor, beside) == expected


def test_what_was_saved_is_what_is_loaded(executor: DeviceExecutor, expected: list[int]) -> None:
    """The check of the test above sees a block that lacks its content."""

    def spoil() -> None:
        executor._cache.hosts[0][HOSTS[1]] = 0

    assert run_tier(executor, before_load=spoil) != expected
