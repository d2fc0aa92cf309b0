"""The inputs of one step, as they are packed from the rows of live sequences."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

    from pd_cluster.worker.draw_places import CapturedDraw
    from pd_cluster.worker.sampling_state import SamplingInputs
    from pd_kernels.values import Ints, PackedSequences


@dataclass(frozen=True, slots=True)
class TailInputs:
    """The N sequences that sample in a step, when not all tokens of the step sample."""

    rows: torch.Tensor  # int64 [N] into T: each sequence's last token, which gets logits
    # Each sequence with its last token as the only query, for the last layer's KV group; None: it has none
    sequences: PackedSequences | None


@dataclass(frozen=True, slots=True)
class StepInputs:
    """The packed inputs of one step with T tokens of S sequences.

    The tensors hold their values once the host buffer was flushed, `token_ids` once `InputBatch.fill_late` ran too.
    """

    token_ids: torch.Tensor  # int64 [T]
    late: tuple[torch.Tensor, torch.Tensor] | None  # int64: places in `token_ids`, rows of `last_tokens` for them
    positions: torch.Tensor  # int64 [T]
    slot_mappings: tuple[torch.Tensor, ...]  # int64 [T], by KV group
    sequences: tuple[PackedSequences, ...]  # by KV group: only their block tables differ
    fresh_blocks: tuple[torch.Tensor | None, ...]  # int64, by KV group: blocks that this step begins and does not fill
    tail: TailInputs | None  # None: all tokens sample, in order
    sampling: SamplingInputs | None  # of the early samples; None: there are none
    samples: Samples
    parts: SampleParts


@dataclass(frozen=True, slots=True)
class ReplayInputs:
    """The inputs of a replay with S sequences, except those in the host buffer's first array (StepPlaces)."""

    block_tables: tuple[torch.Tensor, ...]  # int32 [S, width], by KV group
    fresh_blocks: tuple[torch.Tensor | None, ...] | None  # as in StepInputs; None: old content is finite for all groups
    # Of the early samples. None: the step's own graph draws them by the settings in StepPlaces
    sampling: SamplingInputs | CapturedDraw | None
    samples: Samples
    parts: SampleParts


@dataclass(frozen=True, slots=True)
class Samples:
    """The N sequences for which a step samples R tokens, in the order of the logits rows.

    A sequence with several rows continues with the token of the first.
    """

    seq_ids: tuple[int, ...]
    rows: Ints
    positions: Ints  # position of the sampled token
    serials: Ints  # tells the row's occupants apart
    counts: tuple[int, ...]  # logits rows of each sequence
    num_logprobs: Ints  # -1: none
    device_rows: torch.Tensor  # `rows` on the device
    firsts: torch.Tensor | None  # int64 [N]: each sequence's first logits row; None: each sequence has one row
    owners: torch.Tensor | None  # int64 [R]: the sequence of each logits row; None: as for `firsts`

    def __len__(self) -> int:
        return len(self.seq_ids)


@dataclass(frozen=True, slots=True)
class Part:
    """Some of a step's samples, which are drawn together."""

    samples: Samples
    places: Ints | None  # int64 [R], the part's rows in the step's logits; None: all of them, in order
    index: torch.Tensor | None  # the same on the device

    def of(self, logits: torch.Tensor) -> torch.Tensor:
        """The part's rows of the step's `logits`."""
        return logits if self.index is None else logits[self.index]


@dataclass(frozen=True, slots=True)
class SampleParts:
    """A step's samples, by the time at which they can be drawn."""

    early: Part | None  # at launch
    late: Part | None  # rows of late stages: when all of their tokens are on the host
