"""The parts that decoders are built from: plain objects over tensors.

No `nn.Module`: nothing is trained or hooked, and a step's Python overhead is what a small model's decode is made of.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from pd_cluster.models.spec import RopeSpec
    from pd_kernels.gemm_selection import From, Product


class Linear:
    """y = x W^T + b, W merged from one or more checkpoint tensors along its rows; then `activate`, if there is one."""

    def __init__(
        self,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        activate: Callable[[torch.Tensor], torch.Tensor] | None = None,
    ) -> None:
        self.weight = weight  # [out, in]
        self.bias = bias  # [out]
        self.activate = activate
        self._forward: Callable[[torch.Tensor], torch.Tensor] = self._plain

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return self._forward(x)

    def _plain(self, x: torch.Tensor) -> torch.Tensor:
        product = F.linear(x, self.weight, self.bias)
        return product if self.activate is None else self.activate(product)

    def use(self, products: Mapping[int, Product], others: From | None = None) -> None:
        """Multiply so many rows in these ways, which activate as well; other numbers of rows like `others`, and those
        below it as before. Not for one with a bias."""
        assert self.bias is None
        weight, plain = self.weight, self._forward

        def forward(x: torch.Tensor) -> torch.Tensor:
            num_rows = x.shape[0]
            product = products.get(num_rows)
            if product is None and others is not None and num_rows >= others.least:
                product = others.product
            return plain(x) if product is None else product(x, weight)

        self._forward = forward

    def pack(self, keep_weight: bool = False) -> None:
        """On CPU, hand the weight to oneDNN in its own blocked layout, once.

        Its product of 32 rows by [32000, 256] in fp32 takes 2.9 ms on one Zen 5 core where F.linear (MKL) takes 7.6.
        Without `keep_weight` (tied embeddings) the plain copy is dropped.
        """
        if self.weight.device.type != "cpu" or not _packs(self.weight.dtype):
            return
        packed = torch.ops.mkldnn._reorder_linear_weight(self.weight)
        bias, activate, multiply = self.bias, self.activate, torch.ops.mkldnn._linear_pointwise

        def forward(x: torch.Tensor) -> torch.Tensor:
            product: torch.Tensor = multiply(x, packed, bias, "none", [], "")
            return product if activate is None else activate(product)

        self._forward = forward
        if not keep_weight:
            self.weight = self.weight.new_empty(0)


def _packs(dtype: torch.dtype) -> bool:
    """Whether this CPU's oneDNN takes prepacked weights of `dtype`."""
    operators = ("_reorder_linear_weight", "_linear_pointwise")  # torch's own compiler uses them; no public name yet
    if not torch.backends.mkldnn.is_available() or not all(  # type: ignore[no-untyped-call]
        hasattr(torch.ops.mkldnn, name) for name in operators
    ):
        return False
    half = {
        torch.bfloat16: torch.ops.mkldnn._is_mkldnn_bf16_supported,
        torch.float16: torch.ops.mkldnn._is_mkldnn_fp16_supported,
    }
    return dtype is torch.float32 or (dtype in half and bool(half[dtype]()))


@dataclass(slots=True)
class RopeTable:
    """cos and sin of every position's angles, each [max_len, head_dim / 2]."""

    cos: torch.Tensor
    sin: torch.Tensor

    def at(self, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Angles of `positions` (int64 [T]): two tensors [T, head_dim / 2]."""
        return self.cos.index_select(0, positions), self.sin.index_select(0, positions)


def make_rope_table(spec: RopeSpec, head_dim: int, max_len: int, dtype: torch.dtype, device: torch.device) -> RopeTable:
    """Computed on the CPU in float32 and then moved, so that every device has the same numbers."""
    angles = torch.outer(torch.arange(max_len, dtype=torch.float32), rope_frequencies(spec, head_dim))
    return RopeTable(angles.cos().to(device, dtype), angles.sin().to(device, dtype))


def rope_frequencies(spec: RopeSpec, head_dim: int) -> torch.Tensor:
    """Angle per position of each pair of dimensions, float32 [head_dim / 2].

    `linear` divides them all by `factor`; `llama3` (Llama 3.1 model card) only those whose wavelength exceeds the
    original context over `low_freq_factor`, blending linearly up to `high_freq_factor`.
    """
    plain = 1.0 / spec.theta ** (torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim)
    if spec.kind == "default":
        return plain
    if spec.kind == "linear":
        return plain / spec.factor
    periods = spec.original_max_len * plain / (2 * math.pi)  # periods within the original context
    blend = ((periods - spec.low_freq_factor) / (spec.high_freq_factor - spec.low_freq_factor)).clamp(0, 1)
    return (1 - blend) * plain / spec.factor + blend * plain
