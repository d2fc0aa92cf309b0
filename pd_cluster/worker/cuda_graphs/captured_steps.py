"""What the model runner asks of captured steps, of either kind."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    import torch

    from pd_cluster.scheduling.batch import SequenceChunk
    from pd_cluster.worker.input_batch import ReplayInputs
    from pd_kernels.values import StepSize


@dataclass(frozen=True, slots=True)
class ReplayOutputs:
    """What a replay writes, for every row that its size has room for. The next replay overwrites it."""

    logits: torch.Tensor  # [R, vocab_size]
    token_ids: torch.Tensor  # int64 [R]: drawn from them, or the greedy choice


class CapturedSteps(Protocol):
    """Graphs by size. Their replays follow each other on one stream."""

    @property
    def sizes(self) -> tuple[StepSize, ...]:
        """What was captured."""

    def build(self, chunks: tuple[SequenceChunk, ...], size: StepSize) -> ReplayInputs:
        """The step's inputs, padded to `size`. They are in place once the host buffer was flushed."""

    def replay(self, inputs: ReplayInputs, size: StepSize) -> ReplayOutputs:
        """Run the step. Row i of the outputs belongs to the i-th sequence that samples.

        `last_tokens` holds the drawn tokens already.
        """
