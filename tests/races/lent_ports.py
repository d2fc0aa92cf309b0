"""Ports that the OS chose for a socket which is closed before another program listens there; see tests/ports.py."""

from __future__ import annotations

import ast
from typing import TYPE_CHECKING

from tests.races.sources import nodes

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.races.code import Code, Found

PREPARES = {"bind", "setsockopt", "getsockname", "int", "str"}


def lent_ports(code: Code) -> Iterator[Found]:
    """A socket at port 0 in a `with` that does nothing but read its port."""
    for node in nodes(code.unit) if code.words & {"create_server", "bind"} else ():
        if isinstance(node, ast.With) and _uses(node.body) <= PREPARES:
            places = [item.context_expr for item in node.items]
            if any(_is_any_port(call) for place in (*places, *node.body) for call in ast.walk(place)):
                yield node, "port"


def _uses(body: list[ast.stmt]) -> set[str]:
    """Names of what is called, and of a `yield`."""
    within = [node for statement in body for node in ast.walk(statement)]
    calls = {ast.unparse(node.func).rpartition(".")[2] for node in within if isinstance(node, ast.Call)}
    return calls | {"yield" for node in within if isinstance(node, ast.Yield)}


def _is_any_port(call: ast.AST) -> bool:
    """`create_server` or `bind` of an address with port 0."""
    if not isinstance(call, ast.Call) or ast.unparse(call.func).rpartition(".")[2] not in ("create_server", "bind"):
        return False
    addresses = [*call.args, *(keyword.value for keyword in call.keywords)]
    pairs = (one.elts for one in addresses if isinstance(one, ast.Tuple) and len(one.elts) > 1)
    return any(ast.unparse(elements[1]) == "0" for elements in pairs)
