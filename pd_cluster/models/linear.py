"""Products with a weight.

The package uses no `nn.Module`: nothing is trained or hooked, and the Python overhead of a step is most of a small
model's decode time.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypeAlias

import torch
import torch.nn.functional as F

from pd_kernels.quantized import QuantizedRows, RowsTwice
from pd_kernels.values import HalfNormed

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from pd_cluster.models.linear_adapters import LinearAdapters
    from pd_cluster.models.reduce import Reduce
    from pd_kernels.backends import FewRows, Kernels
    from pd_kernels.gemm_selection import From, Product
    from pd_kernels.quantized import Weight

Rows: TypeAlias = torch.Tensor | QuantizedRows  # [T, size]
Normed: TypeAlias = Rows | HalfNormed | RowsTwice  # rows after a norm, or before the norm's division


class Linear:
    """`activate(x W^T + b)`, with W merged from one or more tensors of the checkpoint along its rows.

    A model multiplies in two ways: it calls the Linear, or it calls `add_norm`. The Linear decides which algorithm
    computes the product: by the number of rows (`use_few_rows`, `use`), or by the device (`pack`).
    """

    def __init__(
        self,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        kernels: Kernels,
        activate: Callable[[torch.Tensor], torch.Tensor] | None = None,
        *,
        adds: bool = False,
        reduce: Reduce | None = None,
    ) -> None:
        """`adds`: the product is only used by `add_norm` without a norm before the addition.

        `reduce`: the weight has the inputs of one rank, so a call returns a partial sum, which `add_norm` reduces.
        """
        self.weight = weight  # [out, in]
        self.bias = bias  # [out]
        self.activate = activate
        self.adds = adds and reduce is None  # a partial sum is reduced first, so it may not come in parts
        self.row_order: torch.Tensor | None = None  # see `reorder`; None: that of the checkpoint
        self.max_few_rows = 0  # rows up to which `add_norm` is one kernel
        self.adapters: LinearAdapters | None = None  # None: it takes none
        self._kernels = kernels
        self._reduce = reduce
        self._few_rows: FewRows | None = None
        self._few_unactivated: FewRows | None = None  # for rows with adapters
        self._next_group = 0  # the group of the Linear that this one feeds
        self._is_read_plain = False  # what this one feeds is read plain, too
        self._packed: Callable[[Any], torch.Tensor] | None = None  # the product, see `pack`
        self._chosen: list[tuple[Mapping[int, Product], From | None]] = []  # see `use`

    def __call__(self, x: Normed) -> torch.Tensor:
        """`x` [T, in] -> activate(x W^T + b), [T, out] without an activation.

        `x` may be the HalfNormed or the RowsTwice that `add_norm` of another Linear returned.
        """
        if self._is_adapted:
            return self._adapted(x)
        if isinstance(x, RowsTwice):
            x = self._one_of(x)
        rows = x.x if isinstance(x, HalfNormed) else x
        if isinstance(rows, torch.Tensor) and rows.shape[0] <= self.max_few_rows:
            assert self._few_rows is not None
            return self._few_rows(x)  # type: ignore[arg-type]
        return self._multiply(x.normed() if isinstance(x, HalfNormed) else x)

    @property
    def _is_adapted(self) -> bool:
        """Whether rows of this step have adapters here."""
        return self.adapters is not None and self.adapters.slots.rows is not None

    def _adapted(self, x: Normed, target: torch.Tensor | None = None) -> torch.Tensor:
        """The result of a call with what adapters add, which comes before the activation; see LinearAdapters.run."""
        assert self.adapters is not None
        found = self.adapters.run(x, lambda: self._unactivated(x), target, is_gated=self._is_swiglu)
        return found if self.activate is None or self._is_swiglu else self.activate(found)

    def _unactivated(self, x: Normed) -> torch.Tensor:
        """What the weight gives before the activation."""
        one = self._one_of(x) if isinstance(x, RowsTwice) else x
        rows = one.x if isinstance(one, HalfNormed) else one
        if self._few_unactivated is not None and isinstance(rows, torch.Tensor) and len(rows) <= self.max_few_rows:
            return self._few_unactivated(one)  # type: ignore[arg-type]
        one = one.normed() if isinstance(one, HalfNormed) else one
        return self._multiply(one) if self.activate is None else self._product(one)

    @property
    def group(self) -> int:
        """Inputs of a row that share a scale when rows are quantized for this product; 0: they are not."""
        return 0

    def feed(self, following: Linear, *, also_plain: bool = False) -> None:
        """From now on quantize what `activated` and `add_norm` return, if `following` multiplies quantized rows.

        Nothing else may use these results. `also_plain`: then `add_norm` returns RowsTwice for others beside it.
        """
        self._next_group, self._is_read_plain = following.group, also_plain and following.group > 0

    def feed_experts(self, group: int) -> None:
        """From now on `add_norm` returns RowsTwice, quantized in groups of `group`."""
        self._next_group, self._is_read_plain = group, True

    def activated(self, x: Normed) -> Rows:
        """The result of a call, for the Linear that this one feeds."""
        return self(x)

    def add_norm(
        self, residual: torch.Tensor, x: Rows, norm: torch.Tensor, eps: float, before: torch.Tensor | None = None
    ) -> Normed:
        """Add the product with `x` [T, in] to `residual` [T, out], in place. -> the sum's RMSNorm with weight `norm`.

        `before`: weight of an RMSNorm of the product, before it is added. Without `before` the result is a HalfNormed
        for up to `max_few_rows` rows. Other results are quantized for the Linear that this one feeds.
        """
        if self._reduce is not None:
            if before is None and not self._next_group:
                return self._reduce.add_norm(self(x), residual, norm, eps)
            product = self._reduce.add(self(x))
            if before is not None:
                product = self._kernels.rms_norm(product, before, eps)
        elif before is not None:
            product = self._adapted(x) if self._is_adapted else self._multiply(x)
            product = self._kernels.rms_norm(product, before, eps)
        elif isinstance(x, torch.Tensor) and x.shape[0] <= self.max_few_rows:
            assert self._few_rows is not None
            if self._is_adapted:  # first: one kernel adds the product, and takes the norm
                self.adapters.run(x, lambda: residual, residual)  # type: ignore[union-attr]
            return self._few_rows.add_to(residual, x, norm, eps)
        elif self._is_adapted:
            product = self._adapted(x, residual)
        else:
            product = self._multiply(x)
        return add_norm_for(self._next_group, self._is_read_plain, self._kernels, product, residual, norm, eps)

    @property
    def takes_products(self) -> bool:
        """Whether the product may be chosen by measurement."""
        return self.bias is None

    def use(self, products: Mapping[int, Product], others: From | None = None) -> None:
        """From now on choose the product by the number of rows: first from `products`, then `others`.

        `products`: number of rows -> product; the products include the activation. `others` serves its least number of
        rows and more. All other numbers of rows are multiplied as before. Only if `takes_products`.
        """
        assert self.takes_products
        self._chosen.insert(0, (products, others))

    def use_few_rows(self, product: FewRows, max_rows: int) -> None:
        """Use `product` from now on for `add_norm` of at most `max_rows` rows, and for calls with a HalfNormed."""
        self._few_rows, self.max_few_rows = product, max_rows

    def reorder(self, order: torch.Tensor) -> None:
        """Put row `order[i]` at i, before any product is made of the weight. The checkpoint has another order."""
        self.row_order = order
        self.weight.copy_(self.weight[order])

    def take_adapters(self, adapters: LinearAdapters) -> None:
        """From now on add what adapters give. Call it after the end of loading."""
        self.adapters, self._few_unactivated = adapters, self._few_rows
        if self.activate is not None and self._few_rows is not None:
            self._few_unactivated = self.few_rows_product(is_activated=False)

    def few_rows_product(self, *, is_activated: bool = True) -> FewRows | None:
        """Make the kernels' product of few rows for this weight, bias and activation; None if the kernels have none."""
        return self._make_few_rows(self.weight, is_activated)

    def gated_products(self, num_rows: int) -> Sequence[Product]:
        """Products for `num_rows` rows and more that include the activation."""
        return self._kernels.gated_products(num_rows, self.weight) if self._is_swiglu else ()

    def pack(self, keep_weight: bool = False) -> None:
        """On CPU, hand the weight to oneDNN in oneDNN's own blocked layout, once.

        oneDNN's product of 32 rows by [32000, 256] in fp32 takes 2.9 ms on one Zen 5 core, F.linear (MKL) takes 7.6.
        Without `keep_weight` (tied embeddings) the plain copy of the weight is dropped.
        """
        if self.weight.device.type != "cpu" or not _packs(self.weight.dtype):
            return
        packed = torch.ops.mkldnn._reorder_linear_weight(self.weight)
        bias, multiply_packed = self.bias, torch.ops.mkldnn._linear_pointwise

        def multiply(x: torch.Tensor) -> torch.Tensor:
            product: torch.Tensor = multiply_packed(x, packed, bias, "none", [], "")
            return product

        self._packed = multiply
        if not keep_weight:
            self.weight = self.weight.new_empty(0)

    @property
    def _is_swiglu(self) -> bool:
        """Whether the activation is silu_and_mul, the only one that kernels compute together with the product."""
        return self.activate is self._kernels.silu_and_mul

    def _one_of(self, rows: RowsTwice) -> Rows:
        """Those of the two that this product reads."""
        return rows.plain

    def _make_few_rows(self, weight: Weight, is_activated: bool) -> FewRows | None:
        if self.activate is not None and not self._is_swiglu:
            return None
        return self._kernels.few_rows(weight, self.bias, self._is_swiglu and is_activated)

    def _multiply(self, x: Any) -> torch.Tensor:
        """The product with the activation, by what `use` has chosen. Quantized rows come to QuantizedLinears only."""
        for products, others in self._chosen:
            num_rows = x.shape[0]
            if (product := products.get(num_rows)) is not None:
                return product(x, self.weight)
            if others is not None and num_rows >= others.least:
                return others.product(x, self.weight)
        plain = self._product(x)
        return plain if self.activate is None else self.activate(plain)

    def _product(self, x: Any) -> torch.Tensor:
        """The product without the activation."""
        return F.linear(x, self.weight, self.bias) if self._packed is None else self._packed(x)


def add_norm_for(
    group: int,
    also_plain: bool,
    kernels: Kernels,
    product: torch.Tensor,
    residual: torch.Tensor,
    norm: torch.Tensor,
    eps: float,
) -> Normed:
    """The norm of a sum, quantized for a Linear of that `group`, and plain, too: see Linear.feed."""
    if group and also_plain:
        return kernels.add_rms_norm_twice(product, residual, norm, eps, group)[0]
    if group:
        return kernels.add_rms_norm_quantized(product, residual, norm, eps, group)[0]
    return kernels.add_rms_norm(product, residual, norm, eps)[0]


def _packs(dtype: torch.dtype) -> bool:
    """True if this CPU's oneDNN takes prepacked weights of `dtype`."""
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
