"""Live sequences as rows of preallocated arrays, and a step's packed inputs made from them.

A row belongs to one sequence from its SequenceStart to its departure. `num_tokens` counts a sampled token from the
moment its step is launched; its value reaches the host array when the step's result is read, so that a next step can be
launched before. Until then the value is only in `last_tokens`, on the device.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt
import torch

from pd_kernels.packed import Ints, PackedSequences

if TYPE_CHECKING:
    from pd_cluster.engine.batch import Batch, SequenceChunk, SequenceStart
    from pd_cluster.worker.sampling_state import SamplingInputs, SamplingState


@dataclass(frozen=True, slots=True)
class StepInputs:
    """One step, packed: T tokens, S sequences, R logits rows."""

    token_ids: torch.Tensor  # int64 [T]
    positions: torch.Tensor  # int64 [T]
    slot_mapping: torch.Tensor  # int64 [T]
    sequences: PackedSequences
    fresh_blocks: torch.Tensor | None  # int64: blocks that this step begins and does not fill
    sample_rows: torch.Tensor | None  # int64 [R] into T; None: all tokens, in order
    sampling: SamplingInputs
    samples: tuple[SampleRow, ...]  # per sampling sequence, in the order of the logits rows


@dataclass(frozen=True, slots=True)
class SampleRow:
    """One sequence's share of the logits rows."""

    seq_id: int
    row: int
    position: int  # of the sampled token
    num_samples: int
    num_logprobs: int
    serial: int  # which occupant of the row


