"""Live sequences as rows of preallocated arrays, and the packed inputs of steps.

A row belongs to one sequence from its SequenceStart to its departure. `num_tokens` counts a sampled token from the
launch of its step. The token's value reaches the host array when the step's result is read, which may be after the next
step's launch. Until then the value is only in `last_tokens`, on the device.
"""

from __future__ import annotations

from bisect import bisect_right
from itertools import chain
from typing import TYPE_CHECKING, TypeAlias

import numpy as np
import torch

from pd_cluster.worker.block_tables import BlockTables
from pd_cluster.worker.draw_planner import DrawPlanner
from pd_cluster.worker.packed_decodes import PackedDecodes
from pd_cluster.worker.sample_planner import SamplePlanner
from pd_cluster.worker.sampling_state import SamplingInputs
from pd_cluster.worker.step_inputs import ReplayInputs, StepInputs, TailInputs, up_to
from pd_kernels.lora import NO_SLOT, AdapterRows
from pd_kernels.values import Ints, PackedSequences, leading_ones

if TYPE_CHECKING:
    from collections.abc import Sequence

    from pd_cluster.scheduling.batch import Batch, BeamStep, SequenceChunk, SequenceStart
    from pd_cluster.worker.cuda_graphs.captured_step import CapturedStep, StepPlaces
    from pd_cluster.worker.draw_places import DrawLayout
    from pd_cluster.worker.host_buffer import HostBuffer
    from pd_cluster.worker.sampling_state import SamplingState
    from pd_cluster.worker.step_inputs import Samples
    from pd_cluster.worker.verification import RunPlaces

# Starting sequences with active logits stages: those without a late stage, those with one
Staged: TypeAlias = tuple[tuple[int, ...], tuple[int, ...]]


