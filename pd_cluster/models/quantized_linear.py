"""Products with a weight in float8, of rows that are quantized before the product or where they are computed."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from pd_cluster.errors import StartupError
from pd_cluster.models.linear import Linear
from pd_kernels.quantized import BLOCK, QuantizedRows, RowsTwice
from pd_kernels.values import HalfNormed

if TYPE_CHECKING:
    from collections.abc import Callable

    from pd_cluster.models.linear import Normed, Rows
    from pd_cluster.models.reduce import Reduce
    from pd_kernels.backends import FewRows, Kernels
    from pd_kernels.quantized import QuantizedWeight


class QuantizedLinear(Linear):
    """A Linear with a QuantizedWeight. Products of plain weights do not replace its product."""

    def __init__(
        self,
        weight: QuantizedWeight,
        bias: torch.Tensor | None,
        kernels: Kernels,
        dtype: torch.dtype,
        activate: Callable[[torch.Tensor], torch.Tensor] | None = None,
        *,
        adds: bool = False,
        reduce: Reduce | None = None,
    ) -> None:
        """See Linear. `dtype`: of the product."""
        super().__init__(weight.values, bias, kernels, activate, adds=adds, reduce=reduce)
        self._quantized, self._dtype = weight, dtype

    @property
    def group(self) -> int:
        """See Linear."""
        return self._quantized.group

    @property
    def takes_products(self) -> bool:
        """See Linear."""
        return False

    def reorder(self, order: torch.Tensor) -> None:
        """See Linear. Raises StartupError if a row would leave its block."""
        of_row = torch.arange(len(order), device=order.device)
        if not self._quantized.is_blocks:
            self._quantized.scales.copy_(self._quantized.scales[order])
        elif (of_row // BLOCK != order // BLOCK).any():
            raise StartupError(f"rows that rotate in pairs lie in several quantized blocks of {BLOCK}, and cannot move")
        self.row_order = order
        values = self._quantized.values.view(torch.uint8)
        values.copy_(values[order])

    def few_rows_product(self, *, is_activated: bool = True) -> FewRows | None:
        """See Linear."""
        return self._make_few_rows(self._quantized, is_activated)

    def activated(self, x: Normed) -> Rows:
        """See Linear."""
        if not (self._next_group and self._is_swiglu) or isinstance(x, HalfNormed) or self._is_adapted:
            return self(x)
        rows = self._one_of(x) if isinstance(x, RowsTwice) else x
        return self._kernels.silu_and_mul_quantized(self._product(rows), self._next_group)

    def _one_of(self, rows: RowsTwice) -> Rows:
        """See Linear."""
        return rows.quantized if rows.quantized.group == self.group else rows.plain

    def _product(self, x: Rows) -> torch.Tensor:
        rows = x if isinstance(x, QuantizedRows) else self._kernels.quantize(x, self.group)
        product = self._kernels.quantized_product(rows, self._quantized, self._dtype)
        if self.bias is not None:
            product += self.bias
        return product
