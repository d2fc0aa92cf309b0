"""The first steps of a worker, which compile and load the kernels before any request waits for them.

Triton compiles a kernel again for each power of two of sequences or rows, and for sizes that are 1, multiples of 16, or
neither. It also compiles a kernel for each way to split it, which depends on the tokens of a step and on those before
them. Each compilation takes a second.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from pd_cluster.protocol.sampling_params import SamplingParams
from pd_cluster.scheduling.batch import Batch, BlockCopies, NewBlocks, SequenceChunk, SequenceStart
from pd_kernels.lora import FEW, NO_SLOT
from pd_kernels.values import FEW_ROWS, Draws, Limits, TokenMasks

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from pd_cluster.config import SchedulerConfig
    from pd_cluster.worker.model_runner import ModelRunner

GREEDY, DRAWN = (SamplingParams(max_tokens=1, temperature=temperature) for temperature in (0.0, 1.0))
# With and without changes, which make the sampler use logits in float32
ASKING = tuple(
    SamplingParams(max_tokens=1, top_k=top_k, logprobs=1, repetition_penalty=penalty)
    for top_k in (0, 2) for penalty in (1.0, 1.1)
)  # fmt: skip
LONG_PREFIX = 4096  # tokens; a longer prefix changes no kernel's split
FEW_FAR = 8  # sequences of a step with drafts after a long prefix: more take the host long, and change no kernel
NUM_BLOCKS = 2  # the first blocks of the cache, which these steps write; the caller zeroes them

Chunks = list[tuple[int, int]]  # per sequence: tokens before the chunk, tokens of the chunk


def run_first_steps(runner: ModelRunner, block_size: int, max_len: int) -> None:
    """Run a prefill, a decode and a copy of a block."""
    length = min(block_size, max_len - 1)
    for chunks in ([(0, length)], [(length, 1)]):
        _run(runner, chunks, (GREEDY,))
    copies = tuple((group, 0, 1) for group in range(len(runner.cache.layout.groups)))
    runner.launch(Batch(0, copies=BlockCopies(copy_on_write=copies))).result()


def run_steps_of_all_kinds(runner: ModelRunner, max_len: int, limits: SchedulerConfig, most_drafts: int = 0) -> None:
    """Run at least one step for each variant of a kernel that steps within the limits may need.

    most_drafts: of a sequence in a step; 0: there are none. Slots for adapters must be empty.
    """
    num_seqs, budget = limits.max_num_seqs, limits.max_num_batched_tokens
    for chunks, drafts in drafted_steps(num_seqs, budget, max_len, most_drafts) if most_drafts else ():
        _run(runner, chunks, (DRAWN, GREEDY), drafts)
    for chunks in (*mixed_steps(num_seqs), *prompt_steps(num_seqs, budget, max_len)):
        _run(runner, chunks, (DRAWN, GREEDY))
    for chunks in adapted_steps(num_seqs, budget, max_len) if runner.adapters is not None else ():
        _run(runner, chunks, (GREEDY,), slot=0)
    for params in ASKING:
        _run(runner, [(0, 1)], (params,))
    _draw_with_masks(runner)


@torch.inference_mode()
def _draw_with_masks(runner: ModelRunner) -> None:
    """Draw as rows with a grammar do, with and without limits, from logits in the model's type and in float32."""
    logits = runner.make_logits(1)
    vocab_size, device = logits.shape[1], logits.device
    ones, longs = (torch.ones(1, dtype=dtype, device=device) for dtype in (torch.float32, torch.int64))
    every = torch.full((1, -(-vocab_size // 32)), -1, dtype=torch.int32, device=device)
    masks = TokenMasks(every, torch.zeros(1, dtype=torch.int64, device=device))
    for rows in (logits, logits.float()):
        for limits in (None, Limits(longs, ones, ones)):
            runner.kernels.draw(rows, Draws(ones, longs, longs, limits, masks))


def mixed_steps(num_seqs: int) -> Iterator[Chunks]:
    """Yield the chunks of steps of decodes, with and without prompts of two tokens after them.

    All sequences of these steps attend as decodes in the last layer.
    """
    sizes = {2, num_seqs - 1, num_seqs, *(2**power - 1 for power in range(1, num_seqs.bit_length()))}
    mixes = {(size, min(count, num_seqs - size)) for size in sizes for count in (0, 1, 3, 16) if size <= num_seqs}
    for num_decodes, num_prompts in sorted(mixes - {(0, 0)}):
        yield [(0, 1)] * num_decodes + [(0, 2)] * num_prompts


def drafted_steps(num_seqs: int, budget: int, max_len: int, most: int) -> Iterator[tuple[Chunks, list[int]]]:
    """Yield the chunks of steps of decodes, and the drafts after each of them, at most `most`.

    A step has up to twice as many rows as sequences. Without a prompt all layers attend to chunks; beside one the last
    layer attends to one row at a time.
    """
    most = min(most, max_len - 1)
    powers = {2**power for power in range(1, (2 * num_seqs).bit_length())}
    for num_rows in sorted({2 * num_seqs, 2 * num_seqs - 1, *powers, *(power - 1 for power in powers)}):
        for num_prompts in (0, 1):
            own = num_rows - num_prompts
            count = max(-(-own // (1 + most)), own - num_seqs)
            num_drafts, num_tokens = own - count, num_rows + num_prompts
            if num_drafts < max(1, count) or count + num_prompts > num_seqs or num_tokens > budget:
                continue
            drafts = [num_drafts // count + (index < num_drafts % count) for index in range(count)]
            for before in (0, LONG_PREFIX) if count <= FEW_FAR else (0,):
                chunks = [(min(before, max_len - 1 - each), 1) for each in drafts] + [(0, 2)] * num_prompts
                yield chunks, drafts + [0] * num_prompts


def prompt_steps(num_seqs: int, budget: int, max_len: int) -> Iterator[Chunks]:
    """Yield the chunks of steps of prompts, with every power of two of tokens and with as many as a step may have.

    Each step has few sequences. Each size occurs without and with a prefix. The split of a kernel changes at sizes that
    are at least a factor of 2 apart, or stays the same from one size on. Besides, kernels for few rows end after a
    power of two.
    """
    largest = min(budget, num_seqs * max_len)
    sizes = {*(2**power for power in range(1, largest.bit_length())), *(rows + 1 for rows in FEW_ROWS)}
    for size in sorted({largest, *(size for size in sizes if size < largest)}):
        for prefix in (0, LONG_PREFIX):
            yield [(min(prefix, max_len - share), share) for share in _shares(size, max_len)]


def adapted_steps(num_seqs: int, budget: int, max_len: int) -> Iterator[Chunks]:
    """Yield the chunks of steps in which all rows have adapters: of one row, few, a multiple of 16, and more than FEW.

    Products of few rows take those before a norm's division, and leave out the activation. Rows that come out of an
    activation by adapters are quantized by a kernel of its own.
    """
    for size in sorted({min(size, budget, num_seqs * max_len) for size in (1, 8, FEW_ROWS[0], FEW, FEW + 1)}):
        yield [(0, share) for share in _shares(size, max_len)]


def _shares(num_tokens: int, most: int) -> list[int]:
    """So many tokens, evenly over as few sequences as have room."""
    count = -(-num_tokens // most)
    return [num_tokens // count + (index < num_tokens % count) for index in range(count)]


def equal_tables(runner: ModelRunner, num_tokens: int) -> tuple[NewBlocks, ...]:
    """Tables of which every entry is block 0."""
    groups = enumerate(runner.cache.layout.groups)
    return tuple(NewBlocks(index, 0, (0,) * -(-num_tokens // group.block_size)) for index, group in groups)


def _run(
    runner: ModelRunner, chunks: Chunks, params: Sequence[SamplingParams], drafts: Sequence[int] = (),
    slot: int = NO_SLOT,
) -> None:  # fmt: skip
    """Run one step of `chunks`, which all sample, with the parameters in turn. Then remove its sequences.

    `drafts`: of each, after its chunk; none: there are none. `slot`: of the adapter of all.
    """
    ends = [before + count for before, count in chunks]
    runs = [(0,) * num for num in drafts or [0] * len(chunks)]
    tables = [equal_tables(runner, end + len(run)) for end, run in zip(ends, runs, strict=True)]
    starts = tuple(
        SequenceStart(index, (0,) * end, end, tables[index], params[index % len(params)], index, adapter=slot)
        for index, end in enumerate(ends)
    )
    samples = tuple(
        SequenceChunk(index, before, count + len(run), num_samples=1, drafts=run)
        for index, ((before, count), run) in enumerate(zip(chunks, runs, strict=True))
    )
    runner.launch(Batch(0, starts, samples)).result()
    runner.launch(Batch(0, departures=tuple(range(len(chunks))))).result()
