"""Looks at other processes that wait for nothing."""

from __future__ import annotations

import ast
import re
from typing import TYPE_CHECKING

from tests.races.code import Code, comparisons
from tests.races.sources import children, nodes, pairs

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.races.code import Found

PROCESSES = {"tests.cluster", "tests.integration.system", "tests.integration.fault_cluster", "tests.security.stranger"}
READS = {"metric", "metrics", "kv", "held"}
OUTPUT = {"lines", "output"}
RUNNING = re.compile(r"(process|launched|router|node|cluster|pool|up|down|scaled|gateway|prefill|decode|nodes?\[.*\])$")
PAGES = re.compile(r"/(metrics|kv|nodes|load)\b")
MOST_HELPERS = 2  # that call each other
AWAITS = re.compile(r"^_?(until|wait|settle|eventually|check_clean|stop|communicate|end$|leftovers$|communicate$)")


def unsettled(code: Code) -> Iterator[Found]:
    if "assert" not in code.words or not code.sources.reach(code.source.name) & PROCESSES:
        return
    for node in nodes(code.unit):
        if isinstance(node, ast.Assert) and not is_about_the_answer(node.test) and not awaited_before(code, node):
            read = next(read_directly(code, node.test), None) or read_above(code, node)
            if read is not None:
                yield node, ast.unparse(node.test)[:100]


def is_about_the_answer(test: ast.expr) -> bool:
    """That there is one, not what it says."""
    return any(
        ast.unparse(side).endswith((".status_code", ".status")) for one in comparisons(test) for side in [one.left]
    )


def read_directly(code: Code, expression: ast.AST, depth: int = MOST_HELPERS) -> Iterator[ast.AST]:
    """Looks at another process in an expression, but for what a waiting helper will do."""
    for node in outside_functions(expression):
        match node:
            case ast.Call(func=ast.Attribute(attr=name)) if name in READS:
                yield node
            case ast.Call(func=ast.Attribute(attr="get") | ast.Name(id="fetch"), args=[url, *_]):
                if PAGES.search(ast.unparse(url)):
                    yield node
            case ast.Attribute(attr=name, value=owner) if name in OUTPUT and RUNNING.search(ast.unparse(owner)):
                yield node
            case ast.Call(func=ast.Name(id=name)) if gives_a_read(code, name, depth):
                yield node


def gives_a_read(code: Code, name: str, depth: int) -> bool:
    """It is a helper that returns what another process says now."""
    found = code.sources.function(code.source, name) if depth else None
    if found is None:
        return False
    source, function = found
    if any(is_wait(node) for node in nodes(function)):
        return False
    there = code.elsewhere(source, function)
    local = {ast.unparse(target): value for node in nodes(function) for target, value in pairs(node)}
    results = [node.value for node in nodes(function) if isinstance(node, ast.Return) and node.value]
    results += [local[name.id] for one in results for name in ast.walk(one)
                if isinstance(name, ast.Name) and name.id in local]  # fmt: skip
    return any(True for result in results for _ in read_directly(there, result, depth - 1))


def outside_functions(expression: ast.AST) -> Iterator[ast.AST]:
    """A node and all in it that runs with it."""
    yield expression
    for child in children(expression):
        if not isinstance(child, ast.Lambda | ast.FunctionDef | ast.AsyncFunctionDef):
            yield from outside_functions(child)


def is_wait(node: ast.AST) -> bool:
    match node:
        case ast.Call(func=ast.Attribute(attr=name) | ast.Name(id=name)):
            return AWAITS.match(name) is not None
    return False


def statements_before(code: Code, statement: ast.AST) -> Iterator[ast.AST]:
    """Those that ran before, the nearest first: of its block, the header above it, then of the blocks around."""
    here = statement
    for above in code.above(statement):
        for field in ("body", "orelse", "finalbody"):
            block = getattr(above, field, None)
            if isinstance(block, list) and here in block:
                yield from reversed(block[: block.index(here)])
        match above:
            case ast.With(items=items) | ast.AsyncWith(items=items):
                yield from (item.context_expr for item in reversed(items))
            case ast.FunctionDef() | ast.AsyncFunctionDef():
                return
        here = above


def awaited_before(code: Code, statement: ast.AST) -> bool:
    """A waiting helper was called, and after it nothing but looks and assertions."""
    if any(is_wait(node) for node in outside_functions(statement)):
        return True
    for before in statements_before(code, statement):
        if any(is_wait(node) for node in outside_functions(before)):
            return True
        if not is_a_look(code, before):
            return False
    return False


def is_a_look(code: Code, statement: ast.AST) -> bool:
    """An assertion, a look at another process, or an assignment that calls nothing."""
    if isinstance(statement, ast.Assert | ast.FunctionDef | ast.AsyncFunctionDef):
        return True
    if isinstance(statement, ast.Assign | ast.AnnAssign):
        calls = any(isinstance(node, ast.Call) for node in outside_functions(statement))
        return not calls or any(True for _ in read_directly(code, statement))
    return False


def read_above(code: Code, assertion: ast.Assert) -> ast.AST | None:
    """A look of the assignments right before an assertion that it compares."""
    names = {node.id for node in ast.walk(assertion.test) if isinstance(node, ast.Name)}
    for before in statements_before(code, assertion):
        if not is_a_look(code, before):
            return None
        if (
            isinstance(before, ast.Assign)
            and any(True for _ in read_directly(code, before))
            and names
            & {node.id for target in before.targets for node in ast.walk(target) if isinstance(node, ast.Name)}
        ):
            return before
    return None
