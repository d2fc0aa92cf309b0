"""A norm that two products share."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, slots=True)
class HalfNormed:
    """RMSNorm of T rows, a division short: x = rows * weight, each row still to be divided by its root mean square.

    The product before the norm leaves this, the product after it divides. Between them the sum of squares of a row is
    in pieces, for no program of the first has the whole row.
    """

    x: torch.Tensor  # [T, size]
    squares: torch.Tensor  # float32 [pieces, T]: a row's add up to the sum of its squares
    eps: float
