"""Which numbers training never shows."""

from __future__ import annotations


def is_held_out(number: int) -> bool:
    """Whether a four-digit number is kept for the evaluation, about one in five; training never shows it."""
    return (number * 2654435761 >> 11) % 5 == 0 and number not in (4831, 2210)
