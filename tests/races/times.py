"""Which expressions of a function are times: moments of a clock, moments a while later, and spans between two."""

from __future__ import annotations

import ast
import functools
from dataclasses import dataclass
from enum import Enum, auto
from typing import TYPE_CHECKING

from tests.races.sources import Function, Sources, assignments, local_values, nodes

if TYPE_CHECKING:
    from tests.races.sources import Locals, Source

WALL = {"monotonic", "monotonic_ns", "perf_counter", "perf_counter_ns", "time_ns"}
USED = {"process_time", "process_time_ns", "thread_time", "thread_time_ns", "cpu_times", "getrusage"}  # spans of CPU
THROUGH = {
    "round", "abs", "min", "max", "sum", "float", "int", "sorted", "list", "tuple", "zip", "pairwise", "enumerate",
    "gather", "fmean", "mean", "median",
}  # fmt: skip
CLOCKS = WALL | USED | {"time"}
ROUNDS = 3  # a name may be assigned below its use in a loop, or from another function's result


class Kind(Enum):
    NOW = auto()
    LATER = auto()  # a moment and some seconds
    SPAN = auto()


@dataclass(frozen=True)
class Time:
    kind: Kind
    limit_s: float | None = None  # of LATER: how much later; of SPAN: what is left until then


class Spans:
    """Functions and attributes of the tests that are spans of time, by the file that defines them."""

    def __init__(self, sources: Sources) -> None:
        self.sources = sources
        self.words = set(CLOCKS)  # without one of them nothing is a time
        self.functions: dict[str, set[str]] = {}
        self.attributes: dict[str, set[str]] = {}
        self._changed: dict[str, int] = {}  # by file: the reading that found something in it last
        self._num_read = 0
        read_at: dict[str, int] = {}
        for _ in range(ROUNDS):
            for name, source in sources.tests.items():
                if self.words.isdisjoint(source.words(source.tree)):
                    continue
                if self._is_news(name, read_at.get(name, -1)):
                    read_at[name] = self._num_read
                    self._read(name, source)
                    self._num_read += 1

    def _is_news(self, name: str, read_at: int) -> bool:
        """A reading since this one, or that one itself, found something in a file that this file reaches."""
        if read_at < 0:
            return True
        return any(self._changed.get(one, -1) >= read_at for one in self.sources.reach(name))

    def _read(self, name: str, source: Source) -> None:
        for _, owner, unit in source.units:
            if not (times := Times(self, source, owner, unit)):
                continue
            self._add(self.attributes, name, times.span_attributes())
            for function in nodes(unit):
                if isinstance(function, Function) and times.gives_span(function):
                    is_property = any("property" in ast.unparse(one) for one in function.decorator_list)
                    self._add(self.attributes if is_property else self.functions, name, {function.name})

    def _add(self, kind: dict[str, set[str]], name: str, found: set[str]) -> None:
        known = kind.setdefault(name, set())
        if not found <= known:
            known |= found
            self.words |= found
            self._changed[name] = self._num_read
            self._reached.cache_clear()

    @functools.cache  # noqa: B019 (one object a run)
    def _reached(self, name: str) -> tuple[set[str], set[str]]:
        """Functions and attributes that are spans in the files that this one reaches."""
        files = self.sources.reach(name)
        functions, attributes = (
            set[str]().union(*(kind[one] for one in files & kind.keys())) for kind in (self.functions, self.attributes)
        )
        return functions, attributes

    def is_function(self, source: Source, name: str) -> bool:
        """A function of this name, of this file or imported, gives a span."""
        if name in self.functions.get(source.name, ()):
            return True
        module, inner = source.imports.get(name, ("", ""))
        return inner in self.functions.get(module, ())

    def is_method(self, source: Source, name: str) -> bool:
        """A method of this name, of a file that this one reaches, gives a span."""
        return name in self._reached(source.name)[0]

    def is_attribute(self, source: Source, name: str) -> bool:
        """Something of this name, of a file that this one reaches, is a span."""
        return name in self._reached(source.name)[1]


