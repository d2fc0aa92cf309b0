"""Every mutant of a source text. Pure: text in, mutants out.

    boundary         a < b        a <= b           drop-statement   self.x = 1, f(x), del x, raise, break    pass
    comparison       a == b       a != b           return-early     the second half of a body                return
    negate           if a         if not (a)       swap-arguments   f(a, b)                                  f(b, a)
    delete-not       not a        a                constant         3, True                                  4, False
    and-or           a and b      a or b           arithmetic       a + b                                    a - b
    drop-operand     a and b      b                extreme          min, max, any, all                       the other

Only bodies of functions are mutated. Left alone: assertions, which are tests themselves, texts, log lines, types,
defaults, and the constants of modules and classes, which are settings.
"""

from __future__ import annotations

import ast
from collections import Counter
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

_BOUNDARY = {ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt}
_COMPARISON = {
    ast.Eq: ast.NotEq, ast.NotEq: ast.Eq, ast.Is: ast.IsNot, ast.IsNot: ast.Is, ast.In: ast.NotIn, ast.NotIn: ast.In,
}  # fmt: skip
_ARITHMETIC = {
    ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.FloorDiv, ast.FloorDiv: ast.Mult, ast.Div: ast.Mult,
    ast.Mod: ast.Mult,
}  # fmt: skip
_EXTREME = {"min": "max", "max": "min", "any": "all", "all": "any"}
_LOGGERS = frozenset({"log", "logger"})
_KEEPS_ORDER = frozenset({"isinstance", "issubclass", "getattr", "setattr", "hasattr", "cast"})
_LEFT_ALONE = (ast.Assert, ast.JoinedStr, ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef, ast.pattern)

Found = tuple[str, ast.AST, str]  # operator, what is replaced, by what


@dataclass(frozen=True, slots=True)
class Mutant:
    """One change of one file: bytes [start, end) become `text`.

    All but the positions names it, and goes on naming it when other lines of the file change. `number`: among those
    that are equal in everything else, counted from 0.
    """

    file: str
    function: str
    operator: str
    line: str  # the source line on which the replaced text begins, stripped
    change: str  # "before -> after"
    number: int
    lineno: int
    start: int
    end: int
    text: str

    @property
    def key(self) -> tuple[str, ...]:
        return self.file, self.function, self.operator, self.line, self.change, str(self.number)

    def apply(self, source: str) -> str:
        """The mutated source."""
        data = source.encode()
        return (data[: self.start] + self.text.encode() + data[self.end :]).decode()


def mutants(file: str, source: str) -> list[Mutant]:
    """All of a file's, in the order of its lines. `file`: its name, for the mutants'."""
    data = source.encode()
    lines = data.splitlines(keepends=True)
    starts = [0]
    for line in lines:
        starts.append(starts[-1] + len(line))
    found: list[Mutant] = []
    counts: Counter[tuple[str, ...]] = Counter()
    for function, (operator, node, text) in _walk(ast.parse(source), ""):
        start = starts[node.lineno - 1] + node.col_offset  # type: ignore[attr-defined]
        end = starts[node.end_lineno - 1] + node.end_col_offset  # type: ignore[attr-defined]
        before = " ".join(data[start:end].decode().split())
        said = lines[node.lineno - 1].decode().strip()  # type: ignore[attr-defined]
        change = f"{before if operator != 'return-early' else '...'} -> {text}"
        mutant = Mutant(file, function, operator, said, change, 0, node.lineno, start, end, text)  # type: ignore[attr-defined]
        found.append(replace(mutant, number=counts[mutant.key]))
        counts[mutant.key] += 1
    return sorted(found, key=lambda mutant: (mutant.lineno, mutant.start))


