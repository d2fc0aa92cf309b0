"""The files of the tests, what their names mean, and the numbers behind these names."""

from __future__ import annotations

import ast
import functools
import operator
import re
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

ROOT = Path(__file__).parents[2]
ROOTS = (".", "router", "connectors", "kernels")  # of importable packages
LEFT_OUT_MARKS = ("mark.slow", "mark.gpu")
PARAMETER = operator.attrgetter("arg")
MOST_STEPS = 12  # from a name to its number
WORD = re.compile(r"[^\W\d]\w*")
OPERATORS = {ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.Div: operator.truediv}

Function = ast.FunctionDef | ast.AsyncFunctionDef
Locals = dict[str, ast.expr]


class Source:
    """One file."""

    def __init__(self, name: str, text: str) -> None:
        self.name, self.text = name, text  # the name is dotted
        self.tree = ast.parse(text)
        self.imports: dict[str, tuple[str, str]] = {}  # local name -> module, name in it ("" is the module itself)
        self.constants: Locals = {}
        for node in statements(self.tree):
            if isinstance(node, ast.ImportFrom) and node.module:
                self.imports |= {a.asname or a.name: (node.module, a.name) for a in node.names}
            elif isinstance(node, ast.Import):
                self.imports |= {a.asname: (a.name, "") for a in node.names if a.asname}
                self.imports |= {(top := a.name.partition(".")[0]): (top, "") for a in node.names if not a.asname}
        self.constants = assigned(self.tree.body)

    @property
    def path(self) -> str:
        return self.name.replace(".", "/") + ".py"

    def is_left_out(self) -> bool:
        """All its tests are slow, or need a GPU."""
        return is_marked(self.constants.get("pytestmark"), self.constants)

    @functools.cached_property
    def units(self) -> list[tuple[str, ast.ClassDef | None, ast.AST]]:
        """Functions and methods that are not left out, by name, and the rest of the file as `<module>`."""
        return list(self._units())

    def _units(self) -> Iterator[tuple[str, ast.ClassDef | None, ast.AST]]:
        rest: list[ast.stmt] = []
        for statement in self.tree.body:
            if isinstance(statement, ast.ClassDef):
                if not self._is_marked(statement) and not is_marked(assigned(statement.body).get("pytestmark"), {}):
                    for inner in statement.body:
                        if isinstance(inner, Function) and not self._is_marked(inner):
                            yield f"{statement.name}.{inner.name}", statement, inner
            elif isinstance(statement, Function):
                if not self._is_marked(statement):
                    yield statement.name, None, statement
            else:
                rest.append(statement)
        yield "<module>", None, ast.Module(rest, [])

    @functools.cache  # noqa: B019 (as long as the objects are)
    def words(self, unit: ast.AST) -> set[str]:
        """All names in the lines of a function or class, or in the whole file, and what they are where they come from.

        A rule that needs one of some words need not look at the nodes of a unit without it.
        """
        if not isinstance(unit, Function | ast.ClassDef):
            return self._words
        found = set(WORD.findall("\n".join(self._lines[unit.lineno - 1 : unit.end_lineno])))
        return found.union(*(self.imports[name] for name in found & self.imports.keys()))

    @functools.cached_property
    def _words(self) -> set[str]:
        return set(WORD.findall(self.text))

    @functools.cached_property
    def functions(self) -> dict[str, Function]:
        """Those outside of classes, by name."""
        return {one.name: one for one in reversed(self.tree.body) if isinstance(one, Function)}

    @functools.cached_property
    def _lines(self) -> list[str]:
        return self.text.splitlines()

    def _is_marked(self, node: Function | ast.ClassDef) -> bool:
        return any(is_marked(decorator, self.constants) for decorator in node.decorator_list)


