"""Choose tokens from logits, for all rows of a step at once."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from pd_connectors.protocol.messages import SampledToken, TopLogprob

if TYPE_CHECKING:
    from pd_cluster.worker.sampling_state import SamplingInputs
    from pd_kernels.backends import Kernels


@dataclass(frozen=True, slots=True)
class Sampled:
    """The tokens that a step sampled from R logits rows, on the device or on their way to the host."""

    token_ids: torch.Tensor  # int64 [R]
    logprobs: torch.Tensor | None = None  # float32 [R]: of the chosen token
    top_ids: torch.Tensor | None = None  # int64 [R, k]
    top_logprobs: torch.Tensor | None = None  # float32 [R, k]

    def to_host(self) -> Sampled:
        """Start to copy the values to host memory. They are there once the stream has reached this point."""
        if not self.token_ids.is_cuda:
            return self
        more = (part if part is None else _fetch(part) for part in (self.logprobs, self.top_ids, self.top_logprobs))
        return Sampled(_fetch(self.token_ids), *more)

    def read(self, num_logprobs: list[int]) -> list[SampledToken]:
        """The tokens, from values on the host. `num_logprobs`: alternatives that each row wants; -1: no logprobs."""
        token_ids = self.token_ids.tolist()
        if self.logprobs is None or self.top_ids is None or self.top_logprobs is None:
            return [SampledToken(token_id) for token_id in token_ids]
        rows = zip(
            token_ids,
            self.logprobs.tolist(),
            self.top_ids.tolist(),
            self.top_logprobs.tolist(),
            num_logprobs,
            strict=True,
        )
        return [
            SampledToken(token_id) if wanted < 0
            else SampledToken(token_id, logprob, tuple(map(TopLogprob, ids[:wanted], values[:wanted])))
            for token_id, logprob, ids, values, wanted in rows
        ]  # fmt: skip


def sample(logits: torch.Tensor, inputs: SamplingInputs, kernels: Kernels) -> Sampled:
    """One token per row of `logits` [R, V], which may be overwritten.

    The logits stages change greedy choices too. Temperature, top k, top p and min p follow. Logprobs are those of the
    unmodified distribution. Logits that no stage changes are read once, in their own dtype.
    """
    draws = inputs.draws
    if draws is None:
        return Sampled(kernels.argmax(logits))
    raw = logits.float().log_softmax(-1) if inputs.num_logprobs >= 0 else None
    if inputs.changes:
        logits = logits.float()
        for stage, stage_inputs in inputs.changes:
            stage.apply(logits, stage_inputs)
    token_ids = kernels.draw(logits, draws)
    if raw is None:
        return Sampled(token_ids)
    top = raw.topk(inputs.num_logprobs, dim=-1)
    return Sampled(token_ids, raw.gather(1, token_ids[:, None])[:, 0], top.indices, top.values)


def _fetch(tensor: torch.Tensor) -> torch.Tensor:
    host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
    return host.copy_(tensor, non_blocking=True)