def _walk(tree: ast.AST, name: str) -> Iterator[tuple[str, Found]]:
    """Function and find, of every function below `tree`."""
    for child in ast.iter_child_nodes(tree):
        if isinstance(child, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            inner = f"{name}.{child.name}".lstrip(".")
            if not isinstance(child, ast.ClassDef):
                for found in _of_function(child):
                    yield inner, found
            yield from _walk(child, inner)


def _of_function(function: ast.FunctionDef | ast.AsyncFunctionDef) -> Iterator[Found]:
    body = function.body[1:] if ast.get_docstring(function) is not None else function.body
    returns_nothing = isinstance(function.returns, ast.Constant) and function.returns.value is None
    if returns_nothing and len(body) > 1:
        half = body[len(body) // 2 :]
        rest = ast.copy_location(ast.Pass(), half[0])
        rest.end_lineno, rest.end_col_offset = half[-1].end_lineno, half[-1].end_col_offset
        yield "return-early", rest, "return"
    for statement in body:
        yield from _of_node(statement)


def _of_node(node: ast.AST) -> Iterator[Found]:
    """Finds in a statement or an expression and in what it holds."""
    if isinstance(
        node, ast.Assert | ast.JoinedStr | ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef | ast.pattern
    ):
        return
    if isinstance(node, ast.stmt):
        yield from _of_statement(node)
    elif isinstance(node, ast.expr):
        yield from _of_expression(node)
    if isinstance(node, ast.Expr | ast.Call) and _is_log(node):
        return
    for name, value in ast.iter_fields(node):
        if name in ("annotation", "returns", "decorator_list"):
            continue
        for child in value if isinstance(value, list) else [value]:
            if isinstance(child, ast.AST):
                yield from _of_node(child)


def _of_statement(node: ast.stmt) -> Iterator[Found]:
    match node:
        case ast.Expr(value=ast.Constant()):
            return
        case ast.Expr() if not _is_log(node):
            yield "drop-statement", node, "pass"
        case ast.Assign(targets=[ast.Attribute() | ast.Subscript()]):
            yield "drop-statement", node, "pass"
        case ast.AugAssign(op=op):
            yield "drop-statement", node, "pass"
            if type(op) in _ARITHMETIC:
                changed = ast.AugAssign(node.target, _ARITHMETIC[type(op)](), node.value)
                yield "arithmetic", node, ast.unparse(changed)
        case ast.Delete() | ast.Raise() | ast.Break() | ast.Continue():
            yield "drop-statement", node, "pass"
        case ast.If(test=test) | ast.While(test=test):
            yield from _negated(test)


def _of_expression(node: ast.expr) -> Iterator[Found]:
    match node:
        case ast.IfExp(test=test):
            yield from _negated(test)
        case ast.Compare():
            yield from _of_compare(node)
        case ast.BoolOp(op=op, values=values):
            other = ast.Or() if isinstance(op, ast.And) else ast.And()
            yield "and-or", node, f"({ast.unparse(ast.BoolOp(other, values))})"
            for index in range(len(values)):
                rest = [*values[:index], *values[index + 1 :]]
                text = ast.unparse(rest[0] if len(rest) == 1 else ast.BoolOp(op, rest))
                yield "drop-operand", node, f"({text})"
        case ast.UnaryOp(op=ast.Not(), operand=operand):
            yield "delete-not", node, f"({ast.unparse(operand)})"
        case ast.UnaryOp(op=ast.USub(), operand=operand) if not isinstance(operand, ast.Constant):
            yield "arithmetic", node, f"({ast.unparse(operand)})"
        case ast.BinOp(left, op, right) if type(op) in _ARITHMETIC:
            yield "arithmetic", node, f"({ast.unparse(ast.BinOp(left, _ARITHMETIC[type(op)](), right))})"
        case ast.Constant(value=bool() as value):
            yield "constant", node, str(not value)
        case ast.Constant(value=int() | float() as value):
            yield "constant", node, f"({value + 1})"
        case ast.Call(func=ast.Name(id=name)) if name in _EXTREME:
            yield "extreme", node.func, _EXTREME[name]
        case ast.Call(args=[first, second, *rest]) if not _is_log(node) and _may_swap(node, first, second):
            text = ast.unparse(ast.Call(node.func, [second, first, *rest], node.keywords))
            yield "swap-arguments", node, text
        case ast.ListComp() | ast.SetComp() | ast.GeneratorExp() | ast.DictComp():
            for generator in node.generators:
                for test in generator.ifs:
                    yield from _negated(test)


def _of_compare(node: ast.Compare) -> Iterator[Found]:
    for index, op in enumerate(node.ops):
        for operator, others in (("boundary", _BOUNDARY), ("comparison", _COMPARISON)):
            if type(op) in others:
                ops = [*node.ops[:index], others[type(op)](), *node.ops[index + 1 :]]
                yield operator, node, f"({ast.unparse(ast.Compare(node.left, ops, node.comparators))})"


def _negated(test: ast.expr) -> Iterator[Found]:
    """Where that is no mutant of another operator already."""
    is_other = isinstance(test, ast.UnaryOp) or (isinstance(test, ast.Compare) and type(test.ops[0]) in _COMPARISON)
    if not is_other and not isinstance(test, ast.Constant):
        yield "negate", test, f"(not ({ast.unparse(test)}))"


def _may_swap(node: ast.Call, first: ast.expr, second: ast.expr) -> bool:
    name = node.func.id if isinstance(node.func, ast.Name) else ""
    are_plain = not isinstance(first, ast.Starred) and not isinstance(second, ast.Starred)
    return name not in _KEEPS_ORDER and are_plain and ast.dump(first) != ast.dump(second)


def _is_log(node: ast.AST) -> bool:
    call = node.value if isinstance(node, ast.Expr) else node
    return (
        isinstance(call, ast.Call)
        and isinstance(call.func, ast.Attribute)
        and isinstance(call.func.value, ast.Name)
        and call.func.value.id in _LOGGERS
    )
