"""Deadlines that a busy machine may reach."""

from __future__ import annotations

import ast
import re
from typing import TYPE_CHECKING

from tests.races.code import LEAST_S, comparisons, fails
from tests.races.elapsed import guard
from tests.races.sleeps import in_a_poll
from tests.races.sources import defaults, nodes

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.races.code import Code, Found

KEYWORDS = {"timeout", "timeout_s", "deadline_s", "patience_s"}
IN_MILLISECONDS = {"timeout_ms", "deadline_ms", "patience_ms"}
WAITS = {"wait": 0, "wait_for": 1, "join": 0, "result": 0, "timeout": 0, "settimeout": 0, "fail_after": 0}
TIMEOUTS = re.compile(r"Timeout|Empty|LaunchFailed")


def short_deadlines(code: Code) -> Iterator[Found]:
    if not (code.times or code.words & (KEYWORDS | IN_MILLISECONDS | WAITS.keys() | {"ClientTimeout"} | bounded(code))):
        return
    given = defaults(code.unit).keys()
    for node in nodes(code.unit):
        match node:
            case ast.Assert(test=test) | ast.While(test=test) | ast.If(test=test):
                for comparison in comparisons(test):
                    found = guard(code, comparison)
                    if found and found.limit_s is not None and found.limit_s < LEAST_S:
                        yield node, f"{ast.unparse(comparison)}  # {found.limit_s:g} s"
            case ast.Call():
                for value, seconds in allowed(code, node):
                    is_given = isinstance(value, ast.Name) and value.id in given  # it is found at its default
                    if 0 < seconds < LEAST_S and not is_given and not may_expire(code, node):
                        yield node, f"{ast.unparse(node.func)}({ast.unparse(value)})  # {seconds:g} s"
            case ast.FunctionDef() | ast.AsyncFunctionDef():
                for name, value in defaults(node).items():
                    preset_s = code.number(value) if name in KEYWORDS else None
                    if preset_s is not None and 0 < preset_s < LEAST_S and owns(node, name):
                        yield node, f"{node.name}({name}={ast.unparse(value)})  # {preset_s:g} s"


def bounded(code: Code) -> set[str]:
    """Functions and methods of the tests with a deadline among their parameters, by name."""
    return code.sources.taking(frozenset(KEYWORDS))


def owns(function: ast.FunctionDef | ast.AsyncFunctionDef, name: str) -> bool:
    arguments = function.args
    return name in {one.arg for one in (*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs)}


def allowed(code: Code, call: ast.Call) -> Iterator[tuple[ast.expr, float]]:
    """What a call may take, in seconds, by its arguments."""
    if is_of_the_product(code, call.func):
        return
    for keyword in call.keywords:
        name = keyword.arg or ""
        is_http = ast.unparse(call.func).endswith("ClientTimeout")
        seconds = code.times.limit_s(keyword.value) if name in KEYWORDS | IN_MILLISECONDS or is_http else None
        if seconds is not None:
            yield keyword.value, seconds / 1000 if name in IN_MILLISECONDS else seconds
    for position in positions(code, call):
        value = call.args[position] if position < len(call.args) else None
        if value is None or isinstance(value, ast.Starred) or is_text(value):
            continue
        if (seconds := code.times.limit_s(value)) is not None:
            yield value, seconds


def is_text(value: ast.expr) -> bool:
    return isinstance(value, ast.Constant) and isinstance(value.value, str)


def positions(code: Code, call: ast.Call) -> Iterator[int]:
    """Which arguments are deadlines."""
    name = call.func.attr if isinstance(call.func, ast.Attribute) else ast.unparse(call.func)
    if isinstance(call.func, ast.Attribute):
        is_module = isinstance(call.func.value, ast.Name) and call.func.value.id in code.source.imports
        is_wait_of = is_module or name not in ("timeout", "wait_for", "fail_after")
        if name in WAITS and is_wait_of and (name != "join" or joins_a_thread(code, call.func.value)):
            yield WAITS[name]
        reach = code.sources.reach(code.source.name) if not is_module else frozenset()
        for where, function in code.sources.methods.get(name, ()):  # of an object of the tests
            if where in reach:
                yield from (at - 1 for at, one in enumerate(function.args.args) if at and one.arg in KEYWORDS)
    elif found := code.sources.function(code.source, name):
        yield from (at for at, one in enumerate(found[1].args.args) if one.arg in KEYWORDS)


def joins_a_thread(code: Code, owner: ast.expr) -> bool:
    """`join` of a thread or process, not of texts or of other things of that name."""
    has_threads = {"threading", "multiprocessing"} & {module for module, _ in code.source.imports.values()}
    return bool(has_threads) or re.search("thread|process", ast.unparse(owner)) is not None


def is_of_the_product(code: Code, function: ast.expr) -> bool:
    """A deadline of the product itself: a test may want it to expire."""
    first = function
    while isinstance(first, ast.Attribute):
        first = first.value
    module = code.source.imports.get(first.id, ("",))[0] if isinstance(first, ast.Name) else ""
    return module.startswith("pd_")


def may_expire(code: Code, call: ast.Call) -> bool:
    """The test wants it to, or goes on when it does."""
    inner: ast.AST = call
    if isinstance(code.parents.get(call), ast.Expr) and in_a_poll(code, call):
        return True  # a pause between two looks
    for above in code.above(call):
        match above:
            case ast.UnaryOp(op=ast.Not()):
                return True
            case ast.Compare(ops=[ast.Is() | ast.Eq()], comparators=[ast.Constant(value=False | None)]):
                return True
            case ast.While(test=test) if inner is test:
                return True
            case ast.With(items=items) | ast.AsyncWith(items=items):
                headers = [ast.unparse(item.context_expr) for item in items]
                if any(("raises" in one or "suppress" in one) and TIMEOUTS.search(one) for one in headers):
                    return True
            case ast.Try(handlers=handlers, body=body) if inner in body:
                for handler in handlers:
                    caught = ast.unparse(handler.type) if handler.type else "Timeout"
                    ends = any(isinstance(node, ast.Raise) for one in handler.body for node in ast.walk(one))
                    if TIMEOUTS.search(caught) and not ends and not fails(handler.body):
                        return True
            case ast.FunctionDef() | ast.AsyncFunctionDef() | ast.Lambda():
                return False
        inner = above
    return False
