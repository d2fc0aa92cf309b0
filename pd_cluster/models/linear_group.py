"""Linears of one kind, one of each layer. They have one shape and use the same products, chosen by measurement."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from pd_kernels.gemm_selection import Activated, choose_product, usual_product, winner_from

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from pd_cluster.models.linear import Linear
    from pd_kernels.gemm_selection import Measure, Product, ProposeProducts


class LinearGroup:
    """All linears of one kind.

    `add_norm` gets a product and a residual [T, out], and does the model's work after such a product.
    """

    def __init__(self, linears: Sequence[Linear], add_norm: Callable[[torch.Tensor, torch.Tensor], object]) -> None:
        self._linears = linears
        self._first = linears[0]
        self._add_norm = add_norm

    def choose(self, sizes: Iterable[int], propose: ProposeProducts, measure: Measure) -> int:
        """Measure the proposed products for each number of rows in `sizes`, and use the fastest from now on.

        Returns for how many of `sizes` the product is not torch's. Nothing is chosen for Linears that take no products,
        nor for the few rows that have a kernel of their own. Raises RuntimeError when the device fails.
        """
        sizes = sorted({size for size in sizes if size > self._first.max_few_rows})
        if not self._first.takes_products or not sizes:
            return 0
        found = {size: self._choose_product(size, propose, measure) for size in sizes}
        chosen = {size: product for size, product in found.items() if product is not None}
        others = winner_from(found, self._first.gated_products(sizes[-1]))
        for linear in self._linears:
            linear.use(chosen, others)
        return len(chosen)

    def _choose_product(self, num_rows: int, propose: ProposeProducts, measure: Measure) -> Product | None:
        weights, activate = [linear.weight for linear in self._linears], self._first.activate
        if activate is None:
            finish = self._finish(num_rows) if self._first.adds else None
            return choose_product(num_rows, weights, propose, measure, finish)
        gated = self._first.gated_products(num_rows)

        def propose_activated(num_rows: int, weight: torch.Tensor, parts: int = 1) -> list[Product]:
            return [*(Activated(product, activate) for product in propose(num_rows, weight)), *gated]

        usual = Activated(usual_product, activate)
        return choose_product(num_rows, weights, propose_activated, measure, usual=usual, favoured=gated)

    def _finish(self, num_rows: int) -> Callable[[torch.Tensor], object]:
        """The work that follows the product, for measurements. It also sums a product that comes in parts."""
        weight = self._first.weight
        residual = torch.zeros(num_rows, weight.shape[0], dtype=weight.dtype, device=weight.device)
        return lambda product: self._add_norm(product, residual)