class InputBatch:
    """Keeps a row for each live sequence, and packs the inputs of steps from the rows."""

    def __init__(
        self,
        num_rows: int,
        max_len: int,
        block_sizes: Sequence[int],
        sampling: SamplingState,
        host_buffer: HostBuffer,
        vocab_size: int,
        device: torch.device,
        last_group: int = 0,
        *,
        mixes_dtypes: bool = False,
        has_states: bool = False,
    ) -> None:
        """`block_sizes`: by KV group, without that of states. `last_group`: that of the last layer.

        `mixes_dtypes`: memory of one group may be NaN for another one. `has_states`: the group after these is STATE.
        """
        self._tables = BlockTables(num_rows, max_len, block_sizes, has_states=has_states)
        self._states = self._tables.states
        self._last_group, self._mixes_dtypes, self._sampling = last_group, mixes_dtypes, sampling
        self._move, self._host_buffer = host_buffer.move, host_buffer
        self._row_of: dict[int, int] = {}
        self._free = list(range(num_rows - 1, -1, -1))
        self._serials, self._slots = np.zeros(num_rows, np.int64), np.full(num_rows, NO_SLOT)
        self._adapted: set[int] = set()  # the sequences that have adapters
        self._samples = SamplePlanner(self._serials, sampling.num_logprobs, host_buffer.move)
        self.launched = self._samples.launched
        self._tokens = np.zeros((num_rows, max_len + 1), np.int32)
        self._num_tokens, self._num_on_host = np.zeros((2, num_rows), np.int64)  # tokens; those that `_tokens` has
        self.drawing = DrawPlanner(sampling, self._samples, self._num_on_host, host_buffer.move)
        # A captured step's token: the last one of a row (0 at first), or any. One launch finds it; `where` takes four
        self.token_choices = torch.arange(-num_rows - 1, vocab_size, device=device).clamp_(min=0)
        self.last_tokens = self.token_choices[: num_rows + 1]  # the last one for padding

    @property
    def padding_row(self) -> int:
        """Row index used for padding."""
        return len(self._serials)

    @property
    def max_blocks(self) -> tuple[int, ...]:
        """The most blocks of a row's block table, by KV group."""
        return self._tables.widths

    def apply(self, batch: Batch) -> None:
        """Apply a batch to the rows: beams, then departures, then starts, then the chunks' new blocks."""
        if batch.beam_steps:
            self._step_beams(batch.beam_steps)
        for seq_id in batch.departures:
            self._free.append(self._row_of.pop(seq_id))
            self._adapted.discard(seq_id)
        for start in batch.starts:
            self._start(start)
        for chunk in batch.chunks:
            if chunk.new_blocks:
                self._tables.write(self._row_of[chunk.seq_id], chunk.new_blocks)

    def staged(self, starts: Sequence[SequenceStart]) -> Staged:
        """The sequences among `starts`, which were applied, that have active stages."""
        if not starts:
            return (), ()
        seq_ids = np.array([start.seq_id for start in starts])
        rows = np.array([self._row_of[start.seq_id] for start in starts])
        are_late, are_changed = self._sampling.are_late(rows), self._sampling.are_changed(rows)
        return tuple(seq_ids[are_changed & ~are_late].tolist()), tuple(seq_ids[are_late].tolist())

    def clear(self) -> None:
        """Free all rows."""
        self._free += self._row_of.values()
        self._row_of.clear()
        self._adapted.clear()

    def has_adapters(self, batch: Batch) -> bool:
        """Whether some chunks of a batch, which was not applied, are of sequences with adapters."""
        adapted = self._adapted.union(start.seq_id for start in batch.starts if start.adapter != NO_SLOT)
        return bool(adapted) and any(chunk.seq_id in adapted for chunk in batch.chunks)

    def build(self, chunks: tuple[SequenceChunk, ...]) -> StepInputs:
        """Pack the chunks (at least one)."""
        rows, lens, ends, known, row_of_token, positions = self._spread(chunks)
        query_starts = np.concatenate(([0], np.cumsum(lens)))
        slots = [self._tables.slots(group, row_of_token, positions) for group in self._tables.groups]
        fields = np.stack((self._tokens[row_of_token, positions], positions, *slots))
        token_ids, placed_positions, *slot_mappings = self._move(fields)
        unread = np.flatnonzero(known > self._num_on_host[rows])  # their last token is still on the device only
        places = query_starts[unread + 1] - 1 - (ends - known)[unread]
        samples = self._plan_samples(chunks, rows, known, has_drafts=known is not ends)
        early, late = self.drawing.split(samples)
        sampled = None if samples.num_logits == len(positions) else self._sampled(chunks, samples, query_starts)
        return StepInputs(
            token_ids=token_ids,
            unread=(self._move(places), self._move(rows[unread])) if len(unread) else None,
            positions=placed_positions,
            slot_mappings=tuple(slot_mappings),
            sequences=self._pack(rows, lens, ends, query_starts, self._tables.groups),
            fresh_blocks=self._clear(rows, ends - lens, ends),
            tail=None if sampled is None else self._plan_tail(sampled, samples),
            states=None if self._states is None else self._states.plan(chunks, rows, lens, ends, self._move),
            adapters=AdapterRows.of(self._slots[row_of_token], sampled, self._move) if self._adapted else None,
            samples=samples,
            early=early,
            late=late,
            sampling=None if early is None else self.drawing.prepare(early.samples),
        )

    def build_replay(
        self, chunks: tuple[SequenceChunk, ...], step: CapturedStep, padding_slots: Ints, draws: DrawLayout | None
    ) -> ReplayInputs:
        """Pack chunks that draw at most one token after each of theirs, padded to the size of `step`.

        `padding_slots`: see CapturedStep. `draws`: the layout of captured draws; None: there are none.
        """
        places = step.places(self._host_buffer.take_first(step.length))
        step.pad(places, self.padding_row, padding_slots)
        if not step.size.num_chunks:
            return self._build_decodes(chunks, step, places, draws)
        rows, lens, ends, known, row_of_token, positions = self._spread(chunks)
        num_tokens = len(positions)
        choices = len(self.last_tokens) + self._tokens[row_of_token, positions]
        are_on_host = positions < self._num_on_host[row_of_token]
        if has_drafts := known is not ends:
            are_on_host |= positions >= np.repeat(known, lens)
        places.tokens[:num_tokens] = np.where(are_on_host, choices, row_of_token)
        places.positions[:num_tokens] = positions
        for group in self._tables.groups:
            places.slots[group, :num_tokens] = self._tables.slots(group, row_of_token, positions)
        if self._states is not None:
            self._states.fill_pieces(places.states, chunks, rows, lens, ends)
        samples = self._plan_samples(chunks, rows, known, has_drafts=has_drafts)
        step.fill(places, chunks, samples, lens, ends)
        places.put_adapters(self._slots[row_of_token])
        return self._replayed(samples, rows, lens, ends, places, draws)

    def _build_decodes(
        self, chunks: tuple[SequenceChunk, ...], step: CapturedStep, places: StepPlaces, draws: DrawLayout | None
    ) -> ReplayInputs:
        """See `build_replay`: of decodes alone. The device waits for those with drafts, and for the ones after them."""
        packed = PackedDecodes.of(chunks, self._row_of)
        rows, starts, lens, positions = packed.rows, packed.starts, packed.lens, packed.positions
        num_tokens, num_before = len(positions), len(self.last_tokens)
        samples = self._samples.of_decodes(packed)
        self._check(samples)
        if packed.drafts:
            self._tokens[packed.row_of_token[packed.drafted], positions[packed.drafted]] = packed.flat
        known = np.where(starts < self._num_on_host[rows], self._tokens[rows, starts] + num_before, rows)
        packed.fill_tokens(places.tokens[:num_tokens], known, num_before)
        places.positions[:num_tokens] = positions
        for group in self._tables.groups:
            places.slots[group, :num_tokens] = self._tables.slots(group, packed.row_of_token, positions)
        if self._states is not None:
            self._states.fill(places.states, chunks, rows, positions)
        ends = starts + lens
        step.fill(places, chunks, samples, lens, ends)
        places.put_adapters(self._slots[packed.row_of_token])
        return self._replayed(samples, rows, lens, ends, places, draws)

    def _replayed(
        self, samples: Samples, rows: Ints, lens: Ints, ends: Ints, places: StepPlaces, draws: DrawLayout | None
    ) -> ReplayInputs:
        """The inputs of a replay but for `places`, which get those of its draw."""
        num_rows = len(samples.draw_rows)  # a sequence with drafts goes on when its run is on the host
        places.owners[:num_rows] = samples.draw_rows
        places.lengths[:num_rows] = samples.draw_positions
        early, late = self.drawing.split(samples)
        longest = int(ends.max())
        tables = tuple([self._move(self._tables.columns(group, rows, longest)) for group in self._tables.groups])
        fresh = self._clear(rows, ends - lens, ends) if self._mixes_dtypes else None
        sampling = self.drawing.plan_captured(early, places, draws)
        if early is not None and isinstance(sampling, SamplingInputs):
            early = self.launched(early)
        return ReplayInputs(tables, fresh, samples, early, late, sampling)

    def fill_late(self, inputs: StepInputs) -> None:
        """Copy the tokens that are only on the device from `last_tokens` into the inputs."""
        if inputs.unread is not None:
            places, rows = inputs.unread
            inputs.token_ids[places] = self.last_tokens[rows]

    def note_launched(self, samples: Samples, token_ids: torch.Tensor | None) -> None:
        """Note that the step will sample `token_ids` (int64 [R], on the device). Later steps may use them from now on.

        None: a graph draws the tokens, writes them into `last_tokens`, and counts them. Those of a sequence with drafts
        wait for `note_result`.
        """
        if token_ids is not None:
            assert samples.plain is not None
            rows, device_rows, firsts = samples.plain
            chosen = token_ids if firsts is None else token_ids[firsts]
            self.last_tokens.index_copy_(0, device_rows, chosen)
            self._sampling.note_sampled(rows, chosen)
        self._num_tokens[samples.rows] += 1

    def note_result(self, samples: Samples, token_ids: Ints, runs: RunPlaces | None) -> None:
        """Note the sampled tokens (int64 [R], on the host). runs: the next ones of each sequence; None: each has one.

        A row that has another sequence by now is skipped.
        """
        are_same = self._serials[samples.rows] == samples.serials
        same = slice(None) if are_same.all() else np.flatnonzero(are_same)  # in nearly all steps nothing is copied
        if runs is None:
            rows, positions, known = samples.rows[same], samples.positions[same], token_ids[same]
            self._tokens[rows, positions] = known
            self._num_on_host[rows] = positions + 1
            self._sampling.note_read(rows, known)
        elif are_same.any():
            self._note_runs(samples, same, token_ids, runs)

    def _note_runs(self, samples: Samples, same: Ints | slice, token_ids: Ints, runs: RunPlaces) -> None:
        """Note the runs of the sequences at `same` in `samples`."""
        rows, begins, lens = samples.rows[same], runs.begins[same], runs.lens[same]
        ends, lasts = samples.positions[same] + lens, begins + lens - 1
        self._tokens[rows, ends - 1] = token_ids[lasts]  # those before it are drafts, which the row has
        self._num_on_host[rows] = ends
        if self._sampling.are_late(rows).any():
            self._sampling.note_read(np.repeat(rows, lens), token_ids[up_to(lasts + 1, lens)])
        if not samples.drafts:
            return
        self._num_tokens[rows] = ends  # nothing is launched after a step with drafts before this
        changed = self._sampling.are_changed(rows) & (samples.lens[same] > 1)
        if changed.any():
            self._tell_stages(rows[changed], begins[changed], lens[changed], token_ids)

    @torch.inference_mode()
    def _tell_stages(self, rows: Ints, begins: Ints, lens: Ints, token_ids: Ints) -> None:
        """Tell stages of runs, one token of each after the other."""
        for place in range(lens.max()):
            going = lens > place
            drawn = torch.from_numpy(token_ids[begins[going] + place])
            drawn = drawn.to(self.last_tokens.device, non_blocking=True)  # CUDA has read pageable memory on return
            self._sampling.note_sampled(rows[going], drawn)

    def is_unready(self, seq_id: int) -> bool | None:
        """See `SamplingState.is_unready`. None: the sequence has no row."""
        row = self._row_of.get(seq_id)
        return None if row is None else self._sampling.is_unready(row)

    def _start(self, start: SequenceStart) -> None:
        assert start.seq_id not in self._row_of, f"sequence {start.seq_id} already has a row"
        row = self._row_of[start.seq_id] = self._free.pop()
        self._serials[row] += 1
        count = len(start.token_ids)
        self._tokens[row, :count] = start.token_ids
        self._num_tokens[row] = self._num_on_host[row] = count
        self._tables.start(row, start.tables)
        self._slots[row] = start.adapter
        if start.adapter != NO_SLOT:
            self._adapted.add(start.seq_id)
        self._sampling.start(row, start)

    def _step_beams(self, steps: tuple[BeamStep, ...]) -> None:
        rows = np.array([self._row_of[step.seq_id] for step in steps])
        parents = np.array([self._row_of[step.parent] for step in steps])
        ends, moved = self._num_tokens[parents], rows != parents
        to, of, longest = rows[moved], parents[moved], int(ends.max())
        self._tokens[to, :longest] = self._tokens[of, :longest]  # the right side is a copy of all rows
        self._tables.copy(to, of)
        self._num_tokens[rows] = self._num_on_host[rows] = ends
        self._tokens[rows, ends - 1] = [step.token_id for step in steps]

    def _spread(self, chunks: tuple[SequenceChunk, ...]) -> tuple[Ints, Ints, Ints, Ints, Ints, Ints]:
        """Per chunk: row, length, end, end of what is certain. Per token of the chunks: row, position.

        Without drafts the two ends are one array.
        """
        rows = np.array([self._row_of[chunk.seq_id] for chunk in chunks])
        starts = np.array([chunk.start for chunk in chunks])
        lengths = [chunk.num_tokens for chunk in chunks]
        num_tokens, count = sum(lengths), len(lengths)
        are_single = num_tokens == count  # as in most steps of a decode node
        lens = np.ones(count, np.int64) if are_single else np.array(lengths)
        ends = known = starts + lens
        if not are_single and chunks[bisect_right(lengths, 1) - count].drafts:  # they are after the single tokens
            known = ends - [len(chunk.drafts) for chunk in chunks]
        assert (known <= self._num_tokens[rows]).all(), "a chunk reaches past its sequence's last known token"
        if are_single:
            return rows, lens, ends, known, rows, starts
        positions, row_of_token = up_to(ends, lens), np.repeat(rows, lens)
        if known is not ends:
            are_drafts = positions >= np.repeat(known, lens)
            drafts = [*chain.from_iterable([chunk.drafts for chunk in chunks])]
            self._tokens[row_of_token[are_drafts], positions[are_drafts]] = drafts
        return rows, lens, ends, known, row_of_token, positions

    def _pack(
        self, rows: Ints, lens: Ints, ends: Ints, query_starts: Ints, groups: Sequence[int]
    ) -> tuple[PackedSequences, ...]:
        """Pack the sequences for each of the KV groups. They share all but the block tables."""
        longest, num_decodes = int(ends.max(initial=0)), leading_ones(lens)
        starts, seq_lens = self._move(query_starts.astype(np.int32)), self._move(ends.astype(np.int32))
        tables = [self._move(self._tables.columns(group, rows, longest, rounded=True)) for group in groups]
        return tuple([PackedSequences(num_decodes, starts, seq_lens, table, lens, ends) for table in tables])

    def _clear(self, rows: Ints, starts: Ints, ends: Ints) -> tuple[torch.Tensor | None, ...]:
        """The blocks to clear before tokens [starts, ends) of rows are written, by KV group."""
        found = [self._tables.fresh(group, rows, starts, ends) for group in self._tables.groups]
        return tuple([None if blocks is None else self._move(blocks) for blocks in found])

    def _plan_samples(self, chunks: tuple[SequenceChunk, ...], rows: Ints, ends: Ints, *, has_drafts: bool) -> Samples:
        samples = self._samples.of_chunks(chunks, rows, ends, has_drafts=has_drafts)
        self._check(samples)
        return samples

    def _check(self, samples: Samples) -> None:
        known = self._num_tokens[samples.rows]
        assert (samples.positions == known).all(), "a chunk samples before its sequence's last known token"

    def _sampled(self, chunks: tuple[SequenceChunk, ...], samples: Samples, query_starts: Ints) -> Ints:
        """The tokens after which something is drawn."""
        return samples.with_logits(query_starts[1:][[chunk.num_samples > 0 for chunk in chunks]])

    def _plan_tail(self, places: Ints, samples: Samples) -> TailInputs:
        rows, ends = samples.rows, samples.positions
        if samples.drafts:
            rows, ends = np.repeat(rows, samples.lens), up_to(ends + samples.lens, samples.lens)
        packed = self._pack(rows, np.ones_like(rows), ends, np.arange(len(rows) + 1), (self._last_group,))
        return TailInputs(self._move(places), packed[0])
