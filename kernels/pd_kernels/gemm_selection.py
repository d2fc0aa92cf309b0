"""Choose the algorithm of a matrix product for each number of rows, by measurement.

Products are timed as a step runs them: in a replayed graph, each product with the weights of another layer, so that the
GPU's cache holds none of the weights.
"""

from __future__ import annotations

import logging
import statistics
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import torch
import torch.nn.functional as F

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

logger = logging.getLogger(__name__)

COLD_BYTES = 200e6  # weights of this size together fit into no GPU's cache
MARGIN = 0.985  # relative to the usual time: a smaller saving may be noise
PARTS = 2  # for products with fewer tiles of outputs than multiprocessors; the sum of 4 parts costs what they gain
MANY_ROWS = 512  # from here on a product is bound by multiplications, and its time depends on the GPU's clock
ROUNDS = 4  # products of many rows are timed in turn: the power limit slows down the later products of a round
BETTER = 1.04  # relative to the best time of the first round: slower products are not measured again
FAVOUR = 0.95  # factor on the time of products that include the activation: they gain more under the power limit
AGREEMENT = 0.01  # largest difference, relative to the norm; two roundings to bfloat16 differ by a third of it


class Product(Protocol):
    """A function of x [M, K] and weight [N, K] that returns x weight^T [M, N].

    Or it returns an activation of x weight^T, or float32 parts [parts, M, N] of which x weight^T is the sum.
    """

    def __call__(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor: ...


class ProposeProducts(Protocol):
    """Proposes products of `num_rows` rows with weights of this shape and dtype. The products leave `parts` parts."""

    def __call__(self, num_rows: int, weight: torch.Tensor, parts: int = 1) -> Sequence[Product]: ...


class Measure(Protocol):
    """Measures the shortest time of a function's work on the device, in any unit."""

    def __call__(self, run: Callable[[], None]) -> float: ...


def usual_product(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Returns x weight^T, as torch computes it."""
    return F.linear(x, weight)


@dataclass(frozen=True, slots=True)
class Activated:
    """A product that applies the activation after it, to be compared with products that include the activation."""

    product: Product
    activate: Callable[[torch.Tensor], torch.Tensor]

    def __call__(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        """See Product."""
        return self.activate(self.product(x, weight))


def choose_product(
    num_rows: int,
    weights: Sequence[torch.Tensor],
    propose: ProposeProducts,
    measure: Measure,
    finish: Callable[[torch.Tensor], object] | None = None,
    usual: Product = usual_product,
    favoured: Sequence[Product] = (),
) -> Product | None:
    """The fastest product of `num_rows` rows with weights of one shape [N, K]; None if that is the `usual` one.

    `finish` is the model's work after the product, which may come in parts. The time of this work counts. Without
    `finish` no products in parts are proposed. The times of `favoured` proposals for many rows are multiplied with
    FAVOUR. A proposal that fails or gives a wrong result is logged and not chosen. Raises RuntimeError when the usual
    product fails.
    """
    many = num_rows >= MANY_ROWS
    some = weights[: 1 if many else max(1, round(COLD_BYTES / weights[0].nbytes))]
    shape = f"{num_rows} rows by {tuple(weights[0].shape)}"
    try:
        proposals = [*propose(num_rows, weights[0])]
        if finish is not None and not many:
            proposals += propose(num_rows, weights[0], PARTS)
    except RuntimeError as error:
        logger.info("nothing is proposed for %s: %s", shape, error)
        return None
    if not proposals:
        return None
    x = torch.randn(num_rows, weights[0].shape[1], device=weights[0].device, dtype=weights[0].dtype)

    def time(product: Product) -> float:
        def run() -> None:
            for weight in some:
                done = product(x, weight)
                if finish is not None:
                    finish(done)

        return measure(run)

    weigh = {id(product): FAVOUR for product in favoured if many}
    usual_times, ways = _time_in_turn(usual, proposals, time, ROUNDS if many else 0, weigh)
    limit = MARGIN * statistics.median(usual_times)
    taken = [(statistics.median(times) * weigh.get(id(product), 1.0), product) for product, times in ways]
    for seconds, product in sorted(taken, key=lambda way: way[0]):
        if seconds >= limit:
            break
        if _agrees(product, usual, x, some[0]):
            return product
        logger.warning("a way to multiply %s is wrong, and not taken: %s", shape, product)
    return None


def _time_in_turn(
    usual: Product,
    proposals: Sequence[Product],
    time: Callable[[Product], float],
    rounds: int,
    weigh: Mapping[int, float],
) -> tuple[list[float], list[tuple[Product, list[float]]]]:
    """Time each product once, and those near the best `rounds` times more.

    Returns the times of the usual product, and each other product with its times. Products that fail are left out.
    `weigh`: by the id of a product, a factor on its time in comparisons.
    """
    usual_times, ways = [time(usual)], list[tuple[Product, list[float]]]()
    for product in proposals:
        try:
            ways.append((product, [time(product)]))
        except RuntimeError as error:
            logger.info("a way to multiply does not run: %s: %s", product, error)
    first = {id(product): times[0] * weigh.get(id(product), 1.0) for product, times in ways}
    limit = BETTER * min(first.values(), default=0.0)
    ways = [(product, times) for product, times in ways if first[id(product)] <= limit]
    for _ in range(rounds):
        for product, times in ((usual, usual_times), *ways):
            times.append(time(product))
    return usual_times, ways


@dataclass(frozen=True, slots=True)
class From:
    """A product for any number of rows from `least` on."""

    least: int
    product: Product


def winner_from(found: Mapping[int, Product | None], general: Sequence[Product]) -> From | None:
    """The product that is fastest for the largest measured number of rows, and the least number of rows to use it for.

    `found`: number of rows -> fastest product. `general`: products for any number of rows. None if the product is not
    one of `general`. Let s be the smallest size such that the product is fastest for s and for all larger sizes.
    `least` is just above halfway between s and the next smaller size, or s if there is no smaller size.
    """
    winner, least = None, 0
    for size in sorted(found, reverse=True):
        if found[size] not in general or winner not in (None, found[size]):
            least = (least + size) // 2 + 1
            break
        winner, least = found[size], size
    return None if winner is None else From(least, winner)


def _agrees(product: Product, usual: Product, x: torch.Tensor, weight: torch.Tensor) -> bool:
    """Whether the result of `product` equals that of the usual product, up to rounding."""
    expected, found = usual(x, weight).float(), product(x, weight).float()
    found = found.sum(0) if found.dim() == 3 else found
    return bool((found - expected).norm() <= AGREEMENT * expected.norm())
