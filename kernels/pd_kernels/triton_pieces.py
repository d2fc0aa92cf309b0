# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False, disallow-untyped-decorators=False
"""Which tokens of a step a piece has: see `state`. Programs look it up: a captured step may have other lengths."""

from __future__ import annotations

from typing import TYPE_CHECKING

import triton
import triton.language as tl

from pd_kernels.state import PIECE, Prompts

if TYPE_CHECKING:
    from pd_kernels.state import StatePlan

_BLOCK: tl.constexpr = tl.constexpr(256)  # sequences that a program looks at at once


@triton.jit
def sequence_of(piece_starts, num_seqs, piece):
    """The sequence that touches a piece. Of a piece that none touches: any sequence."""
    found, at = 0, tl.arange(0, _BLOCK)
    for first in range(0, num_seqs, _BLOCK):
        begins = tl.load(piece_starts + first + at, mask=first + at < num_seqs, other=2147483647)
        found += tl.sum((begins <= piece).to(tl.int32), 0)
    return found - 1


@triton.jit
def tokens_of(starts, positions, piece_starts, sequence, piece, SIZE: tl.constexpr):
    """-> the token of the piece's first row, which may be of an earlier step; the first of this step; their end."""
    start, end = tl.load(starts + sequence).to(tl.int64), tl.load(starts + sequence + 1)
    position, first = tl.load(positions + sequence), tl.load(piece_starts + sequence)
    base = start - position + (position // SIZE + piece - first) * SIZE
    return base, tl.maximum(base, start), tl.minimum(base + SIZE, end)


def most_pieces(plan: StatePlan, num_tokens: int) -> int:
    """A number of pieces that the step's sequences do not pass, from shapes alone: a captured step has no other."""
    if plan.prompts is not None:
        return len(plan.slots) - plan.prompts.most + plan.prompts.most_pieces
    if plan.saves is not None:
        return len(plan.saves)
    return (num_tokens + 2 * (PIECE - 1) * len(plan.slots)) // PIECE


def prompts_of(plan: StatePlan, num_tokens: int) -> Prompts:
    """Where the sequences of several tokens begin, and how many they may be."""
    if plan.prompts is not None:
        return plan.prompts
    return Prompts(plan.starts, len(plan.slots), most_pieces(plan, num_tokens))  # the first of the starts is 0
