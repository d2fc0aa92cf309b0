"""Pauses in place of events."""

from __future__ import annotations

import ast
from typing import TYPE_CHECKING

from tests.races.sources import nodes

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.races.code import Code, Found


def sleeps(code: Code) -> Iterator[Found]:
    for node in nodes(code.unit) if "sleep" in code.words else ():
        if isinstance(node, ast.Call) and is_sleep(code, node) and not in_a_poll(code, node):
            yield node, ast.unparse(node)


def is_sleep(code: Code, call: ast.Call) -> bool:
    if call.args and code.number(call.args[0]) == 0:
        return False  # other tasks have their turn
    match call:
        case ast.Call(func=ast.Attribute(value=ast.Name(id=module), attr="sleep"), args=[_, *_]):
            return module in {"time", "asyncio", "anyio", "trio"}
        case ast.Call(func=ast.Name(id="sleep"), args=[_, *_]):
            return code.source.imports.get("sleep", ("",))[0] in {"time", "asyncio", "anyio"}
    return False


def in_a_poll(code: Code, call: ast.Call) -> bool:
    """It stands in a loop that looks at something each time."""
    for above in code.above(call):
        match above:
            case ast.While(test=test) if not isinstance(test, ast.Constant):
                return True
            case ast.While(body=body) | ast.For(body=body) | ast.AsyncFor(body=body):
                return any(
                    isinstance(node, ast.If) and any(isinstance(end, ast.Break | ast.Return) for end in ast.walk(node))
                    for statement in body
                    for node in ast.walk(statement)
                )
            case ast.FunctionDef() | ast.AsyncFunctionDef():
                return False
    return False
