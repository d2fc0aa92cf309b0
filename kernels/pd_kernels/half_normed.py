"""A norm that is computed half by the product before it, half by the product after it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, slots=True)
class HalfNormed:
    """RMSNorm of T rows without its division: x = rows * weight, to be divided by each row's root mean square.

    The product before the norm writes this, and the product after it divides. The sum of squares of a row is in pieces,
    because no program of the first product has the whole row.
    """

    x: torch.Tensor  # [T, size]
    squares: torch.Tensor  # float32 [pieces, T]: a row's add up to the sum of its squares
    eps: float
