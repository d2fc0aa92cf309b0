"""What the rules look at: one function with what is around it."""

from __future__ import annotations

import ast
from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING

from tests.races.sources import nodes
from tests.races.times import Times

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.races.sources import Source, Sources
    from tests.races.times import Spans

LEAST_S = 60.0  # a deadline that only guards against a hang


class Rule(StrEnum):
    ELAPSED = "elapsed"
    DEADLINE = "deadline"
    SLEEP = "sleep"
    UNSETTLED = "unsettled"


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


@dataclass(frozen=True)
class Code:
    """One function or method with what is around it."""

    sources: Sources
    source: Source
    times: Times
    unit: ast.AST
    parents: dict[ast.AST, ast.AST]

    @classmethod
    def of(cls, spans: Spans, source: Source, owner: ast.ClassDef | None, unit: ast.AST) -> Code:
        parents = {child: node for node in nodes(unit) for child in ast.iter_child_nodes(node)}
        return cls(spans.sources, source, Times(spans, source, owner, unit), unit, parents)

    def above(self, node: ast.AST) -> Iterator[ast.AST]:
        """What a node is in, the innermost first."""
        while (above := self.parents.get(node)) is not None:
            yield above
            node = above

    def number(self, expression: ast.expr) -> float | None:
        return self.sources.number(self.source, expression, self.times.local)


Found = tuple[ast.AST, str]  # where, and what is told of it


def comparisons(expression: ast.expr) -> Iterator[ast.Compare]:
    yield from (node for node in ast.walk(expression) if isinstance(node, ast.Compare))


def fails(body: list[ast.stmt]) -> bool:
    """It ends the test."""
    return any(
        (isinstance(node, ast.Raise) and "AssertionError" in ast.unparse(node))
        or (isinstance(node, ast.Call) and ast.unparse(node.func) in ("pytest.fail", "fail"))
        for statement in body
        for node in ast.walk(statement)
    )
