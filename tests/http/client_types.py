"""Values of the types that OpenAI's and Anthropic's clients publish for what can be sent, made by reflection."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from os import PathLike
from types import NoneType, UnionType
from typing import IO, Annotated, Any, Literal, NotRequired, Required, Union, get_args, get_origin, get_type_hints

from typing_extensions import is_typeddict

_PLAIN: dict[Any, Any] = {str: "text", int: 1, float: 1.0, bool: True, object: {"a": 1}, Any: {"a": 1}, NoneType: None}
_MARKS = (Annotated, Required, NotRequired)


def options(kind: Any) -> Iterator[Any]:
    """The members of a union, of unions in it too."""
    origin = get_origin(kind)
    if origin in _MARKS:
        yield from options(get_args(kind)[0])
    elif origin in (Union, UnionType):
        for one in get_args(kind):
            yield from options(one)
    else:
        yield kind


def values(kind: Any, levels: int = 4) -> Iterator[Any]:
    """Values of a type: of a typed dict one with its required members, one with all, and one for each further option.

    A member has its first value; each option of a member that is a union of typed dicts has a value of its own.
    """
    for one in options(kind):
        yield from _values(one, levels)


def _values(kind: Any, levels: int) -> Iterator[Any]:
    origin = get_origin(kind)
    if origin is Literal:
        yield from get_args(kind)
    elif kind in _PLAIN:
        yield _PLAIN[kind]
    elif is_typeddict(kind):
        yield from _dicts(kind, levels)
    elif isinstance(origin, type) and issubclass(origin, Mapping):
        yield {"a": 1}
    elif isinstance(origin, type) and issubclass(origin, Iterable | Sequence):
        yield from ([one] for one in values(get_args(kind)[0], levels))
    elif hasattr(kind, "model_fields") or (origin or kind) in (IO, PathLike):  # of these the dump or the text is sent
        return
    else:
        raise AssertionError(f"no value of {kind}")


def _dicts(kind: Any, levels: int) -> Iterator[dict[str, Any]]:
    if not levels:
        yield {}
        return
    hints = get_type_hints(kind, include_extras=True)
    by_name = {name: [*values(hint, levels - 1)] for name, hint in hints.items()}
    by_name = {name: given for name, given in by_name.items() if given}
    needed = {name for name, hint in hints.items() if get_origin(hint) is Required} | set(kind.__required_keys__)
    first = {name: given[0] for name, given in by_name.items()}
    yield {name: one for name, one in first.items() if name in needed}
    yield first
    for name, given in by_name.items():
        for one in given[1:]:
            yield first | {name: one}
