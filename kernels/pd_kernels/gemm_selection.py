"""Which algorithm multiplies how many rows, by measurement.

Timed as a step runs them: replayed as a graph, each product with another layer's weights, none of them in the cache.
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

COLD_BYTES = 200e6  # weights that together push each other out of any GPU's cache
MARGIN = 0.985  # of the usual time: what is saved must be more than noise
PARTS = 2  # of a product whose outputs are too few tiles for all multiprocessors; with 4, summing takes what is won
MANY_ROWS = 512  # from here on a product's time is that of its multiplications, and depends on the clock that is left
ROUNDS = 4  # of the better ways to multiply many rows, in turn, for the power limit slows down whoever comes later
BETTER = 1.04  # times the best of the first round
FAVOUR = 0.95  # of the time of what activates too: under the power limit it gains what a short measurement hides
AGREEMENT = 0.01  # of the norm; bfloat16's rounding, twice, is a third of it


class Product(Protocol):
    """x [M, K], weight [N, K] -> x weight^T [M, N], or its parts, float32 [parts, M, N], still to be summed; or what
    an activation makes of it."""

    def __call__(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor: ...


class ProposeProducts(Protocol):
    """Ways to multiply `num_rows` rows with weights like this one, to so many parts."""

    def __call__(self, num_rows: int, weight: torch.Tensor, parts: int = 1) -> Sequence[Product]: ...


class Measure(Protocol):
    """Shortest time of a function's work on the device, in any unit."""

    def __call__(self, run: Callable[[], None]) -> float: ...


def usual_product(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """As torch would."""
    return F.linear(x, weight)


@dataclass(frozen=True, slots=True)
class Activated:
    """A product, and then its activation, for comparison with those that do both at once."""

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
    """The fastest way to multiply `num_rows` rows with weights of one shape [N, K]; None when that is the `usual` one.

    `finish` does with the product what the model does, parts or not; its time counts. Without, there may be no parts.
    What is `favoured` among the proposals for many rows is taken to need FAVOUR of the time that is measured.
    Raises RuntimeError when the usual way fails; another that does not run, or comes to something else, is none, and
    logged.
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
    """Each once, and those near the best `rounds` times more: the usual one's times, and those of others that run.

    `weigh`: by the id of a product, what its time is multiplied with to be compared.
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
    """Of `general`, products for any number of rows, the one that was found best for the most rows that were measured,
    from as many on as are nearer to those for which it was than to fewer; `found`: by numbers of rows. None: another
    was."""
    winner, least = None, 0
    for size in sorted(found, reverse=True):
        if found[size] not in general or winner not in (None, found[size]):
            least = (least + size) // 2 + 1
            break
        winner, least = found[size], size
    return None if winner is None else From(least, winner)


def _agrees(product: Product, usual: Product, x: torch.Tensor, weight: torch.Tensor) -> bool:
    """Whether it comes to what the usual way does, to rounding."""
    expected, found = usual(x, weight).float(), product(x, weight).float()
    found = found.sum(0) if found.dim() == 3 else found
    return bool((found - expected).norm() <= AGREEMENT * expected.norm())
