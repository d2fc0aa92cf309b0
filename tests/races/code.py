"""What the rules look at: one function with what is around it."""

from __future__ import annotations

import ast
import functools
from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING

from tests.races.sources import children, nodes
from tests.races.times import Times

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.races.sources import Source
    from tests.races.times import Spans

LEAST_S = 60.0  # a deadline that only guards against a hang


class Rule(StrEnum):
    ELAPSED = "elapsed"
    DEADLINE = "deadline"
    SLEEP = "sleep"
    UNSETTLED = "unsettled"
    SHARED = "shared"
    PORT = "port"


@dataclass(frozen=True, order=True)
class Finding:
    path: str
    line: int
    function: str
    rule: Rule
    text: str

    @property
    def place(self) -> str:
        return f"{self.path}::{self.function}"


class Code:
    """One function or method with what is around it."""

    def __init__(self, spans: Spans, source: Source, owner: ast.ClassDef | None, unit: ast.AST) -> None:
        self.sources = spans.sources
        self.source = source
        self.unit = unit
        self.words = source.words(unit)
        self._spans, self._owner = spans, owner

    @functools.cached_property
    def times(self) -> Times:
        return Times(self._spans, self.source, self._owner, self.unit)

    @functools.cached_property
    def parents(self) -> dict[ast.AST, ast.AST]:
        return {child: node for node in nodes(self.unit) for child in children(node)}

    def elsewhere(self, source: Source, function: ast.AST) -> Code:
        """A function of another file."""
        return Code(self._spans, source, None, function)

    def above(self, node: ast.AST) -> Iterator[ast.AST]:
        """What a node is in, the innermost first."""
        while (above := self.parents.get(node)) is not None:
            yield above
            node = above

    def number(self, expression: ast.expr) -> float | None:
        return self.sources.number(self.source, expression, self.times.local)


Found = tuple[ast.AST, str]  # where, and what is told of it


def comparisons(expression: ast.expr) -> Iterator[ast.Compare]:
    yield from (node for node in nodes(expression) if isinstance(node, ast.Compare))


def fails(body: list[ast.stmt]) -> bool:
    """It ends the test."""
    return any(
        (isinstance(node, ast.Raise) and "AssertionError" in ast.unparse(node))
        or (isinstance(node, ast.Call) and ast.unparse(node.func) in ("pytest.fail", "fail"))
        for statement in body
        for node in ast.walk(statement)
    )
