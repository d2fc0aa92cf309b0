"""Choose tokens from logits, for all rows of a step at once."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import torch

from pd_cluster.protocol.sampling_params import MAX_TOP_LOGPROBS
from pd_cluster.worker.verification import NO_TOKEN
from pd_connectors.protocol.messages import SampledToken, TopLogprob

if TYPE_CHECKING:
    from collections.abc import Callable

    from pd_cluster.worker.sampling_state import SamplingInputs
    from pd_kernels.backends import Kernels
    from pd_kernels.values import Draws, Ints


@dataclass(frozen=True, slots=True)
class Sampled:
    """The tokens that a step sampled from R logits rows, on the device or on their way to the host."""

    token_ids: torch.Tensor  # int64 [R]
    logprobs: torch.Tensor | None = None  # float32 [R]: of the chosen token
    top_ids: torch.Tensor | None = None  # int64 [R, k]
    top_logprobs: torch.Tensor | None = None  # float32 [R, k]

    def to_host(self) -> Sampled:
        """Start to copy the values to host memory. They are there once the stream has reached this point."""
        return self._map(to_host) if self.token_ids.is_cuda else self

    def first(self, count: int) -> Sampled:
        """The first rows."""
        return self._map(lambda values: values[:count])

    def at(self, places: Ints) -> Sampled:
        """The rows at `places`. The values must be on the host."""
        index = torch.from_numpy(places)
        return self._map(lambda values: values[index])

    def _map(self, change: Callable[[torch.Tensor], torch.Tensor]) -> Sampled:
        more = (
            values if values is None else change(values) for values in (self.logprobs, self.top_ids, self.top_logprobs)
        )
        return Sampled(change(self.token_ids), *more)

    def read(self, num_logprobs: Ints) -> list[SampledToken]:
        """The tokens, from values on the host. `num_logprobs`: alternatives that each row wants; -1: no logprobs."""
        token_ids = self.token_ids.numpy().tolist()  # of torch it takes twice as long
        if self.logprobs is None or self.top_ids is None or self.top_logprobs is None:
            return list(map(SampledToken, token_ids))
        rows = zip(
            token_ids,
            self.logprobs.tolist(),
            self.top_ids.tolist(),
            self.top_logprobs.tolist(),
            num_logprobs.tolist(),
            strict=True,
        )
        return [
            SampledToken(token_id) if wanted < 0
            else SampledToken(token_id, logprob, tuple(map(TopLogprob, ids[:wanted], values[:wanted])))
            for token_id, logprob, ids, values, wanted in rows
        ]  # fmt: skip


class TokenSampler(Protocol):
    """Draws tokens from the logits that this rank computes."""

    @property
    def num_columns(self) -> int:
        """V', the logits of a row that this rank computes."""

    @property
    def leads(self) -> bool:
        """Whether this rank decides when late rows are drawn. Another rank calls `follow_late`."""

    def draw(self, logits: torch.Tensor, draws: Draws | None) -> torch.Tensor:
        """Draw rows of `logits` [R, V'] by temperature and seed alone; None: all greedy. -> int64 [R]. Capturable."""

    def sample(self, logits: torch.Tensor, inputs: SamplingInputs) -> Sampled:
        """One token per row of `logits` [R, V'], which may be overwritten."""

    def whole(self, logits: torch.Tensor) -> torch.Tensor:
        """The logits [R, V] of the whole vocabulary, of `logits` [R, V'] on every rank."""

    def tell_late(self, absent: frozenset[int]) -> None:
        """Note that the late rows of the newest step are drawn next, except those of the sequences `absent`."""


@dataclass(frozen=True, slots=True)
class WholeSampler:
    """The TokenSampler of a rank that computes all logits."""

    num_columns: int
    kernels: Kernels
    leads: bool = True

    def draw(self, logits: torch.Tensor, draws: Draws | None) -> torch.Tensor:
        return self.kernels.argmax(logits) if draws is None else self.kernels.draw(logits, draws)

    def sample(self, logits: torch.Tensor, inputs: SamplingInputs) -> Sampled:
        return sample(logits, inputs, self.kernels)

    def whole(self, logits: torch.Tensor) -> torch.Tensor:
        return logits

    def tell_late(self, absent: frozenset[int]) -> None:
        return


def sample(logits: torch.Tensor, inputs: SamplingInputs, kernels: Kernels) -> Sampled:
    """One token per row of `logits` [R, V], which may be overwritten; NO_TOKEN for a void row of the masks.

    The logits stages change greedy choices too. Temperature, top k, top p and min p follow. Logprobs are those of the
    unmodified distribution. Logits that no stage changes are read once, in their own dtype.
    """
    draws = inputs.draws
    if draws is None:
        return Sampled(kernels.argmax(logits))
    raw = logits
    if inputs.changes:
        logits = logits.to(torch.float32, copy=inputs.has_logprobs)
        for stage, stage_inputs in inputs.changes:
            stage.apply(logits, stage_inputs)
    token_ids = kernels.draw(logits, draws)
    logprobs = kernels.logprobs(raw, token_ids, most_logprobs(raw)) if inputs.has_logprobs else ()
    if draws.masks is not None and draws.masks.void is not None:
        token_ids.index_fill_(0, draws.masks.void, NO_TOKEN)
    return Sampled(token_ids, *logprobs)


def most_logprobs(logits: torch.Tensor) -> int:
    """The number of best tokens that are looked up for all rows, whatever each wants: a number compiles kernels."""
    return min(MAX_TOP_LOGPROBS, logits.shape[1])


def to_host(tensor: torch.Tensor) -> torch.Tensor:
    """Start to copy a tensor to host memory. The values are there once the stream has reached this point."""
    if not tensor.is_cuda:
        return tensor
    host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
    return host.copy_(tensor, non_blocking=True)
