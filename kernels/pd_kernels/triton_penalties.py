# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False, disallow-untyped-decorators=False
"""The penalties of all rows of a step in one launch; rows without penalties cost a load of three numbers."""

from __future__ import annotations

from typing import TYPE_CHECKING

import triton
import triton.language as tl

from pd_kernels.launch_sizes import cdiv
from pd_kernels.triton_dependent_launch import early_options, launches_early, others_may_start, wait_for_others

if TYPE_CHECKING:
    import torch

_PIECE = 2048  # tokens of a program


@triton.jit(do_not_specialize=["settings", "rows"])
def _penalize_kernel(
    logits, seen, counts, settings, rows, vocab_size, stride, table_stride, PIECE: tl.constexpr, EARLY: tl.constexpr
):
    others_may_start(EARLY)
    wait_for_others(EARLY)
    row = tl.program_id(0).to(tl.int64)
    repetition = tl.load(settings + row * 3)
    presence, frequency = tl.load(settings + row * 3 + 1), tl.load(settings + row * 3 + 2)
    if (repetition != 1.0) | (presence != 0.0) | (frequency != 0.0):
        token = tl.program_id(1) * PIECE + tl.arange(0, PIECE)
        inside = token < vocab_size
        at = tl.load(rows + row) * table_stride + token
        value = tl.load(logits + row * stride + token, mask=inside, other=0.0).to(tl.float32)
        if repetition != 1.0:
            repeated = tl.load(seen + at, mask=inside, other=0) != 0
            value = tl.where(repeated, tl.where(value > 0, tl.div_rn(value, repetition), value * repetition), value)
        if (presence != 0.0) | (frequency != 0.0):
            count = tl.load(counts + at, mask=inside, other=0)
            value = value - count.to(tl.float32) * frequency
            value = value - tl.where(count > 0, presence, 0.0)
        tl.store(logits + row * stride + token, value, mask=inside)


def penalize(
    logits: torch.Tensor, seen: torch.Tensor, counts: torch.Tensor, settings: torch.Tensor, rows: torch.Tensor
) -> None:
    """See sampling.penalize. Raises ValueError unless both tables are contiguous and as wide as the logits."""
    num_rows, vocab_size = logits.shape
    if not (seen.is_contiguous() and counts.is_contiguous() and seen.shape == counts.shape == (len(seen), vocab_size)):
        raise ValueError(f"tables {tuple(seen.shape)} and {tuple(counts.shape)} for logits {tuple(logits.shape)}")
    early = launches_early(logits.device)
    _penalize_kernel[(num_rows, cdiv(vocab_size, _PIECE))](
        logits, seen, counts, settings, rows, vocab_size, logits.stride(0), vocab_size, _PIECE, early,
        num_warps=4, **early_options(early), enable_fp_fusion=False,
    )  # fmt: skip
