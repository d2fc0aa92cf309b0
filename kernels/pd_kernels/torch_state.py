"""Layers with states in library calls: the definition of each result, one token after the other, in any dtype.

Products and sums are in float32, or in float64 where the tensors are. No bit of a result depends on where a prompt is
cut. A step reads its plan on the host.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch
import torch.nn.functional as F

from pd_kernels.state import PIECE
from pd_kernels.torch_quantized import quantize

if TYPE_CHECKING:
    from collections.abc import Iterator

    from pd_kernels.quantized import QuantizedRows
    from pd_kernels.state import StateCache, StateGates, StatePlan

LENGTH_EPS = 1e-6  # added to the square of a query's or key's length, as Qwen3-Next does


class _Sequence(NamedTuple):
    source: int
    slot: int
    tokens: slice  # of the step
    ends: list[tuple[int, int]]
    """The tokens after which the state is needed, counted from the first of the step, and the slot that it goes to."""


class TorchState:
    """A StateOps."""

    def problem(self, key_dim: int, value_dim: int) -> str:
        """See StateOps: any sizes."""
        return ""

    def convolve(
        self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, cache: StateCache, plan: StatePlan
    ) -> torch.Tensor:
        """See StateOps."""
        out, taps, dtype = torch.zeros_like(x), weight.shape[1], torch.promote_types(x.dtype, torch.float32)
        conv, places = cache.conv, _places_of_channels(cache)
        sorted_places = places.argsort()
        for one in _sequences(plan):
            rows = x[one.tokens]
            old = conv[one.source].flatten(0, 1)[places] if one.source >= 0 else x.new_zeros(len(places), taps - 1)
            seen = torch.cat((old.to(x.dtype), rows.T), 1)  # [C, width - 1 + tokens]
            parts = [seen[:, tap : tap + len(rows)].to(dtype) * weight[:, tap, None].to(dtype) for tap in range(taps)]
            total = sum(parts[1:], parts[0])
            if bias is not None:
                total = total + bias[:, None].to(dtype)
            out[one.tokens] = F.silu(total).T.to(x.dtype)
            for end, slot in one.ends:
                conv[slot] = seen[sorted_places, end : end + taps - 1].view(conv.shape[1:])
        return out

    def gates(
        self, a: torch.Tensor, b: torch.Tensor, A_log: torch.Tensor, dt_bias: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """See StateOps."""
        return -A_log.float().exp() * F.softplus(a.float() + dt_bias.float()), b.float().sigmoid()

    def mix_gated(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        gates: StateGates,
        recurrent: torch.Tensor,
        plan: StatePlan,
        scale: float,
    ) -> torch.Tensor:
        """See StateOps."""
        return self.mix(q, k, v, *self.gates(*gates), recurrent, plan, scale)

    def mix(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        g: torch.Tensor,
        beta: torch.Tensor,
        recurrent: torch.Tensor,
        plan: StatePlan,
        scale: float,
    ) -> torch.Tensor:
        """See StateOps."""
        dtype, ratio, out = recurrent.dtype, v.shape[1] // k.shape[1], torch.zeros_like(v)
        q, k = (_normed(part.to(dtype)).repeat_interleave(ratio, 1)[:, :, None] for part in (q, k))  # [T, H, 1, K]
        values, decay, beta = v.to(dtype)[:, :, None], g.to(dtype).exp()[..., None, None], beta.to(dtype)
        for one in _sequences(plan):
            state = recurrent[one.source].clone() if one.source >= 0 else torch.zeros_like(recurrent[0])
            begin = one.tokens.start
            for end, slot in one.ends:
                for i in range(begin, one.tokens.start + end):
                    state *= decay[i]
                    state += k[i].mT @ ((values[i] - k[i] @ state) * beta[i][:, None, None])
                    out[i] = (scale * (q[i] @ state))[:, 0].to(v.dtype)
                begin = one.tokens.start + end
                recurrent[slot] = state
        return out

    def gated_norm(self, x: torch.Tensor, gate: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        """See StateOps."""
        dtype = torch.promote_types(x.dtype, torch.float32)
        value = x.to(dtype)
        normed = value * torch.rsqrt(value.square().mean(-1, keepdim=True) + eps)
        return (normed * weight.to(dtype) * F.silu(gate.to(dtype))).to(x.dtype)


def gated_norm_quantized(
    x: torch.Tensor, gate: torch.Tensor, weight: torch.Tensor, eps: float, group: int
) -> QuantizedRows:
    """`gated_norm`, then `quantize` of each token's row [H * D]."""
    return quantize(TorchState().gated_norm(x, gate, weight, eps).flatten(1), group)


def _places_of_channels(cache: StateCache) -> torch.Tensor:
    """int64 [C]: the place of each channel of `x` in `cache.conv` [key heads * channels of one]; see StateCache."""
    num_heads, size = cache.conv.shape[1:3]
    keys = cache.recurrent.shape[2]
    at = torch.arange(num_heads * size, device=cache.conv.device).view(num_heads, size)
    return torch.cat([part.flatten() for part in torch.split(at, [keys, keys, size - 2 * keys], 1)])


def _normed(x: torch.Tensor) -> torch.Tensor:
    return x * torch.rsqrt(x.square().sum(-1, keepdim=True) + LENGTH_EPS)


def _sequences(plan: StatePlan) -> Iterator[_Sequence]:
    """Those that have tokens."""
    starts, piece_starts = plan.starts.tolist(), plan.piece_starts.tolist()
    saves = None if plan.saves is None else plan.saves.tolist()
    each = zip(plan.sources.tolist(), plan.slots.tolist(), plan.positions.tolist(), strict=True)
    for at, (source, slot, position) in enumerate(each):
        count = starts[at + 1] - starts[at]
        if not count:
            continue
        ends = []
        if saves is not None:
            first = position // PIECE
            for piece, saved in enumerate(saves[piece_starts[at] : piece_starts[at + 1]], first):
                if saved >= 0:
                    ends.append(((piece + 1) * PIECE - position, saved))
        yield _Sequence(source, slot, slice(starts[at], starts[at + 1]), [*ends, (count, slot)])
