"""Ports that the OS chose for a socket which is closed before another program listens there; see tests/ports.py."""

from __future__ import annotations

import ast
from typing import TYPE_CHECKING

from tests.races.sources import nodes

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.races.code import Code, Found

READS_ALONE = (ast.Assign, ast.AnnAssign, ast.Return)


def lent_ports(code: Code) -> Iterator[Found]:
    """A server at port 0 in a `with` that does nothing but read its port, and a list of such servers."""
    for node in nodes(code.unit) if "create_server" in code.words else ():
        if isinstance(node, ast.With) and all(isinstance(statement, READS_ALONE) for statement in node.body):
            yield from ((item.context_expr, "port") for item in node.items if _is_any_port(item.context_expr))
        elif isinstance(node, ast.ListComp) and _is_any_port(node.elt):
            yield node, "ports"


def _is_any_port(expression: ast.expr) -> bool:
    if not isinstance(expression, ast.Call) or not ast.unparse(expression.func).endswith("create_server"):
        return False
    address = expression.args[0] if expression.args else None
    return isinstance(address, ast.Tuple) and ast.unparse(address.elts[-1]) == "0"
