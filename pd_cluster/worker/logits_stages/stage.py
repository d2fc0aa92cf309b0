"""What every logits stage does, and what it is made from."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from collections.abc import Callable

    import numpy as np
    import numpy.typing as npt
    import torch

    from pd_cluster.scheduling.batch import SequenceStart
    from pd_kernels.packed import Ints


@dataclass(frozen=True, slots=True)
class StageContext:
    """The worker, as far as a stage needs to know it. A stage class is called with this and nothing else."""

    num_rows: int  # sequences at once; each has a row of its own while it is in the worker
    vocab_size: int
    eos_token_ids: frozenset[int]
    device: torch.device
    move: Callable[[npt.NDArray[np.generic]], torch.Tensor]  # to the device, with a step's other inputs: see `prepare`


class LogitsStage(Protocol):
    """One kind of change to the logits before a token is drawn. Subclass it, or write a class of the same shape.

    Requests name what they want in their SamplingParams; those of stages from outside read `logits_args`. A row whose
    request does not use a stage costs that stage nothing. Steps without any active row skip all stages, and where only
    temperature and seed are asked for, captured steps draw their tokens themselves. In a step with an active row,
    tokens are drawn behind the forward pass, which may still be captured.

    All methods run on the engine's thread, between steps. An exception ends the engine: refuse nothing in `start`, and
    return False for arguments that the stage does not know. Every node of a cluster needs the same stages.
    """

    is_late: bool = False
    """True if `prepare` needs the values of all earlier tokens on the host, as grammars do.

    Steps with an active row of such a stage are drawn when the result of the step before has been read, not at launch.
    """

    def start(self, row: int, start: SequenceStart) -> bool:
        """Set a row from scratch, from all that is known of its sequence. -> whether the stage is active in the row.

        Called when a sequence enters the worker, and again when it comes back after preemption.
        """

    def prepare(self, rows: Ints, lengths: Ints) -> Any | None:
        """What `apply` needs for the logits of `rows` (int64 [R]); None: it changes nothing in this step.

        At least one of the rows is active. `lengths` (int64 [R]): each sequence's tokens before the sampled one. A row
        that samples several first tokens occurs several times, in neighbouring places. Runs while the device is busy,
        so it must not wait for it. Tensors from `StageContext.move` have their values in `apply`, not before.
        """

    def apply(self, logits: torch.Tensor, inputs: Any) -> None:
        """Change `logits` (float32 [R, vocab_size], on the device) in place. `inputs`: what `prepare` returned."""

    def note(self, rows: Ints, token_ids: torch.Tensor) -> None:
        """Each of `rows` (distinct, at least one is active) continues with its token (int64 [len(rows)]).

        On the device, at the step's launch. For a late stage: in host memory, when the step's result is read.
        """
        return
