# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False, disallow-untyped-decorators=False
"""The gated delta rule of sequences with one token. A state is read once and written once."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import triton
import triton.language as tl

from pd_kernels.triton_dependent_launch import early_options, launches_early, others_may_start, wait_for_others

if TYPE_CHECKING:
    import torch

    from pd_kernels.state import StateGates, StatePlan


class DecodeTile(NamedTuple):
    """What a program has: of one head of one sequence."""

    values: int
    num_warps: int


DECODE_TILE = DecodeTile(64, 4)


@triton.jit
def decay_and_beta(a, b, decay_log, decay_bias):
    """See StateOps.gates."""
    x = a.to(tl.float32) + decay_bias.to(tl.float32)
    small = tl.exp(-tl.abs(x))
    series = small * (1.0 - small * (0.5 - small / 3.0))  # of log(1 + small), where that loses the bits of `small`
    soft = tl.maximum(x, 0.0) + tl.where(small < 0.015625, series, tl.log(1.0 + small))
    return -tl.exp(decay_log.to(tl.float32)) * soft, 1.0 / (1.0 + tl.exp(-b.to(tl.float32)))


@triton.jit
def _decode_kernel(
    q, k, v, g, beta, decay_log, decay_bias, recurrent, sources, slots, starts, piece_starts, saves, out, num_heads,
    ratio, scale, eps, q_stride, k_stride, v_stride, g_stride, beta_stride, slot_stride, head_stride,
    KEYS: tl.constexpr, VALUES: tl.constexpr, PART: tl.constexpr, GATES: tl.constexpr, MIXED: tl.constexpr,
    SAVES: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """GATES: `g` and `beta` are what gates are computed of. MIXED: sequences without one token each are left out."""
    others_may_start(EARLY)
    head, sequence = tl.program_id(0) // (VALUES // PART), tl.program_id(1)
    key = tl.arange(0, KEYS)
    value = tl.program_id(0) % (VALUES // PART) * PART + tl.arange(0, PART)
    row, piece = sequence.to(tl.int64), sequence
    if MIXED:
        row, piece = tl.load(starts + sequence).to(tl.int64), tl.load(piece_starts + sequence)
        if tl.load(starts + sequence + 1) != row + 1:
            return
    source, slot = tl.load(sources + sequence).to(tl.int64), tl.load(slots + sequence).to(tl.int64)
    place = recurrent + head * head_stride.to(tl.int64) + key[:, None] * VALUES + value[None, :]
    state = tl.zeros([KEYS, PART], tl.float32)
    if source >= 0:  # the step before wrote it, many launches ago
        state = tl.load(place + source * slot_stride)
    log, bias = 0.0, 0.0
    if GATES:
        log, bias = tl.load(decay_log + head), tl.load(decay_bias + head)
    wait_for_others(EARLY)
    query = tl.load(q + row * q_stride + head // ratio * KEYS + key).to(tl.float32)
    keys = tl.load(k + row * k_stride + head // ratio * KEYS + key).to(tl.float32)
    new = tl.load(v + row * v_stride + head * VALUES + value).to(tl.float32)
    decay, part = tl.load(g + row * g_stride + head), tl.load(beta + row * beta_stride + head)
    if GATES:
        decay, part = decay_and_beta(decay, part, log, bias)
    decay = tl.exp(decay)
    query = query * (tl.rsqrt(tl.sum(query * query, 0) + eps) * scale)
    keys = keys * tl.rsqrt(tl.sum(keys * keys, 0) + eps)
    state = state * decay
    change = (new - tl.sum(keys[:, None] * state, 0)) * part
    result = tl.sum(query[:, None] * state, 0) + tl.sum(query * keys, 0) * change
    state += keys[:, None] * change[None, :]
    tl.store(place + slot * slot_stride, state)
    tl.store(out + (row * num_heads + head) * VALUES + value, result.to(out.dtype.element_ty))
    if SAVES:
        saved = tl.load(saves + piece).to(tl.int64)
        if saved >= 0:
            tl.store(place + saved * slot_stride, state)


def mix_decodes(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    gates: StateGates | tuple[torch.Tensor, torch.Tensor],
    recurrent: torch.Tensor,
    plan: StatePlan,
    scale: float,
    eps: float,
    out: torch.Tensor,
    tile: DecodeTile = DECODE_TILE,
) -> None:
    """Fill the rows of `out`, contiguous, of the sequences that have one token. `gates`: or decays and betas."""
    num_heads, num_keys, num_values = recurrent.shape[1:]
    g, beta, *others = gates if len(gates) == 4 else (*gates, *gates)
    part, early, saves = min(tile.values, num_values), launches_early(v.device) and plan.is_decode, plan.saves
    _decode_kernel[(num_heads * num_values // part, len(plan.slots))](
        q, k, v, g, beta, *others, recurrent, plan.sources, plan.slots, plan.starts, plan.piece_starts,
        plan.sources if saves is None else saves, out, num_heads, v.shape[1] // k.shape[1], scale, eps,
        q.stride(0), k.stride(0), v.stride(0), g.stride(0), beta.stride(0), recurrent.stride(0), recurrent.stride(1),
        num_keys, num_values, part, len(gates) == 4, not plan.is_decode, saves is not None, early,
        num_warps=tile.num_warps, **early_options(early),
    )  # fmt: skip
