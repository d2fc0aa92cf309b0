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
    """On the device, or on the way from there."""

    token_ids: torch.Tensor  # int64 [R]
    logprobs: torch.Tensor | None = None  # float32 [R]: of the chosen token
    top_ids: torch.Tensor | None = None  # int64 [R, k]
    top_logprobs: torch.Tensor | None = None  # float32 [R, k]

    def to_host(self) -> Sampled:
        """The same in host memory once the stream has come this far: nothing waits, not even for the next step."""
        if not self.token_ids.is_cuda:
            return self
        more = (part if part is None else _fetch(part) for part in (self.logprobs, self.top_ids, self.top_logprobs))
        return Sampled(_fetch(self.token_ids), *more)

    def read(self, num_logprobs: list[int]) -> list[SampledToken]:
        """Of values on the host. `num_logprobs`: how many alternatives each row asked for, -1 for no logprobs."""
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
    """One token per row of `logits` [R, V]. May overwrite them.

    Penalties, then logit_bias, then the ban on EOS, then temperature, top k, top p and min p. Logprobs are those of the
    unmodified distribution. Where nothing changes the logits, they are read once, as they are.
    """
    draws = inputs.draws
    if draws is None:
        return Sampled(kernels.argmax(logits))
    raw = logits.float().log_softmax(-1) if inputs.num_logprobs >= 0 else None
    if inputs.changes_logits:
        logits = logits.float()
        _change(logits, inputs)
    token_ids = kernels.draw(logits, draws)
    if raw is None:
        return Sampled(token_ids)
    top = raw.topk(inputs.num_logprobs, dim=-1)
    return Sampled(token_ids, raw.gather(1, token_ids[:, None])[:, 0], top.indices, top.values)


def _change(logits: torch.Tensor, inputs: SamplingInputs) -> None:
    """What changes greedy choices too, in place."""
    if inputs.penalties is not None:
        inputs.penalties.apply(logits)
    bias, banned = inputs.bias, inputs.banned
    if bias is not None:
        logits.index_put_((bias.rows, bias.tokens), bias.amounts, accumulate=True)
    if banned is not None:
        logits[banned.rows, banned.tokens] = -torch.inf
    for shift in inputs.shifts:
        shift.apply(logits)


def _fetch(tensor: torch.Tensor) -> torch.Tensor:
    host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
    return host.copy_(tensor, non_blocking=True)
