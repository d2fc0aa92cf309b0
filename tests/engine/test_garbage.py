"""What the engine leaves to Python's search for garbage, and when that is made: all streams stand still meanwhile."""

from __future__ import annotations

import gc
from contextlib import contextmanager
from typing import TYPE_CHECKING, Literal

import pytest

from benchmarks.offline import OfflineEngine
from pd_cluster.config import CacheConfig, HandoffConfig, ModelConfig, NodeConfig, SchedulerConfig
from pd_cluster.engine.process import YOUNG_OBJECTS, rare_garbage_collection
from pd_cluster.protocol.sampling_params import SamplingParams
from tests.shallow_model import shallow_model

if TYPE_CHECKING:
    from collections.abc import Iterator

NUM_PROMPTS, NUM_BLOCKS_EACH, BLOCK_SIZE = 80, 3, 16
CONFIG = NodeConfig(
    model=ModelConfig(model=shallow_model(), device="cpu", dtype="float32", num_threads=1),
    cache=CacheConfig(num_blocks=600, block_size=BLOCK_SIZE),
    scheduler=SchedulerConfig(max_num_seqs=128),
    handoff=HandoffConfig(connector="none"),
)


@contextmanager
def searches() -> Iterator[list[int]]:
    """The generations that are searched meanwhile."""
    seen: list[int] = []

    def note(phase: Literal["start", "stop"], info: dict[str, int]) -> None:
        if phase == "start":
            seen.append(info["generation"])

    gc.callbacks.append(note)
    try:
        yield seen
    finally:
        gc.callbacks.remove(note)


def generate(engine: OfflineEngine, first_id: int, num_samples: int = 1) -> None:
    prompts = [[first_id, index, *range(BLOCK_SIZE * NUM_BLOCKS_EACH)] for index in range(NUM_PROMPTS)]
    sampling = SamplingParams(max_tokens=8, temperature=0.8, n=num_samples, ignore_eos=True)
    engine.generate(prompts, [sampling] * NUM_PROMPTS)


def test_requests_leave_no_garbage_and_cached_blocks_nothing_to_search() -> None:
    engine = OfflineEngine(CONFIG, lambda text: None)
    try:
        generate(engine, 0)  # what is made once is made now
        gc.collect()
        before = len(gc.get_objects())
        with searches() as seen:
            generate(engine, 1, num_samples=2)
            generate(engine, 2)  # the engine's driver here keeps the last requests; these have no seeds of samples
        assert not seen
        assert len(gc.get_objects()) < before + NUM_PROMPTS  # of as many requests and thrice as many blocks
        assert gc.collect() == 0
    finally:
        engine.close()


@pytest.mark.parametrize("had_exempted", [False, True])
def test_searches_are_as_before_afterwards(had_exempted: bool) -> None:
    before = gc.get_threshold()
    gc.unfreeze()  # what the tests have frozen
    if had_exempted:
        gc.freeze()
    with rare_garbage_collection():
        assert gc.get_threshold() == (YOUNG_OBJECTS, *before[1:])
        assert gc.get_freeze_count() > 0
    assert gc.get_threshold() == before
    assert (gc.get_freeze_count() > 0) == had_exempted
