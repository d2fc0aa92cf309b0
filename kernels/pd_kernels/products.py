"""Which algorithm multiplies how many rows, by measurement.

Timed as a step runs them: replayed as a graph, each product with another layer's weights, none of them in the cache.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Protocol

import torch
import torch.nn.functional as F

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

logger = logging.getLogger(__name__)

COLD_BYTES = 200e6  # weights that together push each other out of any GPU's cache
MARGIN = 0.985  # of the usual time: what is saved must be more than noise


class Product(Protocol):
    """x [M, K], weight [N, K] -> x weight^T [M, N]."""

    def __call__(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor: ...


class ProposeProducts(Protocol):
    """Ways to multiply `num_rows` rows with weights like this one."""

    def __call__(self, num_rows: int, weight: torch.Tensor) -> Sequence[Product]: ...


class Measure(Protocol):
    """Shortest time of a function's work on the device, in any unit."""

    def __call__(self, run: Callable[[], None]) -> float: ...


def usual_product(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """As torch would."""
    return F.linear(x, weight)


def choose_product(
    num_rows: int, weights: Sequence[torch.Tensor], propose: ProposeProducts, measure: Measure
) -> Product | None:
    """The fastest way to multiply `num_rows` rows with weights of one shape [N, K]; None when that is torch's own.

    Raises RuntimeError when torch's own way fails; another that does not run is none, and logged.
    """
    some = weights[: max(1, round(COLD_BYTES / weights[0].nbytes))]
    x = torch.randn(num_rows, weights[0].shape[1], device=weights[0].device).to(weights[0].dtype)

    def repeat(product: Product) -> Callable[[], None]:
        def run() -> None:
            for weight in some:
                product(x, weight)

        return run

    best: Product | None = None
    best_time = MARGIN * measure(repeat(usual_product))
    shape = f"{num_rows} rows by {tuple(weights[0].shape)}"
    try:
        proposals = propose(num_rows, weights[0])
    except RuntimeError as error:
        logger.info("nothing is proposed for %s: %s", shape, error)
        return None
    for product in proposals:
        try:
            time = measure(repeat(product))
        except RuntimeError as error:
            logger.info("a way to multiply %s does not run: %s", shape, error)
        else:
            if time < best_time:
                best, best_time = product, time
    return best
