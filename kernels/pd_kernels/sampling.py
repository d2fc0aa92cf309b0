"""Choose tokens from logits: penalties, truncation, and a draw that depends on its own row only.

R rows, V tokens; all arithmetic is in float32. The draw is Gumbel-max: argmax(logits + noise) samples from
softmax(logits), and the noise is an integer hash of (seed, position, token id). So a row's token does not depend on the
rest of the batch, and prefill node, decode node and a rerun draw the same bits.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from pd_kernels.values import Draws

_CANDIDATES = (64, 1024)  # best tokens sorted on CPU before all tokens are: sorting a row of 32000 takes 2 ms
_PIECE = 1 << 18  # elements drawn at a time on CPU: noise for 32 x 32000 takes 3.5 ms in cache, 6.0 ms in memory


def penalize_repetition(logits: torch.Tensor, seen: torch.Tensor, penalty: torch.Tensor) -> None:
    """Divide the logits of `seen` tokens by `penalty` [R] where they are positive, multiply them where not. In place.

    `logits` [R, V]; `seen` bool [R, V]: tokens of the prompt and of the output. The definition is that of arXiv
    1909.05858.
    """
    factor = torch.where(seen, penalty[:, None], 1.0)
    logits.copy_(torch.where(logits > 0, logits / factor, logits * factor))


def penalize_counts(
    logits: torch.Tensor, counts: torch.Tensor, presence: torch.Tensor, frequency: torch.Tensor
) -> None:
    """Lower `logits` [R, V] of each token in the output, in place.

    The token's logit falls by `presence` [R], and by `frequency` [R] per occurrence. `counts` int32 [R, V]: occurrences
    in the output. The definition is OpenAI's.
    """
    logits.sub_(counts * frequency[:, None]).sub_((counts > 0) * presence[:, None])


def truncate(logits: torch.Tensor, top_k: torch.Tensor, top_p: torch.Tensor, min_p: torch.Tensor) -> torch.Tensor:
    """A copy of `logits` [R, V] (already divided by temperature) with -inf for every token outside the three limits.

    `top_k` int64 [R]: the number of best tokens to keep; V: all. `top_p` float32 [R]: of these the smallest set of best
    tokens with at least this share of their probability is kept. `min_p` float32 [R]: least probability, as a share of
    the best token's. Tokens that tie with the last one kept are kept, so the result does not depend on how a sort
    breaks ties.
    """
    return logits.masked_fill(logits < lowest_kept(logits, top_k, top_p, min_p)[:, None], -torch.inf)


def lowest_kept(logits: torch.Tensor, top_k: torch.Tensor, top_p: torch.Tensor, min_p: torch.Tensor) -> torch.Tensor:
    """The lowest logit that each row of `logits` [R, V] keeps within the limits of `truncate`. -> [R]."""
    return _floor(logits, logits.sort(-1, descending=True).values, top_k, top_p, min_p)


def truncated_sample(
    logits: torch.Tensor,
    top_k: torch.Tensor,
    top_p: torch.Tensor,
    min_p: torch.Tensor,
    seeds: torch.Tensor,
    positions: torch.Tensor,
) -> torch.Tensor:
    """gumbel_sample(truncate(...)). On CPU, tokens that cannot be chosen are neither sorted nor drawn. -> int64 [R].

    The path of a row depends on its own settings and logits, never on the batch.
    """
    if logits.is_cuda:
        return gumbel_sample(truncate(logits, top_k, top_p, min_p), seeds, positions)
    token_ids = torch.empty(len(logits), dtype=torch.int64)
    narrow, wide = _CANDIDATES
    for width, chosen in ((narrow, top_k < narrow), (wide, top_k >= narrow)):
        rows = chosen.nonzero()[:, 0]
        if not len(rows):
            continue
        some, limits = logits[rows], (top_k[rows], top_p[rows], min_p[rows])
        best, ids = some.topk(min(width, logits.shape[1]), dim=-1)
        floor = _floor(some, best, *limits)
        noise = _exponential(random_bits(seeds[rows], positions[rows], ids.to(torch.int32))).log_()
        winner = best.masked_fill(best < floor[:, None], -torch.inf).sub_(noise).argmax(-1, keepdim=True)
        token_ids[rows] = ids.gather(1, winner)[:, 0]
        # A floor strictly above the worst candidate proves that no other token belongs to the set
        unsure = (floor <= best[:, -1]) | ((limits[0] > best.shape[1]) & (limits[0] < logits.shape[1]))
        rest = unsure.nonzero()[:, 0]
        if len(rest):
            cut = truncate(some[rest], *(limit[rest] for limit in limits))
            token_ids[rows[rest]] = gumbel_sample(cut, seeds[rows[rest]], positions[rows[rest]])
    return token_ids


def _floor(
    logits: torch.Tensor, best: torch.Tensor, top_k: torch.Tensor, top_p: torch.Tensor, min_p: torch.Tensor
) -> torch.Tensor:
    """The lowest logit [R] to keep, from the W best logits `best` (descending, [R, W]).

    The result is exact if it is above the last of `best`.
    """
    inside = torch.arange(best.shape[1], device=best.device) < top_k[:, None]
    total = best.masked_fill(~inside, -torch.inf).logsumexp(-1)
    if best.shape[1] < logits.shape[1]:
        more = (top_k > best.shape[1]).nonzero()[:, 0]
        total[more] = logits[more].logsumexp(-1)
    share = (best - total[:, None]).exp()
    kept = inside & ((share.cumsum(-1) - share < top_p[:, None]) | (top_p >= 1)[:, None])
    last = kept.sum(-1, keepdim=True).clamp_(min=1) - 1
    return torch.maximum(best.gather(1, last)[:, 0], best[:, 0] + min_p.log())


def argmax(logits: torch.Tensor) -> torch.Tensor:
    """The token with the greatest logit in each row of `logits` [R, V], the first one of equals. -> int64 [R].

    On CPU numpy's version is vectorised: 0.06 ms for 32 x 32000, torch's takes 0.58 ms.
    """
    if logits.is_cuda:
        return logits.argmax(-1)
    return torch.from_numpy(logits.float().numpy().argmax(-1))  # numpy has no bfloat16


def draw(logits: torch.Tensor, draws: Draws) -> torch.Tensor:
    """One token per row of `logits` [R, V], drawn from the softmax of float32(logits) / temperature. -> int64 [R].

    A row of temperature 0 takes its greatest logit. Does not change `logits`. Waits for the device; Triton's version
    does not.
    """
    token_ids = argmax(logits)
    is_free, limits = draws.temperature > 0, draws.limits
    if limits is not None:
        is_free[limits.rows] = False
        rows = limits.rows
        bounds = limits.top_k, limits.top_p, limits.min_p
        token_ids[rows] = truncated_sample(
            scaled(logits, draws, rows), *bounds, draws.seeds[rows], draws.positions[rows]
        )
    rows = is_free.nonzero()[:, 0]
    if len(rows):
        token_ids[rows] = gumbel_sample(scaled(logits, draws, rows), draws.seeds[rows], draws.positions[rows])
    return token_ids


def scaled(logits: torch.Tensor, draws: Draws, rows: torch.Tensor) -> torch.Tensor:
    """A copy of `rows` (int64 [P]) of `logits`, divided by their temperatures. -> float32 [P, V]."""
    return logits[rows].float().div_(draws.temperature[rows, None])


def gumbel_sample(logits: torch.Tensor, seeds: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    """One token per row of `logits` [R, V] float32, drawn from its softmax. -> int64 [R].

    `seeds` int64 [R] (any bits); `positions` int64 [R]: how many tokens of the sequence come before the drawn one.
    Overwrites `logits`.
    """
    num_rows, vocab_size = logits.shape
    piece = num_rows if logits.is_cuda else max(_PIECE // vocab_size, 1)
    tokens = torch.arange(vocab_size, dtype=torch.int32, device=logits.device)
    winners = []
    for start in range(0, num_rows, piece):
        part = slice(start, start + piece)
        noise = _exponential(random_bits(seeds[part], positions[part], tokens)).log_()
        winners.append(logits[part].sub_(noise).argmax(-1))
    return torch.cat(winners)


def random_bits(seeds: torch.Tensor, positions: torch.Tensor, token_ids: torch.Tensor) -> torch.Tensor:
    """32 hash bits for every (row, token), int32 [R, W]; the same bits on every device.

    `token_ids`: int32 [W] for all rows, or [R, W]. A 64-bit key per row (two splitmix64 finalisers over seed and
    position) enters a 32-bit finaliser (lowbias32's constants) over the token id, half before and half within its
    rounds. Integer arithmetic wraps.
    """
    key = _mix_64(_mix_64(seeds) + (positions + 1) * -0x61C8864680B583EB)
    low, high = key.to(torch.int32), (key >> 32).to(torch.int32)  # narrowing keeps the low bits
    bits = token_ids * _signed_32(0x9E3779B1) + low[:, None]
    bits.bitwise_xor_((bits >> 16).bitwise_and_(0xFFFF)).mul_(_signed_32(0x21F0AAAD)).bitwise_xor_(high[:, None])
    bits.bitwise_xor_((bits >> 15).bitwise_and_(0x1FFFF)).mul_(_signed_32(0x735A2D97))
    return bits.bitwise_xor_((bits >> 15).bitwise_and_(0x1FFFF))


def _exponential(bits: torch.Tensor) -> torch.Tensor:
    """Exp(1) variates in float32 from 31 bits each; minus their logarithm is Gumbel noise. Overwrites `bits`.

    Small values, which decide, have full float precision. Never 0 or inf.
    """
    uniform = bits.bitwise_and_(0x7FFFFFFF).float().add_(0.5).mul_(2.0**-31).clamp_(max=1 - 2.0**-24)
    return uniform.neg_().log1p_().neg_()


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
