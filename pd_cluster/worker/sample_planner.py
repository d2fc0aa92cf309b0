"""Plans which rows of logits a step samples from, and for which sequences."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

from pd_cluster.worker.step_inputs import Part, PlainSamples, Samples

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    import numpy.typing as npt
    import torch

    from pd_cluster.scheduling.batch import SequenceChunk
    from pd_cluster.worker.packed_decodes import PackedDecodes
    from pd_kernels.values import Ints


class SamplePlanner:
    """Makes the Samples of steps. It knows the rows of InputBatch by two arrays of theirs, which it only reads."""

    def __init__(self, serials: Ints, num_logprobs: Ints, move: Callable[[Ints], torch.Tensor]) -> None:
        """serials, num_logprobs: by row, see Samples. move: see HostBuffer."""
        self._serials, self._num_logprobs, self._move = serials, num_logprobs, move

    def of_chunks(self, chunks: Sequence[SequenceChunk], rows: Ints, ends: Ints, *, has_drafts: bool) -> Samples:
        """`ends`: of what is certain."""
        counts, seq_ids = [chunk.num_samples for chunk in chunks], [chunk.seq_id for chunk in chunks]
        drafts = [chunk.drafts for chunk in chunks if chunk.num_samples] if has_drafts else []
        if 0 in counts:
            wanted = np.flatnonzero(counts)
            rows, ends = rows[wanted], ends[wanted]
            counts, seq_ids = [counts[index] for index in wanted], [seq_ids[index] for index in wanted]
        if drafts:
            counts = [count + len(one) for count, one in zip(counts, drafts, strict=True)]
        return self._make(seq_ids, rows, ends, counts, drafts)

    def of_decodes(self, packed: PackedDecodes) -> Samples:
        """Of a captured step: its own graph draws, or `launched` is asked for."""
        return Samples(
            seq_ids=packed.seq_ids,
            rows=packed.rows,
            positions=packed.starts + 1,
            serials=self._serials[packed.rows],
            counts=tuple(packed.lens.tolist()),
            drafts=packed.drafts,
            lens=packed.lens,
            draw_rows=packed.row_of_token,
            draw_positions=packed.positions + 1,
            num_logprobs=self._num_logprobs[packed.row_of_token],
            plain=None,
            owners=None,
        )

    def part(self, samples: Samples, chosen: npt.NDArray[np.bool_]) -> Part:
        """The chosen sequences of `samples`."""
        at = np.flatnonzero(chosen)
        counts, seq_ids = [samples.counts[one] for one in at], [samples.seq_ids[one] for one in at]
        places = np.flatnonzero(np.repeat(chosen, samples.counts))
        drafts = [samples.drafts[one] for one in at] if samples.drafts else []
        part = self._make(seq_ids, samples.rows[at], samples.positions[at], counts, drafts)
        return Part(part, places, self._move(places))

    def launched(self, part: Part) -> Part:
        """The part for a draw by launches."""
        samples, firsts = part.samples, None
        if samples.plain is not None:
            return part
        rows = samples.rows
        if samples.has_runs:
            are_plain = samples.lens == 1
            rows, firsts = rows[are_plain], self._move((np.cumsum(samples.counts) - samples.counts)[are_plain])
        return replace(part, samples=replace(samples, plain=PlainSamples(rows, self._move(rows), firsts)))

    def _make(
        self, seq_ids: Sequence[int], rows: Ints, positions: Ints, counts: Sequence[int],
        drafts: Sequence[tuple[int, ...]],
    ) -> Samples:  # fmt: skip
        draw_rows = plain_rows = rows
        draw_positions, firsts, owners = positions, None, None
        lens = np.array([1 + len(one) for one in drafts]) if drafts else np.ones_like(rows)
        if (num_rows := sum(counts)) > len(counts):
            begins, are_plain = np.cumsum(counts) - counts, lens == 1
            offsets = np.arange(num_rows) - np.repeat(begins, counts)  # tokens after that of the sequence's first row
            offsets[np.repeat(are_plain, counts)] = 0  # its rows are copies
            draw_rows, draw_positions = np.repeat(rows, counts), np.repeat(positions, counts) + offsets
            if num_rows > lens.sum():
                owners = self._move(np.repeat(np.cumsum(lens) - lens, counts) + offsets)
            plain_rows, firsts = rows[are_plain], self._move(begins[are_plain])
        return Samples(
            seq_ids=tuple(seq_ids),
            rows=rows,
            positions=positions,
            serials=self._serials[rows],
            counts=tuple(counts),
            drafts=drafts,
            lens=lens,
            draw_rows=draw_rows,
            draw_positions=draw_positions,
            num_logprobs=self._num_logprobs[draw_rows],
            plain=PlainSamples(plain_rows, self._move(plain_rows), firsts),
            owners=owners,
        )
