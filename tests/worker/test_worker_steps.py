"""What a batch may ask of the worker besides tokens: copies, swaps, steps launched ahead, empty steps."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import torch

from pd_cluster.protocol.sampling_params import SamplingParams
from pd_cluster.scheduling.batch import Batch, BlockCopies, SequenceChunk, SequenceStart
from tests.worker.conftest import VOCAB_SIZE
from tests.worker.driver import Driver, random_prompts
from tests.worker.tables import table

if TYPE_CHECKING:
    from pd_cluster.worker.device_executor import DeviceExecutor

PROMPT = random_prompts([20], VOCAB_SIZE, seed=3)[0]
LONG = SamplingParams(max_tokens=10, temperature=0.0)


def prefill(executor: DeviceExecutor, blocks: tuple[int, ...], params: SamplingParams = LONG) -> int:
    """Start sequence 0 with PROMPT in `blocks`; its first token."""
    start = SequenceStart(0, tuple(PROMPT), 20, table(blocks), params, 0)
    return (
        executor.launch(Batch(0, (start,), (SequenceChunk(0, 0, 20, num_samples=1),))).result().samples[0][0].token_id
    )


def expected_tokens(executor: DeviceExecutor, params: SamplingParams = LONG) -> list[int]:
    driver = Driver(executor)
    driver.add(PROMPT, params)
    return driver.run()[0]


def test_steps_launched_ahead_give_the_same_tokens(executor: DeviceExecutor) -> None:
    """Step n + 1 is launched before the result of step n is read, with penalties that depend on it."""
    params = SamplingParams(max_tokens=10, temperature=0.9, frequency_penalty=0.8, repetition_penalty=1.2, seed=0)
    expected = expected_tokens(executor, params)
    other = Driver(executor)
    other.add(PROMPT[::-1], LONG)
    other.run()  # the row that the sequence will have holds other tokens now
    start = SequenceStart(0, tuple(PROMPT), 20, table((3, 4, 5)), params, 0)
    pending = executor.launch(Batch(0, (start,), (SequenceChunk(0, 0, 20, num_samples=1),)))
    tokens = []
    for step in range(1, 10):
        following = executor.launch(Batch(step, (), (SequenceChunk(0, 19 + step, 1, num_samples=1),)))
        tokens.append(pending.result().samples[0][0].token_id)
        pending = following
    tokens.append(pending.result().samples[0][0].token_id)
    assert tokens == expected


def test_a_result_read_after_its_row_was_given_away_is_void(executor: DeviceExecutor) -> None:
    """The row's new occupant keeps its own tokens."""
    expected = expected_tokens(executor)
    start = SequenceStart(0, (9, 9, 9), 3, table((8,)), LONG, 0)
    pending = executor.launch(Batch(0, (start,), (SequenceChunk(0, 0, 3, num_samples=1),)))
    newcomer = SequenceStart(1, tuple(PROMPT), 20, table((1, 2)), LONG, 0)
    executor.launch(Batch(1, (newcomer,), (), departures=(0,)))
    pending.result()
    samples = executor.launch(Batch(2, (), (SequenceChunk(1, 0, 20, num_samples=1),))).result().samples
    assert samples[1][0].token_id == expected[0]


def test_copy_on_write_gives_the_copy_its_own_future(executor: DeviceExecutor) -> None:
    """Two sequences share blocks; before one appends to the shared last block it gets a copy."""
    expected = expected_tokens(executor)
    first = prefill(executor, (1, 2))
    child = SequenceStart(1, (*PROMPT, 77), 20, table((1, 3)), LONG, 0)
    copies = BlockCopies(copy_on_write=((0, 2, 3),))
    chunks = (SequenceChunk(1, 20, 1, num_samples=1), SequenceChunk(0, 20, 1, num_samples=1))
    samples = executor.launch(Batch(1, (child,), chunks, copies=copies)).result().samples
    assert [first, samples[0][0].token_id] == expected[:2]
    driver_tokens = Driver(executor)
    executor.launch(Batch(2, departures=(0, 1))).result()
    driver_tokens.add([*PROMPT, 77], LONG)
    assert samples[1][0].token_id == driver_tokens.run()[0][0]


def test_new_blocks_may_replace_old_ones(executor: DeviceExecutor) -> None:
    """After copy on write the table's last entry is another block."""
    expected = expected_tokens(executor)
    prefill(executor, (1, 2))
    chunk = SequenceChunk(0, 20, 1, new_blocks=table((6,), 1), num_samples=1)
    samples = executor.launch(Batch(1, (), (chunk,), copies=BlockCopies(copy_on_write=((0, 2, 6),)))).result().samples
    executor.cache.tensors[0][2] = torch.nan
    following = executor.launch(Batch(2, (), (SequenceChunk(0, 21, 1, num_samples=1),))).result().samples
    executor.cache.tensors[0][2] = 0
    assert [samples[0][0].token_id, following[0][0].token_id] == expected[1:3]


@pytest.mark.parametrize("executor", ["qwen3", "glm4-experts", "minimax-m2"], indirect=True)
def test_a_swapped_sequence_goes_on_where_it_was(executor: DeviceExecutor) -> None:
    expected = expected_tokens(executor)
    assert executor.num_host_blocks >= 4
    first = prefill(executor, (1, 2))
    executor.launch(Batch(1, departures=(0,), copies=BlockCopies(swap_out=((0, 1, 3), (0, 2, 0))))).result()
    executor.cache.tensors[0].fill_(torch.nan)
    back = SequenceStart(0, (*PROMPT, first), 20, table((7, 5)), LONG, 0)
    chunk = SequenceChunk(0, 20, 1, num_samples=1)
    samples = (
        executor.launch(Batch(2, (back,), (chunk,), copies=BlockCopies(swap_in=((0, 3, 7), (0, 0, 5)))))
        .result()
        .samples
    )
    assert samples[0][0].token_id == expected[1]
    executor.cache.tensors[0].zero_()


def test_what_blocks_held_before_does_not_matter(executor: DeviceExecutor) -> None:
    """Even NaN: a block that is begun and not filled is cleared first."""
    expected = expected_tokens(executor)
    executor.cache.tensors[0].fill_(torch.nan)
    assert expected_tokens(executor) == expected
    assert expected_tokens(executor) == expected


def test_empty_steps_and_unfinished_prompts_sample_nothing(executor: DeviceExecutor) -> None:
    assert executor.launch(Batch(4)).result().samples == {}
    start = SequenceStart(0, tuple(PROMPT), 20, table((1, 2)), LONG, 0)
    result = executor.launch(Batch(5, (start,), (SequenceChunk(0, 0, 7),))).result()
    assert (result.step, result.samples) == (5, {})


def test_broken_invariants_are_assertions(executor: DeviceExecutor) -> None:
    prefill(executor, (1, 2))
    with pytest.raises(AssertionError, match="past its sequence's last known token"):
        executor.launch(Batch(1, (), (SequenceChunk(0, 20, 2),))).result()
    with pytest.raises(AssertionError, match="samples before"):
        executor.launch(Batch(1, (), (SequenceChunk(0, 4, 1, num_samples=1),))).result()
    with pytest.raises(AssertionError, match="already has a row"):
        executor.launch(Batch(1, (SequenceStart(0, (1,), 1, table((3,)), LONG, 0),))).result()
