# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False, disallow-untyped-decorators=False
"""Logits as a draw sees them: float32, and -inf for the tokens that the row's mask bans."""

from __future__ import annotations

from typing import TYPE_CHECKING

import triton
import triton.language as tl

from pd_kernels.sampling_limits import LEAST_LOGIT

if TYPE_CHECKING:
    import torch

    from pd_kernels.values import Draws

_LEAST = tl.constexpr(LEAST_LOGIT)


@triton.jit
def load_logits(logits, row, token, vocab_size, stride, masks, mask_of_row, num_words, HAS_MASKS: tl.constexpr):
    """`token`: any block of token ids; those from `vocab_size` on have -inf. See sampling_limits.allowed."""
    inside = token < vocab_size
    value = tl.load(logits + row * stride + token, mask=inside, other=float("-inf")).to(tl.float32)
    if HAS_MASKS:
        mask = tl.load(mask_of_row + row).to(tl.int64)
        if mask >= 0:
            words = tl.load(masks + mask * num_words + (token >> 5), mask=inside, other=0)
            is_allowed = ((words >> (token & 31)) & 1) != 0
            value = tl.where(is_allowed, tl.where(value < _LEAST, _LEAST, value), float("-inf"))
    return value


def mask_arguments(draws: Draws | None, unused: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, int, bool]:
    """The last four arguments of `load_logits`. `unused`: any tensor, for draws without masks."""
    if draws is None or draws.masks is None:
        return unused, unused, 0, False
    return draws.masks.masks, draws.masks.mask_of_row, draws.masks.masks.stride(0), True