class InputBatch:
    """The rows."""

    def __init__(
        self, num_rows: int, max_len: int, block_size: int, sampling: SamplingState, device: torch.device
    ) -> None:
        self._block_size = block_size
        self._device = device
        self._sampling = sampling
        self._row_of: dict[int, int] = {}
        self._free = list(range(num_rows - 1, -1, -1))
        self._serials = [0] * num_rows
        self._tokens = np.zeros((num_rows, max_len + 1), np.int32)
        self._blocks = np.zeros((num_rows, -(-max_len // block_size)), np.int32)
        self._num_tokens = np.zeros(num_rows, np.int64)
        self._num_on_host = np.zeros(num_rows, np.int64)  # of num_tokens, those whose value `_tokens` has
        self._last_tokens = torch.zeros(num_rows, dtype=torch.int64, device=device)

    @property
    def num_rows_in_use(self) -> int:
        return len(self._row_of)

    def apply(self, batch: Batch) -> None:
        """Departures, then starts, then the chunks' new blocks."""
        for seq_id in batch.departures:
            self._free.append(self._row_of.pop(seq_id))
        for start in batch.starts:
            self._start(start)
        for chunk in batch.chunks:
            if chunk.new_block_ids:
                first = chunk.first_new_block
                self._blocks[self._row_of[chunk.seq_id], first : first + len(chunk.new_block_ids)] = chunk.new_block_ids

    def build(self, chunks: tuple[SequenceChunk, ...]) -> StepInputs:
        """Pack the chunks (at least one). Sampled tokens count as known from here on."""
        rows = np.array([self._row_of[chunk.seq_id] for chunk in chunks])
        starts = np.array([chunk.start for chunk in chunks])
        lens = np.array([chunk.num_tokens for chunk in chunks])
        ends = starts + lens
        assert (ends <= self._num_tokens[rows]).all(), "a chunk reaches past its sequence's last known token"
        num_decodes = _leading_ones(lens)
        query_starts = np.concatenate(([0], np.cumsum(lens)))
        row_of_token = np.repeat(rows, lens)
        positions = np.arange(query_starts[-1]) + np.repeat(starts - query_starts[:-1], lens)
        token_ids = self._token_ids(rows, ends, query_starts, row_of_token, positions)
        blocks = self._blocks[row_of_token, positions // self._block_size].astype(np.int64)
        slots = blocks * self._block_size + positions % self._block_size
        samples = self._plan_samples(chunks, rows, ends)
        sample_rows, inputs = self._prepare_sampling(chunks, samples, query_starts)
        return StepInputs(
            token_ids=token_ids,
            positions=self._move(positions),
            slot_mapping=self._move(slots),
            sequences=PackedSequences(
                num_decodes=num_decodes,
                query_starts=self._move(query_starts.astype(np.int32)),
                seq_lens=self._move(ends.astype(np.int32)),
                block_tables=self._move(self._blocks[rows, : -(-int(ends.max()) // self._block_size)]),
                host_query_lens=lens,
                host_seq_lens=ends,
            ),
            fresh_blocks=self._fresh_blocks(rows, starts, ends),
            sample_rows=sample_rows,
            sampling=inputs,
            samples=samples,
        )

    def note_launched(self, inputs: StepInputs, token_ids: torch.Tensor) -> None:
        """The step will sample `token_ids` (int64 [R], on the device): later steps may build on them."""
        firsts, rows, at = [], [], 0
        for sample in inputs.samples:
            firsts.append(at)
            rows.append(sample.row)
            at += sample.num_samples
        chosen = token_ids if at == len(firsts) else token_ids[self._move(np.array(firsts))]
        self._last_tokens.index_copy_(0, self._move(np.array(rows)), chosen)
        self._sampling.count_sampled(np.array(rows), chosen)
        self._num_tokens[rows] += 1

    def note_result(self, sample: SampleRow, token_id: int) -> None:
        """The sampled token's value is on the host. Void when the row has another occupant by now."""
        if self._serials[sample.row] == sample.serial:
            self._tokens[sample.row, sample.position] = token_id
            self._num_on_host[sample.row] = sample.position + 1

    def _start(self, start: SequenceStart) -> None:
        assert start.seq_id not in self._row_of, f"sequence {start.seq_id} already has a row"
        row = self._free.pop()
        self._row_of[start.seq_id] = row
        self._serials[row] += 1
        count = len(start.token_ids)
        self._tokens[row, :count] = start.token_ids
        self._num_tokens[row] = self._num_on_host[row] = count
        self._blocks[row, : len(start.block_ids)] = start.block_ids
        self._sampling.start(row, start)

    def _token_ids(
        self, rows: Ints, ends: Ints, query_starts: Ints, row_of_token: Ints, positions: Ints
    ) -> torch.Tensor:
        token_ids = self._move(self._tokens[row_of_token, positions].astype(np.int64))
        late = np.flatnonzero(ends > self._num_on_host[rows])  # their last token is still on the device only
        if len(late):
            token_ids[self._move(query_starts[late + 1] - 1)] = self._last_tokens[self._move(rows[late])]
        return token_ids

    def _fresh_blocks(self, rows: Ints, starts: Ints, ends: Ints) -> torch.Tensor | None:
        last = (ends - 1) // self._block_size
        fresh = np.flatnonzero((last * self._block_size >= starts) & (ends % self._block_size != 0))
        return self._move(self._blocks[rows[fresh], last[fresh]].astype(np.int64)) if len(fresh) else None

    def _plan_samples(self, chunks: tuple[SequenceChunk, ...], rows: Ints, ends: Ints) -> tuple[SampleRow, ...]:
        samples = []
        for index, chunk in enumerate(chunks):
            if chunk.num_samples:
                row, end = int(rows[index]), int(ends[index])
                assert end == self._num_tokens[row], "a chunk samples before its sequence's last known token"
                samples.append(
                    SampleRow(
                        chunk.seq_id, row, end, chunk.num_samples, self._sampling.num_logprobs(row), self._serials[row]
                    )
                )
        return tuple(samples)

    def _prepare_sampling(
        self, chunks: tuple[SequenceChunk, ...], samples: tuple[SampleRow, ...], query_starts: Ints
    ) -> tuple[torch.Tensor | None, SamplingInputs]:
        counts = [sample.num_samples for sample in samples]
        rows = np.repeat(np.array([sample.row for sample in samples], np.int64), counts)
        lengths = np.repeat(np.array([sample.position for sample in samples], np.int64), counts)
        inputs = self._sampling.prepare(rows, lengths, counts)
        if len(counts) == query_starts[-1] and len(rows) == len(counts):
            return None, inputs  # every token is a decode that samples
        num_samples = np.array([chunk.num_samples for chunk in chunks])
        return self._move(np.repeat(query_starts[1:] - 1, num_samples)), inputs

    def _move(self, array: npt.NDArray[np.generic]) -> torch.Tensor:
        return torch.from_numpy(array).to(self._device, non_blocking=True)


def _leading_ones(lens: Ints) -> int:
    """How many chunks at the front are one token long: they attend as decodes."""
    longer = np.flatnonzero(lens > 1)
    return int(longer[0]) if len(longer) else len(lens)