class Sources:
    """The files of a tree, read when they are asked for."""

    def __init__(self, root: Path = ROOT, texts: Mapping[str, str] | None = None) -> None:
        self._root, self._texts = root, texts

    @functools.cache  # noqa: B019 (one object a run)
    def get(self, name: str) -> Source | None:
        """The file of a module, unless it is none of this tree."""
        if self._texts is not None:
            return Source(name, self._texts[name]) if name in self._texts else None
        relative = name.replace(".", "/")
        for root in ROOTS:
            for path in (self._root / root / f"{relative}.py", self._root / root / relative / "__init__.py"):
                if path.is_file():
                    return Source(name, path.read_text())
        return None

    @functools.cached_property
    def tests(self) -> dict[str, Source]:
        """All files under `tests`, by dotted name."""
        if self._texts is not None:
            names = list(self._texts)
        else:
            paths = sorted((self._root / "tests").rglob("*.py"))
            names = [".".join(path.relative_to(self._root).with_suffix("").parts) for path in paths]
        return {name: source for name in names if (source := self.get(name)) is not None}

    @functools.cached_property
    def methods(self) -> dict[str, list[tuple[str, Function]]]:
        """Methods of the tests' classes by their name, each with the file that defines it."""
        found: dict[str, list[tuple[str, Function]]] = {}
        for name, source in self.tests.items():
            for statement in source.tree.body:
                for function in statement.body if isinstance(statement, ast.ClassDef) else ():
                    if isinstance(function, Function):
                        found.setdefault(function.name, []).append((name, function))
        return found

    @functools.cache  # noqa: B019
    def taking(self, parameters: frozenset[str]) -> set[str]:
        """Functions and methods with one of these parameters, by name."""
        functions = [one for source in self.tests.values() for one in source.functions.values()]
        functions += [function for found in self.methods.values() for _, function in found]
        return {one.name for one in functions if not parameters.isdisjoint(map(PARAMETER, one.args.args))}

    @functools.cache  # noqa: B019
    def reach(self, name: str) -> frozenset[str]:
        """The files of tests that a file imports, itself included."""
        seen: set[str] = set()
        waiting = [name]
        while waiting:
            if (one := waiting.pop()) not in seen and one in self.tests:
                seen.add(one)
                for module, inner in self.tests[one].imports.values():
                    waiting += [module, f"{module}.{inner}"]
        return frozenset(seen)

    @functools.cached_property
    def live(self) -> dict[str, Source]:
        """Files with code that runs in `make test`: all but slow ones, and those that only slow ones import."""
        slow = {name for name, source in self.tests.items() if source.is_left_out()}
        starts = [name for name in self.tests if name not in slow and is_start(name)]
        used = frozenset().union(*map(self.reach, starts)) - slow if starts else frozenset()
        only_slow = frozenset().union(*map(self.reach, slow)) - used if slow else frozenset()
        return {name: source for name, source in self.tests.items() if name not in only_slow | slow}

    def function(self, source: Source, name: str) -> tuple[Source, Function] | None:
        """What a name of a file calls, in this file or in one of the tests that it comes from."""
        for _ in range(MOST_STEPS):
            if name in source.functions:
                return source, source.functions[name]
            module, name = source.imports.get(name, ("", ""))
            if not (name and module in self.tests):
                return None
            source = self.tests[module]
        return None

    def number(
        self, source: Source, expression: ast.expr | None, local: Locals | None = None, steps: int = MOST_STEPS
    ) -> float | None:
        """What an expression amounts to when it is made of constants."""
        follow = functools.partial(self.number, source, local=local, steps=steps - 1)
        if steps == 0:
            return None
        match expression:
            case ast.Constant(value=int() | float() as number) if not isinstance(number, bool):
                return float(number)
            case ast.Constant(value=str(text)) if text.replace(".", "", 1).isdigit():  # the default of a variable
                return float(text)
            case ast.UnaryOp(op=ast.USub(), operand=operand):
                return None if (found := follow(operand)) is None else -found
            case ast.BinOp(left=left, op=op, right=right) if type(op) in OPERATORS:
                first, second = follow(left), follow(right)
                if first is None or second is None or (isinstance(op, ast.Div) and not second):
                    return None
                return float(OPERATORS[type(op)](first, second))
            case ast.IfExp(body=body, orelse=orelse):
                return min((n for n in (follow(body), follow(orelse)) if n is not None), default=None)
            case ast.Call(func=function, args=arguments):
                return self._called(function, [follow(argument) for argument in arguments])
            case ast.Name(id=name):
                return self._named(source, name, local or {}, steps)
            case ast.Attribute(value=ast.Name(id=name), attr=attribute):
                module, inner = source.imports.get(name, ("", ""))
                there = self.get(f"{module}.{inner}" if inner else module) if module else None
                return self._named(there, attribute, {}, steps) if there else None
        return None

    def _called(self, function: ast.expr, numbers: list[float | None]) -> float | None:
        known = [number for number in numbers if number is not None]
        text = ast.unparse(function)
        if not known:
            return None
        if text in ("float", "int", "round") or text.endswith("environ.get"):
            return known[-1]
        if text in ("max", "min"):
            return max(known) if text == "max" else min(known)
        return None

    def _named(self, source: Source, name: str, local: Locals, steps: int) -> float | None:
        if name in local:
            others = {other: value for other, value in local.items() if other != name}
            return self.number(source, local[name], others, steps - 1)
        if name in source.constants:
            return self.number(source, source.constants[name], None, steps - 1)
        module, inner = source.imports.get(name, ("", ""))
        there = self.get(module) if module and inner else None
        return self._named(there, inner, {}, steps - 1) if there and steps > 1 else None


