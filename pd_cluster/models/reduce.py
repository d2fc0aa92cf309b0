"""What the ranks of a tensor-parallel model do together between products."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    import torch

    from pd_kernels.values import HalfNormed


class Reduce(Protocol):
    """Sums over ranks. Every rank calls the same methods in the same order with tensors of the same shapes.

    Sums are in the order of ranks on every rank, so that all ranks have the same bits.
    """

    def add(self, partial: torch.Tensor) -> torch.Tensor:
        """The sum over ranks of `partial` [T, size], of any float dtype and size. May overwrite it."""

    def add_norm(
        self, partial: torch.Tensor, residual: torch.Tensor, norm: torch.Tensor, eps: float
    ) -> torch.Tensor | HalfNormed:
        """Add the ranks' sum of `partial` [T, hidden] to `residual` in place. -> the sum's RMSNorm with weight `norm`.

        A HalfNormed of more rows than the kernels of few rows take (`pd_kernels.values.FEW_ROWS`) is divided by
        launches of its own.
        """

    def gather(self, part: torch.Tensor) -> torch.Tensor:
        """The ranks' `part` [R, V], side by side in the order of ranks: [R, size * V], on every rank."""

    def best(self, scores: torch.Tensor, token_ids: torch.Tensor) -> torch.Tensor:
        """int64 [R]: for each row the `token_ids` of the rank with the highest `scores` (float32 [R]).

        Equal scores: the lowest token id.
        """

    def broadcast(self, values: torch.Tensor) -> None:
        """Overwrite `values` with those of rank 0."""
