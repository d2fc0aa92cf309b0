"""The inputs of one step, as they are packed from the rows of live sequences."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Sequence

    import torch

    from pd_cluster.worker.draw_places import CapturedDraw
    from pd_cluster.worker.sampling_state import SamplingInputs
    from pd_kernels.lora import AdapterRows
    from pd_kernels.state import StatePlan
    from pd_kernels.values import Ints, PackedSequences


@dataclass(frozen=True, slots=True)
class TailInputs:
    """The N sequences that sample in a step, when not all tokens of the step sample."""

    rows: torch.Tensor  # int64 [L] into T: the tokens that get logits: each sequence's last one, with its drafts
    sequences: PackedSequences  # each of these tokens as the only query of a sequence, for the last layer's KV group


@dataclass(frozen=True, slots=True)
class StepInputs:
    """The packed inputs of one step with T tokens of S sequences.

    The tensors hold their values once the host buffer was flushed, `token_ids` once `InputBatch.fill_late` ran too.
    """

    token_ids: torch.Tensor  # int64 [T]
    unread: tuple[torch.Tensor, torch.Tensor] | None  # int64: places in `token_ids`, rows of `last_tokens` for them
    positions: torch.Tensor  # int64 [T]
    slot_mappings: tuple[torch.Tensor, ...]  # int64 [T], by KV group
    sequences: tuple[PackedSequences, ...]  # by KV group: only their block tables differ
    fresh_blocks: tuple[torch.Tensor | None, ...]  # int64, by KV group: blocks that this step begins and does not fill
    tail: TailInputs | None  # None: all tokens sample, in order
    states: StatePlan | None  # None: the model has none
    adapters: AdapterRows | None  # None: no row has one
    samples: Samples
    early: Part | None  # the samples that can be drawn at launch
    late: Part | None  # those of rows with late stages, which can be when all of their tokens are on the host
    sampling: SamplingInputs | None  # of the early samples; None: there are none


@dataclass(frozen=True, slots=True)
class ReplayInputs:
    """The inputs of a replay with S sequences, except those in the host buffer's first array (StepPlaces)."""

    block_tables: tuple[torch.Tensor, ...]  # int32 [S, width], by KV group
    fresh_blocks: tuple[torch.Tensor | None, ...] | None  # as in StepInputs; None: old content is finite for all groups
    samples: Samples
    early: Part | None  # as in StepInputs
    late: Part | None
    # Of the early samples. None: the step's own graph draws them by the settings in StepPlaces
    sampling: SamplingInputs | CapturedDraw | None


class PlainSamples(NamedTuple):
    """The P sequences of a step that have no drafts, for a draw by launches: it writes what they go on with."""

    rows: Ints  # [P]
    device_rows: torch.Tensor  # the same on the device
    firsts: torch.Tensor | None  # int64 [P]: the first logits row of each; None: each of the N sequences has one row


@dataclass(frozen=True, slots=True)
class Samples:
    """The N sequences for which a step samples R tokens, in the order of the logits rows.

    A sequence with several rows has drafts, or continues with the token of the first. One with drafts continues with a
    run, which is not known before the result is read.
    """

    seq_ids: tuple[int, ...]
    rows: Ints
    positions: Ints  # position of the sampled token, or of the first one
    serials: Ints  # tells the row's occupants apart
    counts: tuple[int, ...]  # logits rows of each sequence
    drafts: Sequence[tuple[int, ...]]  # of each sequence; empty: none has drafts
    lens: Ints  # rows of each among those that the model computes
    draw_rows: Ints  # [R]: `rows` by logits row
    draw_positions: Ints  # [R]: of the token that is sampled
    num_logprobs: Ints  # [R]; -1: none
    plain: PlainSamples | None  # None: a graph draws for all of them
    owners: torch.Tensor | None  # int64 [R] into L: which of the model's rows each is a copy of; None: it is the same

    def __len__(self) -> int:
        return len(self.seq_ids)

    @property
    def has_runs(self) -> bool:
        """Whether a sequence has several rows."""
        return len(self.draw_rows) > len(self.seq_ids)

    @property
    def num_logits(self) -> int:
        """L, the rows of logits that the model computes."""
        return len(self.seq_ids) + sum(map(len, self.drafts))

    def with_logits(self, query_ends: Ints) -> Ints:
        """The tokens of the step that get logits [L]. `query_ends` [N]: the place after each sequence's last token."""
        return up_to(query_ends, self.lens) if self.drafts else query_ends - 1


@dataclass(frozen=True, slots=True)
class Part:
    """Some of a step's samples, which are drawn together."""

    samples: Samples
    places: Ints | None  # int64 [R], the part's rows in the step's logits; None: all of them, in order
    index: torch.Tensor | None  # the same on the device

    def of(self, logits: torch.Tensor) -> torch.Tensor:
        """The part's rows of the step's `logits`."""
        return logits if self.index is None else logits[self.index]


def up_to(ends: Ints, counts: Ints) -> Ints:
    """The `counts` numbers before each of `ends` (at least one), in order."""
    sums = np.cumsum(counts)
    return np.arange(sums[-1]) + np.repeat(ends - sums, counts)
