"""Draws from logits that are split over ranks by vocabulary.

    plain rows      greedy, or temperature alone: each rank finds the best token of its part, and 8 bytes a row decide
    other rows      the logits are gathered, rank 0 draws with all its stages, and sends the ids to the others
    late rows       the same, when rank 0 has their masks; the other ranks learn it by a DrawLate

All ranks know which rows are plain: a stage that is active in a row on rank 0 is named at its start (ReportedRows).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch

from pd_cluster.worker.logits_stages.stage import LateStage, LogitsStage
from pd_cluster.worker.sampler import Sampled, sample

if TYPE_CHECKING:
    from collections.abc import Collection

    from pd_cluster.models.shard import Shard
    from pd_cluster.scheduling.batch import SequenceStart
    from pd_cluster.worker.collectives import GroupReduce
    from pd_cluster.worker.ranks import Ranks
    from pd_cluster.worker.sampling_state import SamplingInputs
    from pd_kernels.backends import Kernels
    from pd_kernels.values import Draws, Ints


@dataclass
class ReportedRows:
    """On a rank > 0: what rank 0 has reported of the sequences that it draws itself."""

    changed: Collection[int] = ()  # sequences that start now with a stage that changes their logits
    late: Collection[int] = ()  # sequences that start now with a late stage
    absent: Collection[int] = ()  # sequences that sit out the late draw

    def stages(self, num_rows: int) -> tuple[LogitsStage, ...]:
        """In place of the stages of rank 0: they are active in the same rows, and change nothing."""
        return _ReportedStage(self, [0] * num_rows), _ReportedStage(self, [0] * num_rows, is_late=True)


@dataclass
class _ReportedStage(LateStage):
    _reported: ReportedRows
    _seq_ids: list[int]  # by row
    is_late: bool = False

    def start(self, row: int, start: SequenceStart) -> bool:
        self._seq_ids[row] = start.seq_id
        return start.seq_id in (self._reported.late if self.is_late else self._reported.changed)

    def absent(self, rows: Ints) -> set[int]:
        return {row for row in rows.tolist() if self._seq_ids[row] in self._reported.absent}

    def prepare(self, rows: Ints, lengths: Ints) -> None:
        return None

    def apply(self, logits: torch.Tensor, inputs: object) -> None:
        raise AssertionError("prepare has no inputs")


@dataclass(frozen=True)
class RankPlace:
    """One rank's place among the ranks."""

    shard: Shard
    reduce: GroupReduce
    ranks: Ranks | None = None  # on rank 0
    reported: ReportedRows = field(default_factory=ReportedRows)  # on the others


class RankSampler:
    """The TokenSampler of one rank of several."""

    def __init__(self, place: RankPlace, vocab_size: int, kernels: Kernels) -> None:
        self.num_columns = -(-vocab_size // place.shard.size)
        self.leads = place.shard.rank == 0
        self._first_id = place.shard.rank * self.num_columns
        self._place, self._vocab_size, self._kernels = place, vocab_size, kernels

    def draw(self, logits: torch.Tensor, draws: Draws | None) -> torch.Tensor:
        scores, token_ids = self._kernels.best(logits, draws, self._first_id)
        return self._place.reduce.best(scores, token_ids)

    def sample(self, logits: torch.Tensor, inputs: SamplingInputs) -> Sampled:
        if inputs.is_plain:
            return Sampled(self.draw(logits, inputs.draws))
        whole = self.whole(logits)
        if self.leads:
            sampled = sample(whole, inputs, self._kernels)
        else:
            sampled = Sampled(torch.empty(len(logits), dtype=torch.int64, device=logits.device))
        self._place.reduce.broadcast(sampled.token_ids)
        return sampled

    def whole(self, logits: torch.Tensor) -> torch.Tensor:
        return self._place.reduce.gather(logits)[:, : self._vocab_size].contiguous()

    def tell_late(self, absent: frozenset[int]) -> None:
        if self._place.ranks is not None:
            self._place.ranks.tell_late(absent)