@functools.cache
def nodes(tree: ast.AST) -> list[ast.AST]:
    """A node and all in it, in the order of `ast.walk`: they are walked often."""
    found = [tree]
    for node in found:
        found += children(node)
    return found


@functools.cache
def children(node: ast.AST) -> list[ast.AST]:
    """As `ast.iter_child_nodes`, but for whether a name is read or set."""
    found = []
    for name in node._fields:
        value = getattr(node, name, None)
        if isinstance(value, list):
            found += [one for one in value if isinstance(one, ast.AST)]
        elif isinstance(value, ast.AST) and name != "ctx":
            found.append(value)
    return found


def statements(tree: ast.AST) -> Iterator[ast.AST]:
    """All statements in it, without their expressions."""
    for field in ("body", "orelse", "handlers", "finalbody", "cases"):
        inner = getattr(tree, field, None)
        for one in inner if isinstance(inner, list) else ():
            yield one
            yield from statements(one)


@functools.cache
def assignments(tree: ast.AST) -> tuple[tuple[ast.expr, ast.expr], ...]:
    """All targets in it, with what each gets."""
    return tuple(pair for node in nodes(tree) for pair in pairs(node))


def is_start(name: str) -> bool:
    """Pytest reads it by itself."""
    return name.rpartition(".")[2].startswith("test_") or name.endswith("conftest")


def is_marked(expression: ast.expr | None, constants: Locals) -> bool:
    """It has a mark by which tests are left out: itself, or under a name of the file."""
    if expression is None:
        return False
    if isinstance(expression, ast.Call) and "parametrize" in ast.unparse(expression.func):
        return False  # the marks are those of some parameters
    text = ast.unparse(expression)
    if isinstance(expression, ast.Name) and expression.id in constants:
        return is_marked(constants[expression.id], {})
    return any(mark in text for mark in LEFT_OUT_MARKS)


def assigned(statements: list[ast.stmt]) -> Locals:
    """Names to expressions, of these statements alone."""
    found: Locals = {}
    for statement in statements:
        for target, value in pairs(statement):
            if isinstance(target, ast.Name):
                found[target.id] = value
    return found


def pairs(node: ast.AST) -> Iterator[tuple[ast.expr, ast.expr]]:
    """Targets and what is assigned to each. A tuple is taken apart."""
    targets: list[ast.expr] = []
    value: ast.expr | None = None
    match node:
        case ast.Assign():
            targets, value = node.targets, node.value
        case ast.AnnAssign(value=ast.expr()) | ast.NamedExpr() | ast.AugAssign():
            targets, value = [node.target], node.value
    for target in targets:
        assert value is not None
        if isinstance(target, ast.Tuple) and isinstance(value, ast.Tuple) and len(target.elts) == len(value.elts):
            yield from zip(target.elts, value.elts, strict=True)
        else:
            yield target, value


def defaults(function: ast.AST) -> Locals:
    """Parameters of a function and of those inside it, to their defaults."""
    found: Locals = {}
    for node in nodes(function):
        if isinstance(node, Function):
            arguments = node.args
            plain = [*arguments.posonlyargs, *arguments.args]
            found |= {a.arg: d for a, d in zip(reversed(plain), reversed(arguments.defaults), strict=False)}
            found |= {a.arg: d for a, d in zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True) if d}
    return found


def local_values(function: ast.AST) -> Locals:
    """Names of a function that are assigned once, and the defaults of its parameters."""
    found: Locals = {}
    often: set[str] = set()
    for target, value in assignments(function):
        if isinstance(target, ast.Name):
            often |= {target.id} & found.keys()
            found[target.id] = value
    return defaults(function) | {name: value for name, value in found.items() if name not in often}
