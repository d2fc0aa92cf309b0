"""The first steps of a worker; that they suffice, `test_variants.py` tells."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from pd_cluster.worker.warm_up import (
    LONG_PREFIX,
    adapted_steps,
    drafted_steps,
    mixed_steps,
    prompt_steps,
    run_steps_of_all_kinds,
)
from tests.worker.adapted import start
from tests.worker.driver import make_executor

if TYPE_CHECKING:
    from tests.worker.conftest import ModelStore

LIMITS = [(1, 1, 2), (1, 7, 5), (9, 512, 40), (9, 512, 512), (64, 2048, 8192), (3, 100, 8192)]


@pytest.mark.parametrize(("num_seqs", "budget", "max_len"), LIMITS)
def test_steps_are_within_the_limits(num_seqs: int, budget: int, max_len: int) -> None:
    prompts = list(prompt_steps(num_seqs, budget, max_len))
    for chunks in (*prompts, *adapted_steps(num_seqs, budget, max_len)):
        assert sum(count for _, count in chunks) <= budget
        assert len(chunks) <= num_seqs
        assert all(before >= 0 and count and before + count <= max_len for before, count in chunks)
    assert all(0 < len(chunks) <= num_seqs for chunks in mixed_steps(num_seqs))
    sizes = [sum(count for _, count in chunks) for chunks in prompts]
    assert max(sizes) == min(budget, num_seqs * max_len)
    ends = {before + count for chunks in prompts for before, count in chunks if before}
    assert not ends or max(ends) == min(max_len, LONG_PREFIX + budget)


@pytest.mark.parametrize("most", [1, 5, 16])
@pytest.mark.parametrize(("num_seqs", "budget", "max_len"), LIMITS)
def test_steps_with_drafts_are_within_the_limits(num_seqs: int, budget: int, max_len: int, most: int) -> None:
    steps = list(drafted_steps(num_seqs, budget, max_len, most))
    for chunks, drafts in steps:
        assert len(chunks) == len(drafts) <= num_seqs
        assert sum(drafts) <= num_seqs
        assert sum(count for _, count in chunks) + sum(drafts) <= budget
        for (before, count), num in zip(chunks, drafts, strict=True):
            assert num <= most if count == 1 else num == 0
            assert before >= 0
            assert before + count + num <= max_len
        assert max(drafts) > 0
    most_rows = max((len(drafts) + sum(drafts) for _, drafts in steps), default=0)
    assert most_rows == 2 * num_seqs or num_seqs == 1 or budget < 2 * num_seqs + 1
    assert bool(steps) == (budget > 1)


def test_the_steps_leave_nothing_behind(models: ModelStore) -> None:
    """They are run on GPUs only, but legal everywhere."""
    executor = make_executor(models.get("qwen3").directory, num_blocks=2, max_num_seqs=9, max_model_len=32)
    run_steps_of_all_kinds(executor._runner, 32, executor.config.scheduler, most_drafts=3)
    assert not executor._runner.rows._row_of
    executor.close()


def test_steps_with_adapters_leave_nothing_behind(models: ModelStore) -> None:
    executor = start(models.get("qwen3").directory)
    runner, rows = executor._runner, list[int]()
    runner.watcher = lambda logits: rows.append(len(runner.rows._adapted))
    run_steps_of_all_kinds(runner, 512, executor.config.scheduler)
    assert max(rows) > 0, "no sequence had an adapter"
    assert not runner.rows._adapted
    assert not runner.rows._row_of
    executor.close()
