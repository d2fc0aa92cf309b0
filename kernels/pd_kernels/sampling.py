"""Choose tokens from logits: penalties, and a draw that depends on its own row only.

R rows, V tokens; all arithmetic is in float32. The draw is Gumbel-max: argmax(logits + noise) samples from
softmax(logits), and the noise is an integer hash of (seed, position, token id). So a row's token does not depend on the
rest of the batch, and prefill node, decode node and a rerun draw the same bits.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from pd_kernels.sampling_limits import allowed, floors, floors_of_best, limited_rows, ranked

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


def penalize(
    logits: torch.Tensor, seen: torch.Tensor, counts: torch.Tensor, settings: torch.Tensor, rows: torch.Tensor
) -> None:
    """Apply the repetition, presence and frequency penalties to `logits` [R, V] in place, in this order.

    `seen` bool [N, V] and `counts` int32 [N, V] as above, for N sequences; `rows` int64 [R]: the sequence of each row
    of logits; `settings` float32 [R, 3]: the three penalties, (1, 0, 0) for none. Waits for the device;
    Triton's version does not.
    """
    repeated, counted = settings[:, 0] != 1, (settings[:, 1:] != 0).any(-1)
    chosen = (repeated | counted).nonzero()[:, 0]  # on a CPU 32 rows of 32,000 take 21 ms, one of them 0.3 ms
    settings, rows, is_part = settings[chosen], rows[chosen], len(chosen) < len(logits)
    part = logits[chosen] if is_part else logits
    if repeated.any():
        penalize_repetition(part, seen[rows], settings[:, 0])
    if counted.any():
        penalize_counts(part, counts[rows], settings[:, 1], settings[:, 2])
    if is_part:
        logits[chosen] = part


def argmax(logits: torch.Tensor) -> torch.Tensor:
    """The token with the greatest logit in each row of `logits` [R, V], the first one of equals. -> int64 [R].

    On CPU numpy's version is vectorised: 0.06 ms for 32 x 32000, torch's takes 0.58 ms.
    """
    if logits.is_cuda:
        return logits.argmax(-1)
    return torch.from_numpy(logits.float().numpy().argmax(-1))  # numpy has no bfloat16


def draw(logits: torch.Tensor, draws: Draws) -> torch.Tensor:
    """One token per row of `logits` [R, V], drawn from the softmax of float32(logits) / temperature. -> int64 [R].

    The draw is within the row's mask and limits, see `sampling_limits`. A row of temperature 0 takes its greatest
    logit. Does not change `logits`. Waits for the device; Triton's version does not.
    """
    logits = allowed(logits, draws.masks)
    token_ids = argmax(logits)
    is_free = draws.temperature > 0
    if draws.limits is not None:
        rows = limited_rows(draws.limits, draws.temperature, logits.shape[1])
        is_free[rows] = False
        token_ids[rows] = _limited_draw(ranked(logits[rows]), draws.of(rows))
    rows = is_free.nonzero()[:, 0]
    if len(rows):
        token_ids[rows] = _free_draw(logits[rows].float(), draws.of(rows))
    return token_ids


def best(logits: torch.Tensor, draws: Draws | None, first_id: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The best token of each row of a slice of the vocabulary: scores float32 [R], token ids int64 [R].

    `logits` [R, V']: of the tokens from `first_id` on. Without `draws` a score is the greatest logit, with them that of
    the noised logits. Of the slices of a row, the one with the greatest score (of equals, the one with the lowest id)
    has the token that `argmax` or `draw` takes from the whole row. A score is never NaN. Raises ValueError for limits
    and masks, which need the whole row.
    """
    check_slice(draws)
    columns = argmax(logits)
    scores = logits.gather(1, columns[:, None])[:, 0].float()
    rows = torch.empty(0, dtype=torch.int64) if draws is None else (draws.temperature > 0).nonzero()[:, 0]
    if draws is not None and len(rows):
        part = draws.of(rows)
        scaled = logits[rows].float().div_(part.temperature[:, None])
        columns[rows] = gumbel_sample(scaled, part.seeds, part.positions, first_id)
        scores[rows] = scaled.gather(1, columns[rows][:, None])[:, 0]
    return scores.nan_to_num_(nan=-torch.inf, posinf=torch.inf, neginf=-torch.inf), columns + first_id


def check_slice(draws: Draws | None) -> None:
    """Raises ValueError for limits and masks."""
    if draws is not None and (draws.limits is not None or draws.masks is not None):
        raise ValueError("a draw with limits or masks needs the whole row of logits")


def _free_draw(logits: torch.Tensor, draws: Draws) -> torch.Tensor:
    return gumbel_sample(logits.div_(draws.temperature[:, None]), draws.seeds, draws.positions)


def _limited_draw(logits: torch.Tensor, draws: Draws) -> torch.Tensor:
    """One token of each of P rows within its limits. `logits` [P, V]: as `ranked` gives them. -> int64 [P].

    Tokens that cannot be chosen are neither sorted nor drawn. The path of a row depends on its own limits and logits,
    never on the batch.
    """
    token_ids = torch.empty(len(logits), dtype=torch.int64, device=logits.device)
    if draws.limits is None:
        raise ValueError("the rows have no limits")
    narrow, wide = _CANDIDATES
    for width, chosen in ((narrow, draws.limits.top_k < narrow), (wide, draws.limits.top_k >= narrow)):
        rows = chosen.nonzero()[:, 0]
        if not len(rows):
            continue
        some, part = logits if len(rows) == len(logits) else logits[rows], draws.of(rows)
        best, ids = some.topk(min(width, logits.shape[1]), dim=-1)
        floor = floors_of_best(best, some, part)
        noise = _exponential(random_bits(part.seeds, part.positions, ids.to(torch.int32))).log_()
        scores = best.div(part.temperature[:, None]).sub_(noise).masked_fill_(best < floor[:, None], -torch.inf)
        token_ids[rows] = ids.gather(1, scores.argmax(-1, keepdim=True))[:, 0]
        # A floor strictly above the worst candidate proves that no other token belongs to the set, unless top p takes
        # its share of the best k and these are more than the candidates
        top_k, top_p = draws.limits.top_k[rows], draws.limits.top_p[rows]
        is_unsure = (top_k > best.shape[1]) & (top_k < logits.shape[1]) & (top_p < 1)
        rest = (is_unsure | (floor <= best[:, -1])).nonzero()[:, 0]
        if len(rest):
            wider, part = some[rest], part.of(rest)
            kept = wider.masked_fill(wider < floors(wider, part)[:, None], -torch.inf)
            token_ids[rows[rest]] = _free_draw(kept, part)
    return token_ids


def gumbel_sample(
    logits: torch.Tensor, seeds: torch.Tensor, positions: torch.Tensor, first_id: int = 0
) -> torch.Tensor:
    """One column per row of `logits` [R, V] float32, drawn from its softmax. -> int64 [R].

    `seeds` int64 [R] (any bits); `positions` int64 [R]: how many tokens of the sequence come before the drawn one;
    `first_id`: the token of the first column. Overwrites `logits` with the noised ones.
    """
    num_rows, vocab_size = logits.shape
    piece = num_rows if logits.is_cuda else max(_PIECE // vocab_size, 1)
    tokens = torch.arange(first_id, first_id + vocab_size, dtype=torch.int32, device=logits.device)
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
