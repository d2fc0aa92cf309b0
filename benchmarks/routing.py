"""Counts the experts that the tokens of a step choose, outside of what is timed.

A step of a mixture reads the weights of the chosen experts. With random weights B tokens choose
E (1 - (1 - k / E)^B) of a layer's E experts. A measurement with fewer is of a lighter step, and does not count.
"""

from __future__ import annotations

from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

import torch

from pd_kernels import selection

if TYPE_CHECKING:
    from collections.abc import Iterator

    from pd_kernels.backends import Kernels
    from pd_kernels.values import HalfNormed, Routing

TOLERANCE = 0.03  # of the expected number


@dataclass(frozen=True, slots=True)
class ExpertsHit:
    """Experts of a layer that the tokens of a step choose: the mean over layers and steps, and the expected number."""

    counted: float
    expected: float

    @property
    def is_valid(self) -> bool:
        return abs(self.counted / self.expected - 1) <= TOLERANCE

    @property
    def text(self) -> str:
        """For the table."""
        return f"{self.counted:.1f} of {self.expected:.1f}{'' if self.is_valid else ': does not count'}"


@dataclass(slots=True)
class RoutingCounter:
    """Stands around `Kernels.route`. Steps that are replayed from graphs do not call it, so the caller turns them off.

    `num_tokens`: calls with so many tokens count; 0: none does.
    """

    num_tokens: int = 0
    _counts: list[int] = field(default_factory=list)

    @contextmanager
    def installed(self, device: str) -> Iterator[None]:
        """Engines that start meanwhile on this kind of device ("cpu", "cuda") are counted, as long as they live."""
        original = selection.BACKENDS[device]
        selection.BACKENDS[device] = lambda: self.around(original())
        try:
            yield
        finally:
            selection.BACKENDS[device] = original

    def around(self, kernels: Kernels) -> Kernels:
        """`kernels` with a `route` that counts."""

        def route(
            x: torch.Tensor | HalfNormed, router: torch.Tensor, bias: torch.Tensor | None, routing: Routing
        ) -> tuple[torch.Tensor, torch.Tensor]:
            scores, chosen = kernels.route(x, router, bias, routing)
            if len(chosen) == self.num_tokens:
                self._counts.append(torch.unique(chosen[:, : routing.num_chosen]).numel())
            return scores, chosen

        return replace(kernels, route=route)

    @contextmanager
    def counting(self, num_tokens: int) -> Iterator[list[int]]:
        """Collect the experts of each layer and step of `num_tokens` tokens."""
        self.num_tokens, self._counts = num_tokens, []
        try:
            yield self._counts
        finally:
            self.num_tokens = 0
