"""A launched step and the reading of its result."""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import islice
from typing import TYPE_CHECKING, TypeAlias
from zlib import crc32

import numpy as np

from pd_cluster.scheduling.batch import StepResult
from pd_cluster.worker.verification import run_length
from pd_connectors.protocol.messages import SampledToken

if TYPE_CHECKING:
    from collections.abc import Callable

    import torch

    from pd_cluster.errors import PdError
    from pd_cluster.worker.prompt_outputs import LaunchedRead
    from pd_cluster.worker.rank_link import StepOnRanks
    from pd_cluster.worker.sampler import Sampled
    from pd_cluster.worker.step_inputs import Samples
    from pd_kernels.values import Ints

Runs: TypeAlias = dict[int, tuple[SampledToken, ...]]  # by sequence


@dataclass(frozen=True, slots=True)
class DrawnPart:
    """Some of a step's samples, and their tokens."""

    samples: Samples
    sampled: Sampled  # in host memory once the step has retired
    places: Ints | None = None  # the samples' rows in `sampled`; None: all of them, in order

    @property
    def token_ids(self) -> Ints:
        """The sampled ids of the part's logits rows."""
        sampled = self.sampled if self.places is None else self.sampled.at(self.places)
        ids: Ints = sampled.token_ids.numpy()
        return ids

    def read(self) -> tuple[Ints, list[SampledToken]]:
        """Each sequence's first token (int64 [len(samples)]), and the tokens of all logits rows."""
        samples = self.samples
        sampled = self.sampled if self.places is None else self.sampled.at(self.places)
        token_ids, tokens = sampled.token_ids.numpy(), sampled.read(samples.num_logprobs.tolist())
        if samples.firsts is None:  # each has one
            return token_ids, tokens
        return token_ids[np.cumsum(samples.counts) - samples.counts], tokens


@dataclass(slots=True)
class PendingStep:
    """The Pending of a step on one device."""

    step: int
    # Receives samples with their first tokens (int64 [len(samples)]), and the runs of those with drafts by sequence
    note_result: Callable[[Samples, Ints, Runs], None]
    finish_late: Callable[[], object]  # draws its late rows, if they wait still
    parts: list[DrawnPart] = field(default_factory=list)
    is_launched: bool = False  # False: its late rows wait for `Executor.draw_late`
    retired: torch.cuda.Event | None = None  # None: the device is a CPU, so the launch was all of the work
    failures: dict[int, PdError] = field(default_factory=dict)  # see StepResult
    absent: frozenset[int] = frozenset()  # see StepResult; no part has their samples
    others: StepOnRanks | None = None  # the step on the other ranks
    prompts: LaunchedRead | None = None

    @property
    def is_over(self) -> bool:
        is_over = self.is_launched and (self.retired is None or bool(self.retired.query()))  # type: ignore[no-untyped-call]
        return is_over and (self.others is None or self.others.is_over)

    @property
    def has_drafts(self) -> bool:
        return any(part.samples.drafts for part in self.parts)

    def wait(self) -> None:
        """Wait until the step has ended on this device. Another thread may call it."""
        assert self.is_launched, "results are read in the order of launches"
        if self.retired is not None:
            self.retired.synchronize()

    def digest(self) -> int:
        """A checksum of the sampled ids, once the step has ended. Equal on every rank."""
        checksum = 0
        for part in self.parts:
            checksum = crc32(part.token_ids.tobytes(), checksum)
        return checksum

    def result(self) -> StepResult:
        """See Pending. Waits even when nothing was sampled, because others may read the step's blocks next."""
        if self.others is None:
            return self._read()
        with self.others.link.blamed():
            result = self._read()
        self.others.confirm(self.digest())
        return result

    def _read(self) -> StepResult:
        if not self.is_launched:
            self.finish_late()
        self.wait()
        runs: Runs = {}
        firsts: Runs = {}
        for part in self.parts:
            first_ids, tokens = part.read()
            rest = iter(tokens)
            for seq_id, count in zip(part.samples.seq_ids, part.samples.counts, strict=True):
                (runs if count == 1 else firsts)[seq_id] = tuple(islice(rest, count))
            verified = _verified(part.samples, firsts) if part.samples.drafts else {}
            runs |= verified
            self.note_result(part.samples, first_ids, verified)
        prompts = {} if self.prompts is None else self.prompts.read()
        return StepResult(self.step, runs, firsts, self.failures, self.absent, prompts)


def _verified(samples: Samples, drawn: Runs) -> Runs:
    """Take what was drawn for sequences with drafts out of `drawn`, as far as their drafts are right."""
    found = {}
    for seq_id, drafts in zip(samples.seq_ids, samples.drafts, strict=True):
        if drafts:
            tokens = drawn.pop(seq_id)
            found[seq_id] = tokens[: run_length(drafts, [token.token_id for token in tokens])]
    return found
