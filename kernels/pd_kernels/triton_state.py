# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False, disallow-untyped-decorators=False
"""Layers with states in Triton. Launches depend on shapes alone, and nothing waits for the host."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl

from pd_kernels import triton_convolution
from pd_kernels.launch_sizes import cdiv, next_power_of_2
from pd_kernels.torch_state import LENGTH_EPS
from pd_kernels.triton_delta_decode import decay_and_beta, mix_decodes
from pd_kernels.triton_delta_pieces import mix_pieces
from pd_kernels.triton_dependent_launch import early_options, launches_early, others_may_start, wait_for_others
from pd_kernels.triton_quantize import empty_rows, quantize, store_quantized

if TYPE_CHECKING:
    from pd_kernels.quantized import QuantizedRows
    from pd_kernels.state import StateCache, StateGates, StatePlan

_TILE = 1024  # elements of a program


@triton.jit
def _gates_kernel(
    a, b, decay_log, decay_bias, decays, betas, num_all, num_heads, a_stride, b_stride,
    TILE: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    others_may_start(EARLY)
    at = tl.program_id(0) * TILE + tl.arange(0, TILE)
    row, head, inside = (at // num_heads).to(tl.int64), at % num_heads, at < num_all
    log = tl.load(decay_log + head, mask=inside, other=0.0)
    bias = tl.load(decay_bias + head, mask=inside, other=0.0)
    wait_for_others(EARLY)
    x = tl.load(a + row * a_stride + head, mask=inside, other=0.0)
    part = tl.load(b + row * b_stride + head, mask=inside, other=0.0)
    decay, beta = decay_and_beta(x, part, log, bias)
    tl.store(decays + at, decay, mask=inside)
    tl.store(betas + at, beta, mask=inside)


@triton.jit
def _norm_kernel(
    x, gate, weight, out, scales, num_rows, num_heads, x_stride, gate_stride, row_stride, group_stride, eps,
    SIZE: tl.constexpr, COLUMNS: tl.constexpr, ROWS: tl.constexpr, HEADS: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """HEADS is not 0: results are quantized, a head's apart; `scales` has these strides."""
    others_may_start(EARLY)
    row, column = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS), tl.arange(0, COLUMNS)
    inside = (row < num_rows)[:, None] & (column < SIZE)[None, :]
    gain = tl.load(weight + column, mask=column < SIZE, other=0.0).to(tl.float32)
    token, at = row // num_heads, (row % num_heads * SIZE)[:, None] + column[None, :]
    wait_for_others(EARLY)
    value = tl.load(x + token[:, None] * x_stride + at, mask=inside, other=0.0).to(tl.float32)
    passed = tl.load(gate + token[:, None] * gate_stride + at, mask=inside, other=0.0).to(tl.float32)
    normed = value * tl.rsqrt(tl.sum(value * value, 1) / SIZE + eps)[:, None] * gain[None, :]
    result = normed * passed / (1.0 + tl.exp(-passed))
    if HEADS > 0:
        result = result.to(x.dtype.element_ty).to(tl.float32)
        store_quantized(
            result, out, scales, 0, 0, row, num_rows // HEADS, HEADS * SIZE, row_stride, group_stride, COLUMNS, HEADS
        )  # fmt: skip
    else:
        tl.store(out + row[:, None] * SIZE + column[None, :], result.to(out.dtype.element_ty), mask=inside)


class TritonState:
    """A StateOps. Heads' sizes are powers of two of at least 16; keys' up to 128."""

    def problem(self, key_dim: int, value_dim: int) -> str:
        """See StateOps."""
        fits = all(size == next_power_of_2(size) and size >= 16 for size in (key_dim, value_dim)) and key_dim <= 128
        return "" if fits else f"heads of {key_dim} and {value_dim}: not powers of two from 16 on, or keys above 128"

    def convolve(
        self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, cache: StateCache, plan: StatePlan
    ) -> torch.Tensor:
        """See StateOps."""
        return triton_convolution.convolve(x, weight, bias, cache, plan)

    def gates(
        self, a: torch.Tensor, b: torch.Tensor, A_log: torch.Tensor, dt_bias: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """See StateOps."""
        decays, betas = (torch.empty(a.shape, dtype=torch.float32, device=a.device) for _ in range(2))
        if count := a.numel():
            early = launches_early(a.device)
            _gates_kernel[(cdiv(count, _TILE),)](
                a, b, A_log, dt_bias, decays, betas, count, a.shape[1], a.stride(0), b.stride(0), _TILE, early,
                **early_options(early),
            )  # fmt: skip
        return decays, betas

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
        """See StateOps. In a step of decodes alone, the programs that mix compute the gates: a launch less a layer."""
        if not plan.is_decode:
            return self.mix(q, k, v, *self.gates(*gates), recurrent, plan, scale)
        if why := self.problem(*recurrent.shape[2:]):
            raise ValueError(why)
        out = torch.empty(v.shape, dtype=v.dtype, device=v.device)
        if len(v):
            mix_decodes(q, k, v, gates, recurrent, plan, scale, LENGTH_EPS, out)
        return out

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
        """See StateOps. In a step with prompts, sequences of one token take the same kernel as in one without."""
        if why := self.problem(*recurrent.shape[2:]):
            raise ValueError(why)
        out = torch.empty(v.shape, dtype=v.dtype, device=v.device)
        if len(v):
            g, beta = g.contiguous(), beta.contiguous()
            mix_decodes(q, k, v, (g, beta), recurrent, plan, scale, LENGTH_EPS, out)
            if not plan.is_decode:
                mix_pieces(q, k, v, g, beta, recurrent, plan, scale, LENGTH_EPS, out)
        return out

    def gated_norm(self, x: torch.Tensor, gate: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        """See StateOps."""
        out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
        _gated_norm(x, gate, weight, eps, out, None)
        return out


def gated_norm_quantized(
    x: torch.Tensor, gate: torch.Tensor, weight: torch.Tensor, eps: float, group: int
) -> QuantizedRows:
    """`gated_norm`, then `quantize` of each token's row [H * D]; in one launch if a head's numbers share a scale."""
    num_tokens, num_heads, size = x.shape
    if group != size:
        return quantize(TritonState().gated_norm(x, gate, weight, eps).flatten(1), group)
    rows = empty_rows(num_tokens, num_heads * size, group, x.device)
    _gated_norm(x, gate, weight, eps, rows.values, rows.scales)
    return rows


def _gated_norm(
    x: torch.Tensor,
    gate: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    out: torch.Tensor,
    scales: torch.Tensor | None,
) -> None:
    """Fill `out`; with `scales` [T, H], these too."""
    num_rows, num_heads, size = x.shape[0] * x.shape[1], x.shape[1], x.shape[2]
    if not num_rows:
        return
    early, columns = launches_early(x.device), next_power_of_2(size)
    rows = max(1, _TILE // columns)
    strides = (0, 0) if scales is None else scales.stride()
    _norm_kernel[(cdiv(num_rows, rows),)](
        x, gate, weight, out, out if scales is None else scales, num_rows, num_heads, x.stride(0), gate.stride(0),
        *strides, eps, size, columns, rows, 0 if scales is None else num_heads, early, **early_options(early),
    )  # fmt: skip
