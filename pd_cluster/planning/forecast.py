"""What share of the requests would be within their targets. Imports no simulator: a balance has it in memory."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Forecast:
    """A share of the requests, and the least and most with other steps."""

    attainment: float
    low: float
    high: float
