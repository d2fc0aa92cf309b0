"""The table of kernels but attention's: one row of functions per implementation, and torch's row.

A new backend adds a row: a `Kernels` with its own functions, and the others from `TORCH` by `replace`. `selection.py`
maps devices to rows.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from pd_kernels import sampling, torch_experts, torch_ops

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    import torch

    from pd_kernels.gemm_selection import Product
    from pd_kernels.values import Draws, HalfNormed, HeadNorms


class NormRopeWrite(Protocol):
    """The work between the QKV product and attention; see `reference.norm_rope_write`."""

    def __call__(
        self,
        heads: torch.Tensor,
        norms: HeadNorms | None,
        cos: torch.Tensor,
        sin: torch.Tensor,
        key_cache: torch.Tensor,
        value_cache: torch.Tensor,
        slot_mapping: torch.Tensor,
    ) -> torch.Tensor: ...


class FewRows(Protocol):
    """The product with one weight for steps of few tokens, fused with the work before and after it."""

    @property
    def max_rows(self) -> int: ...

    def __call__(self, x: torch.Tensor | HalfNormed) -> torch.Tensor:
        """`x` [T, in] -> x W^T + b [T, out]; if the weight is gated, silu_and_mul of that [T, out / 2]."""

    def add_to(self, residual: torch.Tensor, x: torch.Tensor, norm: torch.Tensor, eps: float) -> HalfNormed:
        """`residual` [T, out] += x W^T + b; returns the norm of the sum, with the weight `norm` [out]."""


class MakeFewRows(Protocol):
    """Makes the product for a weight [out, in] and its bias. `gated`: it is [gate | up]. None: not supported."""

    def __call__(self, weight: torch.Tensor, bias: torch.Tensor | None, gated: bool) -> FewRows | None: ...


class ProposeGated(Protocol):
    """Products that compute silu_and_mul of x weight^T at once, for `num_rows` rows and more. `weight` [N, K]: gates,
    then ups. The caller measures whether they are faster."""

    def __call__(self, num_rows: int, weight: torch.Tensor) -> Sequence[Product]: ...


class Route(Protocol):
    """The choice of experts; see `reference.route`."""

    def __call__(
        self, x: torch.Tensor, router: torch.Tensor, num_chosen: int, normalized: bool
    ) -> tuple[torch.Tensor, torch.Tensor]: ...


class MixExperts(Protocol):
    """The work of the chosen experts; see `reference.experts`."""

    def __call__(
        self, x: torch.Tensor, scores: torch.Tensor, chosen: torch.Tensor, gate_up: torch.Tensor, down: torch.Tensor
    ) -> torch.Tensor: ...


@dataclass(frozen=True, slots=True)
class Kernels:
    """An implementation of every function but attention; `reference` and `sampling` define them."""

    name: str
    rms_norm: Callable[[torch.Tensor, torch.Tensor, float], torch.Tensor]
    add_rms_norm: Callable[[torch.Tensor, torch.Tensor, torch.Tensor, float], tuple[torch.Tensor, torch.Tensor]]
    silu_and_mul: Callable[[torch.Tensor], torch.Tensor]
    few_rows: MakeFewRows
    gated_products: ProposeGated
    norm_rope_write: NormRopeWrite
    route: Route
    experts: MixExperts
    captures_experts: bool  # whether steps with `experts` can be captured in CUDA graphs
    copy_blocks: Callable[[torch.Tensor, torch.Tensor, torch.Tensor], None]
    argmax: Callable[[torch.Tensor], torch.Tensor]
    draw: Callable[[torch.Tensor, Draws], torch.Tensor]


def no_few_rows(weight: torch.Tensor, bias: torch.Tensor | None, gated: bool) -> None:
    """No special product for steps of few tokens."""


def no_gated_products(num_rows: int, weight: torch.Tensor) -> tuple[()]:
    """No product that also activates."""
    return ()


TORCH = Kernels(
    name="torch",
    rms_norm=torch_ops.rms_norm,
    add_rms_norm=torch_ops.add_rms_norm,
    silu_and_mul=torch_ops.silu_and_mul,
    few_rows=no_few_rows,
    gated_products=no_gated_products,
    norm_rope_write=torch_ops.norm_rope_write,
    route=torch_experts.route,
    experts=torch_experts.experts,
    captures_experts=False,
    copy_blocks=torch_ops.copy_blocks,
    argmax=sampling.argmax,
    draw=sampling.draw,
)
