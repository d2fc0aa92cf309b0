"""A launched step and the reading of its result."""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import cycle
from typing import TYPE_CHECKING
from zlib import crc32

from pd_cluster.scheduling.batch import StepResult
from pd_cluster.worker.verification import ExpectedRows

if TYPE_CHECKING:
    from collections.abc import Callable

    import torch

    from pd_cluster.errors import PdError
    from pd_cluster.worker.prompt_outputs import LaunchedRead
    from pd_cluster.worker.rank_link import StepOnRanks
    from pd_cluster.worker.sampler import Sampled
    from pd_cluster.worker.step_inputs import Samples
    from pd_cluster.worker.verification import RunPlaces
    from pd_connectors.protocol.messages import SampledToken
    from pd_kernels.values import Ints


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

    def expected(self) -> ExpectedRows | None:
        """See ExpectedRows; None: each sequence has one row."""
        samples = self.samples
        if not samples.has_runs:
            return None
        return ExpectedRows(samples.drafts or [()] * len(samples), samples.counts)

    def read(self) -> tuple[Ints, list[SampledToken]]:
        """The tokens of all logits rows (int64 [R])."""
        sampled = self.sampled if self.places is None else self.sampled.at(self.places)
        return sampled.token_ids.numpy(), sampled.read(self.samples.num_logprobs)


@dataclass(slots=True)
class PendingStep:
    """The Pending of a step on one device."""

    step: int
    note_result: Callable[[Samples, Ints, RunPlaces | None], None]  # see InputBatch
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
        expected = [part.expected() for part in self.parts]  # now: the device waits for what is done after the step
        self.wait()
        drawn: dict[int, tuple[SampledToken, ...]] = {}
        firsts: dict[int, tuple[SampledToken, ...]] = {}
        for part, rows in zip(self.parts, expected, strict=True):
            (token_ids, tokens), samples, runs = part.read(), part.samples, None
            if rows is None:
                drawn |= zip(samples.seq_ids, zip(tokens, strict=True), strict=True)
            else:
                runs = rows.runs(token_ids)
                places = zip(samples.seq_ids, samples.counts, *(one.tolist() for one in runs), strict=True)
                for (seq_id, count, begin, length), drafts in zip(places, samples.drafts or cycle(((),)), strict=False):
                    if drafts or count == 1:
                        drawn[seq_id] = tuple(tokens[begin : begin + length])
                    else:
                        firsts[seq_id] = tuple(tokens[begin : begin + count])
            self.note_result(samples, token_ids, runs)
        prompts = {} if self.prompts is None else self.prompts.read()
        return StepResult(self.step, drawn, firsts, self.failures, self.absent, prompts)
