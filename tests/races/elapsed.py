"""Assertions about spans of time, and the comparisons that only guard against a hang."""

from __future__ import annotations

import ast
from dataclasses import dataclass
from typing import TYPE_CHECKING

from tests.races.code import LEAST_S, comparisons, fails
from tests.races.sources import nodes
from tests.races.times import Kind

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.races.code import Code, Found


def elapsed(code: Code) -> Iterator[Found]:
    for node in nodes(code.unit) if code.times else ():
        if isinstance(node, ast.Assert) or (isinstance(node, ast.If) and fails(node.body)):
            for comparison in comparisons(node.test):
                if is_about_a_span(code, comparison):
                    yield node, ast.unparse(comparison)


def is_about_a_span(code: Code, comparison: ast.Compare) -> bool:
    """It compares a span of time, or a moment with a later one, and is no guard against a hang."""
    sides = [comparison.left, *comparison.comparators]
    times = [code.times.of(side) for side in sides]
    kinds = [time.kind for time in times if time]
    return (Kind.SPAN in kinds or (Kind.LATER in kinds and len(kinds) > 1)) and not guard(code, comparison)


@dataclass(frozen=True)
class Guard:
    """A comparison of the time with the end of all patience; None: its length is not known here."""

    limit_s: float | None


def guard(code: Code, comparison: ast.Compare) -> Guard | None:
    """`now < end` or `now - began < LONG`."""
    if len(comparison.ops) != 1:
        return None
    small, large = comparison.left, comparison.comparators[0]
    if isinstance(comparison.ops[0], ast.Gt | ast.GtE):
        small, large = large, small
    elif not isinstance(comparison.ops[0], ast.Lt | ast.LtE):
        return None
    first, second = code.times.of(small), code.times.of(large)
    if first and second and first.kind is Kind.NOW and second.kind is Kind.LATER:
        return Guard(second.limit_s)
    if first and first.kind is Kind.SPAN and not second:
        limit_s = code.number(large)
        return Guard(limit_s) if limit_s is not None and limit_s >= LEAST_S else None
    return None
