"""Live sequences as rows of preallocated arrays, and a step's packed inputs made from them.

A row belongs to one sequence from its SequenceStart to its departure. `num_tokens` counts a sampled token from the
launch of its step. Its value reaches the host array when the step's result is read, which may be after the next step's
launch. Until then the value is only in `last_tokens`, on the device.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch

from pd_cluster.worker.sampling_state import DEFERRED
from pd_kernels.values import Ints, PackedSequences

if TYPE_CHECKING:
    from pd_cluster.scheduling.batch import Batch, SequenceChunk, SequenceStart
    from pd_cluster.worker.cuda_graphs.step_layout import StepLayout
    from pd_cluster.worker.host_buffer import HostBuffer
    from pd_cluster.worker.sampling_state import SamplingInputs, SamplingState

LATE = -1  # in place of a token id that is only in `last_tokens` yet


@dataclass(frozen=True, slots=True)
class TailInputs:
    """The sequences of a step that sample, when the step has tokens of others too."""

    rows: torch.Tensor  # int64 [N] into T: each sequence's last token, which gets logits
    sequences: PackedSequences  # of that token alone


@dataclass(frozen=True, slots=True)
class StepInputs:
    """One step, packed: T tokens, S sequences.

    The tensors hold their values once the host buffer was flushed, `token_ids` once `InputBatch.fill_late` ran too.
    """

    token_ids: torch.Tensor  # int64 [T]
    late: tuple[torch.Tensor, torch.Tensor] | None  # int64: places in `token_ids`, rows of the tokens that go there
    positions: torch.Tensor  # int64 [T]
    slot_mapping: torch.Tensor  # int64 [T]
    sequences: PackedSequences
    fresh_blocks: torch.Tensor | None  # int64: blocks that this step begins and does not fill
    tail: TailInputs | None  # None: all tokens sample, in order
    sampling: SamplingInputs  # or DEFERRED
    samples: Samples


@dataclass(frozen=True, slots=True)
class ReplayInputs:
    """One step for a graph, padded to what that has room for. The first S sequences are real."""

    fields: torch.Tensor  # int64, at the host buffer's first place; see `build_decodes`, `build_step`
    block_tables: torch.Tensor  # int32 [S, width]
    sampling: SamplingInputs | None  # or DEFERRED; None: the graph draws the tokens, by the fields
    samples: Samples


@dataclass(frozen=True, slots=True)
class Samples:
    """The N sequences for which a step samples R tokens, in the order of the logits rows.

    A sequence with several rows continues with the token of the first.
    """

    seq_ids: tuple[int, ...]
    rows: Ints
    positions: Ints  # of the sampled token
    serials: Ints  # tells the row's occupants apart
    counts: tuple[int, ...]  # logits rows of each
    num_logprobs: Ints  # -1: none
    device_rows: torch.Tensor  # `rows` on the device
    firsts: torch.Tensor | None  # int64 [N]: each sequence's first logits row; None: it has one each
    owners: torch.Tensor | None  # int64 [R]: the sequence of each logits row; None: as for `firsts`

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
        host_buffer: HostBuffer,
        device: torch.device,
    ) -> None:
        self._block_size = block_size
        self._sampling = sampling
        self._move = host_buffer.move
        self._host_buffer = host_buffer
        self._row_of: dict[int, int] = {}
        self._free = list(range(num_rows - 1, -1, -1))
        self._serials = np.zeros(num_rows, np.int64)
        self._tokens = np.zeros((num_rows, max_len + 1), np.int32)
        self._blocks = np.zeros((num_rows, table_width(max_len, block_size)), np.int32)
        self._num_tokens = np.zeros(num_rows, np.int64)
        self._num_on_host = np.zeros(num_rows, np.int64)  # of num_tokens, those with a value in `_tokens`
        self.last_tokens = torch.zeros(num_rows + 1, dtype=torch.int64, device=device)  # the last one for padding

    @property
    def padding_row(self) -> int:
        """Row index used for padding."""
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
            sampling=self.prepare_sampling(samples),
            samples=samples,
        )

    def build_decodes(self, chunks: tuple[SequenceChunk, ...], bucket: int, padding_slot: int) -> ReplayInputs:
        """Pack chunks of one token each that all sample one token. Padding writes to `padding_slot` and reads nothing.

        Fields [7, bucket]: row, token id or LATE, position, slot, length, temperature (float32, in the first half; 0
        when the row is drawn outside the graph), seed.
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
        placed = self._host_buffer.move_first(fields)
        tables = self._move(self._blocks[rows, : int(starts.max()) // self._block_size + 1])
        samples = self._plan_samples(chunks, rows, starts + 1)
        return ReplayInputs(placed, tables, self.prepare_sampling(samples) if drawn is None else None, samples)

    def build_step(self, chunks: tuple[SequenceChunk, ...], layout: StepLayout, padding_slot: int) -> ReplayInputs:
        """Pack chunks of any length that sample at most one token each. Fields: [1, layout.length].

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
        for tiles, place in places.tiles.items():
            place[:] = tiles.cut(lens, ends, num_decodes, padding_seq=layout.size.num_seqs)
        placed = self._host_buffer.move_first(fields)
        tables = self._move(self._blocks[rows, : (int(ends.max()) - 1) // self._block_size + 1])
        samples = self._plan_samples(chunks, rows, ends)
        return ReplayInputs(placed, tables, self.prepare_sampling(samples) if drawn is None else None, samples)

    def fill_late(self, inputs: StepInputs) -> None:
        """Copy tokens that are on the device only from `last_tokens` into the inputs."""
        if inputs.late is not None:
            places, rows = inputs.late
            inputs.token_ids[places] = self.last_tokens[rows]

    def note_launched(self, samples: Samples, token_ids: torch.Tensor, *, is_written: bool = False) -> None:
        """The step will sample `token_ids` (int64 [R], on the device). Later steps may use them from now on.

        `is_written`: a captured step writes them into `last_tokens` itself.
        """
        chosen = token_ids if samples.firsts is None else token_ids[samples.firsts]
        if not is_written:
            self.last_tokens.index_copy_(0, samples.device_rows, chosen)
        self._sampling.note_sampled(samples.rows, chosen)
        self._num_tokens[samples.rows] += 1

    def note_result(self, samples: Samples, token_ids: Ints) -> None:
        """The sampled tokens (int64 [len(samples)]) are on the host. Rows that changed their occupant are skipped."""
        same = np.flatnonzero(self._serials[samples.rows] == samples.serials)
        rows, positions = samples.rows[same], samples.positions[same]
        known = token_ids[same]
        self._tokens[rows, positions] = known
        self._num_on_host[rows] = positions + 1
        self._sampling.note_read(rows, known)

    def prepare_sampling(self, samples: Samples) -> SamplingInputs:
        """Inputs of the sampler; DEFERRED while a late stage needs tokens that are not on the host."""
        rows, lengths = samples.rows, samples.positions
        is_late = self._sampling.are_late(rows)
        if is_late is not None and (is_late & (self._num_on_host[rows] < lengths)).any():
            return DEFERRED
        if samples.firsts is not None:
            rows, lengths = np.repeat(rows, samples.counts), np.repeat(lengths, samples.counts)
        return self._sampling.prepare(rows, lengths, samples.counts)

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
        """Per chunk: row, length, end. Per token of the chunks: row, position."""
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


def table_width(num_tokens: int, block_size: int) -> int:
    """Columns of a block table for this many tokens. Rounded up: some kernels are compiled per divisor of a stride."""
    return -(-num_tokens // (16 * block_size)) * 16


def _leading_ones(lens: Ints) -> int:
    """Chunks of one token at the front: they attend as decodes."""
    longer = np.flatnonzero(lens > 1)
    return int(longer[0]) if len(longer) else len(lens)