class Times:
    """The times of one function, or of the rest of a file."""

    def __init__(self, spans: Spans, source: Source, owner: ast.ClassDef | None, unit: ast.AST) -> None:
        self._spans, self._source, self._unit = spans, source, unit
        self._named: dict[str, Time] = {}
        self._clocks: set[str] = set()
        self._may_be = not spans.words.isdisjoint(source.words(owner or unit))
        for _ in range(2 if self else 0):
            if owner is not None:
                self._learn(owner, only="self")
            self._learn(unit)
            self._learn_of_loops(unit)

    @functools.cached_property
    def local(self) -> Locals:
        return local_values(self._unit)

    def __bool__(self) -> bool:
        """There may be some."""
        return self._may_be

    def _learn(self, tree: ast.AST, only: str = "") -> None:
        for target, value in assignments(tree):
            if only and not (isinstance(target, ast.Attribute) and ast.unparse(target.value) == only):
                continue
            if self._is_clock(value):
                self._clocks.add(ast.unparse(target))
            elif time := self.of(value):
                names = target.elts if isinstance(target, ast.Tuple) else [target]
                self._named |= {ast.unparse(one): time for one in names}

    def _learn_of_loops(self, tree: ast.AST) -> None:
        for node in nodes(tree):
            match node:
                case ast.Call(func=ast.Attribute(value=holder, attr="append"), args=[value]):
                    if time := self.of(value):
                        self._named.setdefault(ast.unparse(holder), time)
                case ast.For(target=target, iter=values) | ast.comprehension(target=target, iter=values):
                    if time := self.of(values):
                        names = target.elts if isinstance(target, ast.Tuple) else [target]
                        self._named |= {ast.unparse(one): time for one in names}

    def of(self, expression: ast.expr | None) -> Time | None:
        """What kind of time an expression is."""
        if not self:
            return None
        match expression:
            case ast.Call(func=function, args=arguments):
                return self._called(function, arguments)
            case ast.Await(value=inner) | ast.Starred(value=inner) | ast.NamedExpr(value=inner):
                return self.of(inner)
            case ast.GeneratorExp(elt=inner) | ast.ListComp(elt=inner) | ast.UnaryOp(operand=inner):
                return self.of(inner)
            case ast.Subscript(value=inner):
                return self.of(inner)
            case ast.IfExp(body=first, orelse=second):
                return self.of(first) or self.of(second)
            case ast.List(elts=values) | ast.Tuple(elts=values):
                return next(filter(None, map(self.of, values)), None)
            case ast.Name(id=name):
                return self._named.get(name)
            case ast.Attribute(attr=attribute):
                is_own = attribute.startswith("_")
                found = self._named.get(ast.unparse(expression))
                return found or (
                    Time(Kind.SPAN) if not is_own and self._spans.is_attribute(self._source, attribute) else None
                )
            case ast.BinOp(left=left, op=op, right=right):
                return self._reckoned(left, op, right)
        return None

    def _called(self, function: ast.expr, arguments: list[ast.expr]) -> Time | None:
        name = function.attr if isinstance(function, ast.Attribute) else ast.unparse(function)
        if self._is_clock(function):
            return Time(Kind.SPAN if name in USED else Kind.NOW)
        if name in THROUGH:
            return next(filter(None, map(self.of, arguments)), None)
        if isinstance(function, ast.Name) and self._spans.is_function(self._source, name):
            return Time(Kind.SPAN)
        if isinstance(function, ast.Attribute) and self._spans.is_method(self._source, name):
            return Time(Kind.SPAN)
        return None

    def _is_clock(self, expression: ast.expr) -> bool:
        match expression:
            case ast.Attribute(value=ast.Name(id="time"), attr="time"):
                return "time" in self._source.imports
            case ast.Attribute(value=owner, attr="time"):
                return "loop" in ast.unparse(owner)
            case ast.Attribute(value=ast.Name(id="time"), attr=name):
                return name in WALL | USED
            case ast.Attribute(attr=name):
                return name in USED
            case ast.Name(id=name):
                return self._source.imports.get(name, ("",))[0] == "time" or name in self._clocks
        return False

    def _reckoned(self, left: ast.expr, op: ast.operator, right: ast.expr) -> Time | None:
        first, second = self.of(left), self.of(right)
        if not (first or second):
            return None
        if isinstance(op, ast.Add):
            moment, more = (first, right) if first else (second, left)
            assert moment is not None
            if moment.kind is Kind.SPAN:
                return moment
            added = self._spans.sources.number(self._source, more, self.local)
            return Time(Kind.LATER, None if added is None else added + (moment.limit_s or 0.0))
        if isinstance(op, ast.Sub):
            if second is None:
                assert first is not None
                is_number = self._spans.sources.number(self._source, right, self.local) is not None
                return Time(Kind.LATER if is_number and first.kind is not Kind.SPAN else Kind.SPAN)
            return Time(Kind.SPAN, first.limit_s if first and first.kind is Kind.LATER else None)
        return Time(Kind.SPAN) if Kind.SPAN in {one.kind for one in (first, second) if one} else None

    def limit_s(self, expression: ast.expr) -> float | None:
        """How many seconds an expression allows: a number, or what is left until a moment."""
        if isinstance(expression, ast.Call) and ast.unparse(expression.func) in ("max", "min"):
            spans = [time for argument in expression.args if (time := self.of(argument))]
            if spans:
                return spans[0].limit_s
        time = self.of(expression)
        return time.limit_s if time else self._spans.sources.number(self._source, expression, self.local)

    def gives_span(self, function: Function) -> bool:
        """One of its results is a span of time."""
        results = [node.value for node in nodes(function) if isinstance(node, ast.Return)]
        return any(time.kind is Kind.SPAN and time.limit_s is None for time in map(self.of, results) if time)

    def span_attributes(self) -> set[str]:
        """Attributes that this code sets to a span, but for those of its own objects alone."""
        names = [name.rpartition(".") for name, time in self._named.items() if time.kind is Kind.SPAN]
        return {name for owner, _, name in names if owner and name.isidentifier() and not name.startswith("_")}
