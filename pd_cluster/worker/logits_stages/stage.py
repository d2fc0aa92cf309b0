"""The interface of a logits stage, and the context that its constructor gets."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from pd_kernels.backends import TORCH

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    import numpy as np
    import numpy.typing as npt
    import torch

    from pd_cluster.errors import PdError
    from pd_cluster.protocol.sampling_params import SamplingParams
    from pd_cluster.scheduling.batch import SequenceStart
    from pd_cluster.worker.draw_places import DrawChanges
    from pd_cluster.worker.grammars import Grammars
    from pd_kernels.backends import Kernels
    from pd_kernels.values import Ints


@dataclass(frozen=True, slots=True)
class StageContext:
    """The properties of the worker that a stage needs."""

    num_rows: int  # sequences at once; each has a row of its own while it is in the worker
    vocab_size: int
    eos_token_ids: frozenset[int]
    device: torch.device
    move: Callable[[npt.NDArray[np.generic]], torch.Tensor]  # to the device, with a step's other inputs: see `prepare`
    grammars: Grammars | None = None  # None: no request has a grammar
    kernels: Kernels = TORCH
    # Wakes the engine, which then asks `is_unready`. A late stage calls it, on any thread, when a row that was absent
    # can be drawn. An engine with nothing else to do would else sleep for a second
    ring: Callable[[], None] = lambda: None


class LogitsStage(Protocol):
    """One kind of change to the logits before a token is drawn. Subclass it, or write a class of the same shape.

    A request names the changes that it wants in its SamplingParams. Stages from outside read `logits_args`. A stage's
    methods are called only for steps in which the stage is active in a row. Steps without any active row skip all
    stages, and a graph draws their tokens. In a step with an active row of a stage from outside, tokens are drawn by
    launches after the forward pass, which may still be replayed.

    A stage allocates its memory on the device in `__init__`. The size of the KV cache is measured with that memory. It
    is measured without any memory that a stage from outside allocates for a request.

    All methods run on the engine's thread. An exception ends the engine, except in `check`. A worker's start makes
    several instances, some of them only to measure memory and to compile kernels. Every node of a cluster needs the
    same stages, because P samples the first token.
    """

    is_late: bool = False  # True of a LateStage

    def __init__(self, context: StageContext) -> None: ...

    @staticmethod
    def check(sampling: SamplingParams) -> None:
        """Raise any exception if the stage cannot serve the request.

        The client gets status 400 with the exception's text. Called for every request at its admission, on the step
        loop. A slow check delays all streams.
        """
        return

    def start(self, row: int, start: SequenceStart) -> bool:
        """Set `row` for a sequence, from all that is known of it. -> whether the stage is active in the row.

        Called when a sequence enters the worker, and again when it comes back after preemption.
        """

    def prepare(self, rows: Ints, lengths: Ints) -> Any | None:
        """Prepare the inputs of `apply` for the logits of `rows` (int64 [R]). None: the stage changes none of them.

        At least one of the rows is active. `lengths` (int64 [R]): each sequence's tokens before the sampled one. A row
        that samples several first tokens occurs several times, in neighbouring places. A row may be past the end of its
        sequence, because a step is launched before the end of the one before is known. Accept such a row; its token is
        dropped. The device is busy during this call, and the call must not wait for the device. Tensors from
        `StageContext.move` have their values in `apply`, not before.
        """

    def prepare_behind(self, rows: Ints, lengths: Ints, before: Ints) -> Any | None:
        """`prepare` for rows of logits after drafts, which a step verifies: a row may occur several times.

        `before` (int64 [R, K]): the tokens that each row of logits assumes after those that were noted of its
        sequence, and NO_TOKEN in the rest. `note` gets those that were right. A stage that changes logits by earlier
        tokens has a method of its own. With a stage from outside there are no drafts.
        """
        return self.prepare(rows, lengths)

    def apply(self, logits: torch.Tensor, inputs: Any) -> None:
        """Change `logits` (float32 [R, vocab_size], on the device) in place. `inputs`: what `prepare` returned."""

    def note(self, rows: Ints, token_ids: torch.Tensor) -> None:
        """Note that each of `rows` (distinct, at least one is active) continues with its token (int64 [len(rows)]).

        The call comes at the step's launch, with `token_ids` on the device. For a late stage the call comes when the
        step's result is read, with `token_ids` in host memory. A late stage gets a run in one call: its row occurs
        once for each token, in neighbouring places.
        """
        return


class LateStage(LogitsStage, Protocol):
    """A stage with a `prepare` that needs the values of all earlier tokens on the host, as grammars do.

    Active rows are drawn when the result of the step before has been read. The other rows of the step are drawn at
    launch. `prepare` is called for late rows when the forward pass is on its way to the device.
    """

    is_late: bool = True

    def expect(self, rows: Ints, drafts: Sequence[tuple[int, ...]], are_known: npt.NDArray[np.bool_]) -> None:
        """Note the drafts that a step, which is launched now, verifies.

        `rows`: distinct, active. `are_known`: whether `note` has got all tokens before the drafts; else it will.
        """
        return

    def absent(self, rows: Ints) -> set[int]:
        """Those of `rows` (distinct, active) that cannot be drawn yet. Asked before `prepare`.

        They sit out this draw: no other method is called for them, and a later step draws them. The call may wait for
        as long as the draw of all other rows may.
        """
        return set()

    def is_unready(self, row: int) -> bool:
        """Whether an active row will be absent from the next draw, too, as far as is known.

        Asked before a step is planned, about rows that were never drawn or have just been absent. The step leaves the
        row out, and a later one asks again. `StageContext.ring` brings the next step at once. A request with a row
        that stays unready for 5 s ends with status 503.
        """
        return False

    def take_failures(self) -> dict[int, PdError]:
        """The rows that cannot go on since the last call, each with the reason. Asked after `prepare`.

        The requests of these rows end with the error: InvalidRequest for what the client asked, Overloaded for what may
        be asked again. Other rows are not disturbed.
        """
        return {}


class CapturedStage(LogitsStage):
    """A stage with changes that a captured draw can apply."""

    def fold(self, rows: Ints, lengths: Ints, changes: DrawChanges) -> bool:
        """Write the changes to the logits of `rows` for a captured draw, as `prepare` does for `apply`.

        Returns False if the draw has no room for them. The captured draw also does the work of `note`.
        """
        raise NotImplementedError
