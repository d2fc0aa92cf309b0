"""Live sequences as rows of preallocated arrays, and a step's packed inputs made from them.

A row belongs to one sequence from its SequenceStart to its departure. `num_tokens` counts a sampled token from the
moment its step is launched; its value reaches the host array when the step's result is read, so that a next step can be
launched before. Until then the value is only in `last_tokens`, on the device.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch

from pd_kernels.values import Ints, PackedSequences

if TYPE_CHECKING:
    from pd_cluster.scheduling.batch import Batch, SequenceChunk, SequenceStart
    from pd_cluster.worker.cuda_graphs.step_layout import StepLayout
    from pd_cluster.worker.host_buffer import HostBuffer
    from pd_cluster.worker.sampling_state import SamplingInputs, SamplingState

LATE = -1  # in place of a token id: it is only in `last_tokens` yet


@dataclass(frozen=True, slots=True)
class TailInputs:
    """The sequences of a step that sample, if they are not all its tokens."""

    rows: torch.Tensor  # int64 [N] into T: each one's last token, whose logits are wanted
    sequences: PackedSequences  # with that token alone


@dataclass(frozen=True, slots=True)
class StepInputs:
    """One step, packed: T tokens, S sequences. The tensors hold their values once staging has flushed, token_ids once
    `InputBatch.fill_late` was called besides."""

    token_ids: torch.Tensor  # int64 [T]
    late: (
        tuple[torch.Tensor, torch.Tensor] | None
    )  # int64 places in `token_ids`, and the rows whose last token goes there
    positions: torch.Tensor  # int64 [T]
    slot_mapping: torch.Tensor  # int64 [T]
    sequences: PackedSequences
    fresh_blocks: torch.Tensor | None  # int64: blocks that this step begins and does not fill
    tail: TailInputs | None  # None: all tokens sample, in order
    sampling: SamplingInputs
    samples: Samples


@dataclass(frozen=True, slots=True)
class ReplayInputs:
    """One step for a graph, padded to what that has room for. The first S sequences are real."""

    fields: torch.Tensor  # int64, where staging puts what is first; see `build_decodes`, `build_step`
    block_tables: torch.Tensor  # int32 [S, width]
    sampling: SamplingInputs | None  # None: what the graph draws by the fields stands
    samples: Samples


@dataclass(frozen=True, slots=True)
class Samples:
    """The N sequences that a step samples R tokens for, in the order of the logits rows. Of one with several rows the
    first counts as its next token."""

    seq_ids: tuple[int, ...]
    rows: Ints
    positions: Ints  # of the sampled token
    serials: Ints  # which occupant of the row
    counts: tuple[int, ...]  # logits rows of each
    num_logprobs: Ints  # -1: none
    device_rows: torch.Tensor  # `rows` on the device
    firsts: torch.Tensor | None  # int64 [N]: each sequence's first logits row; None: it has one each
    owners: torch.Tensor | None  # int64 [R]: the sequence of each logits row; None as well

    def __len__(self) -> int:
        return len(self.seq_ids)


class InputBatch:
    """The rows."""

    def __init__(
        self,
        num_rows: int,
        max_len: int,
        block_size: int,
        sampling: SamplingState,
        staging: HostBuffer,
        device: torch.device,
    ) -> None:
        self._block_size = block_size
        self._sampling = sampling
        self._move = staging.move
        self._staging = staging
        self._row_of: dict[int, int] = {}
        self._free = list(range(num_rows - 1, -1, -1))
        self._serials = np.zeros(num_rows, np.int64)
        self._tokens = np.zeros((num_rows, max_len + 1), np.int32)
        self._blocks = np.zeros((num_rows, table_width(max_len, block_size)), np.int32)
        self._num_tokens = np.zeros(num_rows, np.int64)
        self._num_on_host = np.zeros(num_rows, np.int64)  # of num_tokens, those whose value `_tokens` has
        self.last_tokens = torch.zeros(num_rows + 1, dtype=torch.int64, device=device)  # and one for padding

    @property
    def num_rows_in_use(self) -> int:
        return len(self._row_of)

    @property
    def padding_row(self) -> int:
        """The row of nobody."""
        return len(self._serials)

    @property
    def max_blocks(self) -> int:
        """The widest block table."""
        return self._blocks.shape[1]

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
        """Pack the chunks (at least one)."""
        rows, lens, ends, row_of_token, positions = self._spread(chunks)
        query_starts = np.concatenate(([0], np.cumsum(lens)))
        fields = np.stack((self._tokens[row_of_token, positions], positions, self._slots(row_of_token, positions)))
        token_ids, placed_positions, slots = self._move(fields)
        late = np.flatnonzero(ends > self._num_on_host[rows])  # their last token is still on the device only
        samples = self._plan_samples(chunks, rows, ends)
        return StepInputs(
            token_ids=token_ids,
            late=(self._move(query_starts[late + 1] - 1), self._move(rows[late])) if len(late) else None,
            positions=placed_positions,
            slot_mapping=slots,
            sequences=self._pack(rows, lens, ends),
            fresh_blocks=self._fresh_blocks(rows, ends - lens, ends),
            tail=self._plan_tail(chunks, samples, query_starts),
            sampling=self._prepare_sampling(samples),
            samples=samples,
        )

    def build_decodes(self, chunks: tuple[SequenceChunk, ...], bucket: int, padding_slot: int) -> ReplayInputs:
        """Pack chunks of one token each, all of which sample one. Padding writes to `padding_slot`, reads nothing.

        Fields: row, token id or LATE, position, slot, length, temperature (float32, in the first half; 0 where that
        does not say all), seed; [7, bucket].
        """
        count = len(chunks)
        rows = np.array([self._row_of[chunk.seq_id] for chunk in chunks])
        starts = np.array([chunk.start for chunk in chunks])
        drawn = self._sampling.plain_draws(rows)
        fields = np.zeros((7, bucket), np.int64)
        fields[0, count:] = self.padding_row
        fields[3, count:] = padding_slot
        fields[0, :count] = rows
        fields[1, :count] = np.where(starts < self._num_on_host[rows], self._tokens[rows, starts], LATE)
        fields[2, :count] = starts
        fields[3, :count] = self._slots(rows, starts)
        fields[4, :count] = starts + 1
        if drawn is not None:
            fields[5].view(np.float32)[:count], fields[6, :count] = drawn
        placed = self._staging.move_first(fields)
        tables = self._move(self._blocks[rows, : int(starts.max()) // self._block_size + 1])
        samples = self._plan_samples(chunks, rows, starts + 1)
        return ReplayInputs(placed, tables, self._prepare_sampling(samples) if drawn is None else None, samples)

    def build_step(self, chunks: tuple[SequenceChunk, ...], layout: StepLayout, padding_slot: int) -> ReplayInputs:
        """Pack chunks of any kind that sample one token each, or none. Fields: [1, layout.length].

        Padding writes to `padding_slot`, belongs to no sequence, and samples for the padding row.
        """
        count = len(chunks)
        rows, lens, ends, row_of_token, positions = self._spread(chunks)
        query_ends, num_tokens, num_decodes = np.cumsum(lens), len(positions), _leading_ones(lens)
        is_known = positions < self._num_on_host[row_of_token]
        sampling = np.flatnonzero([chunk.num_samples > 0 for chunk in chunks])
        num_samples, drawn = len(sampling), self._sampling.plain_draws(rows[sampling])
        fields = np.zeros((1, layout.length), np.int64)
        places = layout.places(fields)
        places.rows[:num_tokens] = row_of_token
        places.token_ids[:num_tokens] = np.where(is_known, self._tokens[row_of_token, positions], LATE)
        places.positions[:num_tokens] = positions
        places.slots[:num_tokens] = self._slots(row_of_token, positions)
        places.slots[num_tokens:] = padding_slot
        places.owners[:] = self.padding_row
        places.owners[:num_samples] = rows[sampling]
        places.sampled[:num_samples] = query_ends[sampling] - 1
        if drawn is not None:
            places.temperatures.view(np.float32)[:num_samples], places.seeds[:num_samples] = drawn
            places.lengths[:num_samples] = ends[sampling]
        places.decode_lens[:num_decodes] = ends[:num_decodes]
        places.seq_lens[:count] = ends
        places.query_starts[1 : count + 1] = query_ends
        places.query_starts[count + 1 :] = num_tokens
        places.tiles[:] = layout.attention.tiles(lens, ends, num_decodes, padding_seq=layout.size.num_seqs)
        placed = self._staging.move_first(fields)
        tables = self._move(self._blocks[rows, : (int(ends.max()) - 1) // self._block_size + 1])
        samples = self._plan_samples(chunks, rows, ends)
        return ReplayInputs(placed, tables, self._prepare_sampling(samples) if drawn is None else None, samples)

    def fill_late(self, inputs: StepInputs) -> None:
        """Put the tokens that never left the device where they belong."""
        if inputs.late is not None:
            places, rows = inputs.late
            inputs.token_ids[places] = self.last_tokens[rows]

    def note_launched(self, samples: Samples, token_ids: torch.Tensor, *, is_written: bool = False) -> None:
        """The step will sample `token_ids` (int64 [R], on the device): later steps may build on them.

        `is_written`: a captured step puts them into `last_tokens` itself.
        """
        chosen = token_ids if samples.firsts is None else token_ids[samples.firsts]
        if not is_written:
            self.last_tokens.index_copy_(0, samples.device_rows, chosen)
        self._sampling.count_sampled(samples.rows, chosen)
        self._num_tokens[samples.rows] += 1

    def note_result(self, samples: Samples, token_ids: Ints) -> None:
        """The sampled tokens (int64 [len(samples)]) are on the host. Void for rows with another occupant by now."""
        same = np.flatnonzero(self._serials[samples.rows] == samples.serials)
        rows, positions = samples.rows[same], samples.positions[same]
        self._tokens[rows, positions] = token_ids[same]
        self._num_on_host[rows] = positions + 1

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

    def _spread(self, chunks: tuple[SequenceChunk, ...]) -> tuple[Ints, Ints, Ints, Ints, Ints]:
        """Of each chunk: its row, its length, where it ends; of each of their tokens: its row, its position."""
        rows = np.array([self._row_of[chunk.seq_id] for chunk in chunks])
        lens = np.array([chunk.num_tokens for chunk in chunks])
        ends = np.array([chunk.start for chunk in chunks]) + lens
        assert (ends <= self._num_tokens[rows]).all(), "a chunk reaches past its sequence's last known token"
        positions = np.arange(lens.sum()) + np.repeat(ends - np.cumsum(lens), lens)
        return rows, lens, ends, np.repeat(rows, lens), positions

    def _pack(self, rows: Ints, lens: Ints, ends: Ints) -> PackedSequences:
        width = table_width(int(ends.max(initial=0)), self._block_size)
        return PackedSequences(
            num_decodes=_leading_ones(lens),
            query_starts=self._move(np.concatenate(([0], np.cumsum(lens))).astype(np.int32)),
            seq_lens=self._move(ends.astype(np.int32)),
            block_tables=self._move(self._blocks[rows, :width]),
            host_query_lens=lens,
            host_seq_lens=ends,
        )

    def _slots(self, rows: Ints, positions: Ints) -> Ints:
        blocks = self._blocks[rows, positions // self._block_size].astype(np.int64)
        slots: Ints = blocks * self._block_size + positions % self._block_size
        return slots

    def _fresh_blocks(self, rows: Ints, starts: Ints, ends: Ints) -> torch.Tensor | None:
        last = (ends - 1) // self._block_size
        fresh = np.flatnonzero((last * self._block_size >= starts) & (ends % self._block_size != 0))
        return self._move(self._blocks[rows[fresh], last[fresh]].astype(np.int64)) if len(fresh) else None

    def _plan_samples(self, chunks: tuple[SequenceChunk, ...], rows: Ints, ends: Ints) -> Samples:
        wanted = [index for index, chunk in enumerate(chunks) if chunk.num_samples]
        if len(wanted) < len(chunks):
            rows, ends = rows[wanted], ends[wanted]
        assert (ends == self._num_tokens[rows]).all(), "a chunk samples before its sequence's last known token"
        counts = tuple(chunks[index].num_samples for index in wanted)
        firsts = owners = None
        if sum(counts) > len(counts):
            firsts = self._move(np.concatenate(([0], np.cumsum(counts)[:-1])))
            owners = self._move(np.repeat(np.arange(len(counts)), counts))
        return Samples(
            seq_ids=tuple(chunks[index].seq_id for index in wanted),
            rows=rows,
            positions=ends,
            serials=self._serials[rows],
            counts=counts,
            num_logprobs=self._sampling.num_logprobs[rows],
            device_rows=self._move(rows),
            firsts=firsts,
            owners=owners,
        )

    def _plan_tail(self, chunks: tuple[SequenceChunk, ...], samples: Samples, query_starts: Ints) -> TailInputs | None:
        if len(samples) == query_starts[-1]:
            return None  # every token is a decode that samples
        rows = query_starts[1:][[chunk.num_samples > 0 for chunk in chunks]] - 1
        return TailInputs(self._move(rows), self._pack(samples.rows, np.ones_like(rows), samples.positions))

    def _prepare_sampling(self, samples: Samples) -> SamplingInputs:
        counts = samples.counts
        rows, lengths = samples.rows, samples.positions
        if samples.firsts is not None:
            rows, lengths = np.repeat(rows, counts), np.repeat(lengths, counts)
        return self._sampling.prepare(rows, lengths, counts)


def table_width(num_tokens: int, block_size: int) -> int:
    """Blocks of a table for as many tokens: rounded up, for some kernels are compiled for the divisors of a stride."""
    return -(-num_tokens // (16 * block_size)) * 16


def _leading_ones(lens: Ints) -> int:
    """How many chunks at the front are one token long: they attend as decodes."""
    longer = np.flatnonzero(lens > 1)
    return int(longer[0]) if len(longer) else len(lens)
