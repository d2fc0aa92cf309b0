"""The second half of a layer, which computes each token alone."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    import torch

    from pd_cluster.models.linear import Linear, Normed


class FeedForward(Protocol):
    """Computes rows, and adds them to the residual."""

    def feed(self, before: Linear, following: Linear | None, *, also_plain: bool = False) -> None:
        """Let `before` quantize its norm for this, and this its own for `following`; see Linear.feed."""

    def add_norm(self, residual: torch.Tensor, x: Normed, norm: torch.Tensor, eps: float) -> Normed:
        """Add what is computed of `x` [T, hidden] to `residual`, in place. -> the sum's RMSNorm with weight `norm`."""


@dataclass(frozen=True, slots=True)
class Dense:
    """Every token is multiplied with the same weights."""

    gate_up: Linear  # [2 * intermediate, hidden], activated: [T, intermediate]
    down: Linear  # [hidden, intermediate]

    def feed(self, before: Linear, following: Linear | None, *, also_plain: bool = False) -> None:
        """See FeedForward."""
        before.feed(self.gate_up)
        self.gate_up.feed(self.down)
        if following is not None:
            self.down.feed(following, also_plain=also_plain)

    def add_norm(self, residual: torch.Tensor, x: Normed, norm: torch.Tensor, eps: float) -> Normed:
        """See FeedForward."""
        return self.down.add_norm(residual, self.gate_up.activated(x), norm, eps)
