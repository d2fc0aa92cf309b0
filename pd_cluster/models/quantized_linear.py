"""Products with a weight in float8. Rows are quantized before each product."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pd_cluster.models.linear import Linear

if TYPE_CHECKING:
    from collections.abc import Callable

    import torch

    from pd_kernels.backends import FewRows, Kernels
    from pd_kernels.quantized import QuantizedWeight


class QuantizedLinear(Linear):
    """A Linear with a QuantizedWeight. Products of plain weights do not replace its product."""

    def __init__(
        self,
        weight: QuantizedWeight,
        bias: torch.Tensor | None,
        kernels: Kernels,
        activate: Callable[[torch.Tensor], torch.Tensor] | None = None,
        *,
        adds: bool = False,
    ) -> None:
        """See Linear."""
        super().__init__(weight.values, bias, kernels, activate, adds=adds)
        self._quantized = weight

    @property
    def takes_products(self) -> bool:
        """See Linear."""
        return False

    def few_rows_product(self) -> FewRows | None:
        """See Linear."""
        return self._make_few_rows(self._quantized)

    def _plain(self, x: torch.Tensor) -> torch.Tensor:
        kernels, weight = self._kernels, self._quantized
        product = kernels.quantized_product(kernels.quantize(x, weight.group), weight, x.dtype)
        if self.bias is not None:
            product += self.bias
        return product if self.activate is None else self.activate(product)
