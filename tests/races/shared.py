"""Looks at all that a process has: other tests of its worker leave threads and files until a search for garbage."""

from __future__ import annotations

import ast
from typing import TYPE_CHECKING

from tests.races.sources import nodes

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.races.code import Code, Found

NUMBERS = ("threading.active_count()", "len(os.listdir('/proc/self/fd'))", "psutil.Process().num_fds()")


def shared(code: Code) -> Iterator[Found]:
    """Numbers of threads and files; and threads that no set tells from those that were there before."""
    for node in nodes(code.unit) if code.words & {"active_count", "enumerate", "listdir", "num_fds"} else ():
        if isinstance(node, ast.Call) and (ast.unparse(node) in NUMBERS or _is_of_all(code, node)):
            yield node, ast.unparse(node)


def _is_of_all(code: Code, call: ast.Call) -> bool:
    above = next(code.above(call), None)
    return ast.unparse(call) == "threading.enumerate()" and not (
        isinstance(above, ast.Call) and ast.unparse(above.func) == "set"
    )
