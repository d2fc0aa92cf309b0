"""From logits to tokens: penalties, truncation, and a draw that depends on nothing but the row itself.

All in float32. R rows, V tokens. The draw is Gumbel-max: argmax(logits + noise) samples from softmax(logits), and noise
comes from an integer hash of (seed, position, token id). So a row's token does not depend on the batch around it, and
prefill node, decode node and a rerun draw the same bits.
"""

from __future__ import annotations

import torch

_CANDIDATES = 1024  # sorted first on CPU, where sorting a row of 32000 takes 2 ms and its best 1024 a tenth of that


def apply_penalties(
    logits: torch.Tensor,
    prompt_seen: torch.Tensor,
    output_counts: torch.Tensor,
    repetition: torch.Tensor,
    presence: torch.Tensor,
    frequency: torch.Tensor,
) -> None:
    """In place on `logits` [R, V].

    `prompt_seen` bool [R, V]; `output_counts` int32 [R, V]; the three penalties float32 [R]. Repetition (arXiv
    1909.05858) counts prompt and output, presence and frequency (OpenAI) the output only.
    """
    in_output = output_counts > 0
    factor = torch.where(in_output | prompt_seen, repetition[:, None], 1.0)
    logits.copy_(torch.where(logits > 0, logits / factor, logits * factor))
    logits.sub_(output_counts * frequency[:, None]).sub_(in_output * presence[:, None])


def truncate(logits: torch.Tensor, top_k: torch.Tensor, top_p: torch.Tensor, min_p: torch.Tensor) -> torch.Tensor:
    """`logits` [R, V] (already divided by temperature) with everything outside the three limits at -inf.

    `top_k` int64 [R], V for all; `top_p` float32 [R], the smallest set of the top k whose share reaches it; `min_p`
    float32 [R], a share of the best token's probability. Tokens that tie with the last one kept are kept: the result
    does not depend on how a sort breaks ties.
    """
    vocab_size = logits.shape[1]
    width = vocab_size if logits.is_cuda else min(vocab_size, _CANDIDATES)
    floor, enough = _rank_floor(logits, top_k, top_p, width)
    if width < vocab_size and not bool(enough.all()):
        rest = (~enough).nonzero()[:, 0]
        floor[rest] = _rank_floor(logits[rest], top_k[rest], top_p[rest], vocab_size)[0]
    floor = torch.maximum(floor, logits.amax(-1) + min_p.log())
    return logits.masked_fill(logits < floor[:, None], -torch.inf)


def _rank_floor(
    logits: torch.Tensor, top_k: torch.Tensor, top_p: torch.Tensor, width: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """The lowest logit that top k and top p keep, seen from the best `width` tokens, and whether those sufficed."""
    best = logits.topk(width, dim=-1).values
    inside = torch.arange(width, device=logits.device) < top_k[:, None]
    total = torch.where(top_k <= width, best.masked_fill(~inside, -torch.inf).logsumexp(-1), logits.logsumexp(-1))
    share = (best - total[:, None]).exp().masked_fill(~inside, 0.0)
    before = share.cumsum(-1) - share
    kept = inside & (before < top_p[:, None])
    count = kept.sum(-1).clamp(min=1)
    enough = (count < width) | (top_k <= width)
    floor = best.gather(1, count[:, None] - 1)[:, 0]
    everything = (top_k >= logits.shape[1]) & (top_p >= 1)
    return floor.masked_fill(everything, -torch.inf), enough | everything


def gumbel_sample(logits: torch.Tensor, seeds: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    """One token per row of `logits` [R, V] float32, drawn from its softmax. -> int64 [R].

    `seeds` int64 [R] (any bits); `positions` int64 [R]: how many tokens of the sequence come before the drawn one.
    Overwrites `logits`.
    """
    rate = exponential_noise(seeds, positions, logits.shape[1])
    return logits.sub_(rate.log_()).argmax(-1)


def exponential_noise(seeds: torch.Tensor, positions: torch.Tensor, vocab_size: int) -> torch.Tensor:
    """Exp(1) variates, float32 [R, vocab_size]; minus their logarithm is Gumbel noise.

    From 31 hash bits each; small values, which decide, have full float precision. Never 0 or inf.
    """
    bits = random_bits(seeds, positions, vocab_size)
    uniform = bits.bitwise_and_(0x7FFFFFFF).float().add_(0.5).mul_(2.0**-31).clamp_(max=1 - 2.0**-24)
    return uniform.neg_().log1p_().neg_()


def random_bits(seeds: torch.Tensor, positions: torch.Tensor, vocab_size: int) -> torch.Tensor:
    """32 hash bits for every (row, token), int32 [R, vocab_size]; the same bits on every device.

    A 64-bit key per row (two splitmix64 finalisers over seed and position) enters a 32-bit finaliser (lowbias32's
    constants) over the token id, half before and half amid its rounds. Integer arithmetic wraps.
    """
    key = _mix_64(_mix_64(seeds) + (positions + 1) * -0x61C8864680B583EB)
    low, high = key.to(torch.int32), (key >> 32).to(torch.int32)  # narrowing keeps the low bits
    tokens = torch.arange(vocab_size, dtype=torch.int32, device=seeds.device).mul_(_signed_32(0x9E3779B1))
    bits = tokens + low[:, None]
    bits.bitwise_xor_((bits >> 16).bitwise_and_(0xFFFF)).mul_(_signed_32(0x21F0AAAD)).bitwise_xor_(high[:, None])
    bits.bitwise_xor_((bits >> 15).bitwise_and_(0x1FFFF)).mul_(_signed_32(0x735A2D97))
    return bits.bitwise_xor_((bits >> 15).bitwise_and_(0x1FFFF))


def _signed_32(value: int) -> int:
    return value - (1 << 32) if value >= 1 << 31 else value


def _shift_right(x: torch.Tensor, count: int) -> torch.Tensor:
    """Logical shift of int64 (torch's is arithmetic)."""
    return (x >> count).bitwise_and_((1 << (64 - count)) - 1)


def _mix_64(x: torch.Tensor) -> torch.Tensor:
    """splitmix64's finaliser, in wrapping int64."""
    x = (x ^ _shift_right(x, 30)) * -0x40A7B892E31B1A47
    x = (x ^ _shift_right(x, 27)) * -0x6B2FB644ECCEEE15
    return x ^ _shift_right(x, 31)
