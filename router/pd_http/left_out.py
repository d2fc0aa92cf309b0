"""What a request has and no answer here depends on: named in the header `x-pd-ignored`, counted by kind.

The policy, the same in every API:

    what a client sends                            what becomes of it
    ---------------------------------------------  ----------------------------------------------------------------
    a member or field that is not known            ignored and named: clients add some with every version
    a member of a *form* that is not known         400: it may bind the answer (`BindingForm`)
    a field that changes answers elsewhere         400, by the tables of `fields.py`
    a tool that the API's own servers run, or      left out and named; 400 if `tool_choice` requires it
    that has no schema
    a block or item with text                      shown as text, after its other members as JSON
    what a tool gave that is no text               shown as JSON, without what is encrypted
    `max_tokens` of Messages above the room        cut, and named: the API requires it
    a call and its result, of any tool             shown as a call and a result, or both are left out and named
    a block or item without text                   left out and named
    an image, audio, a file                        400: leaving it out would change the question
    an id that stands for stored state             400: nothing is stored
    a label of a client (`client_labels`)          left out and named

A name is the field, and the type or the member: `tools.web_search`, `tools[].output_schema`, `messages.text.colour`.
"""

from __future__ import annotations

from functools import lru_cache
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Final, Literal

import msgspec
from msgspec import inspect

if TYPE_CHECKING:
    from collections.abc import Mapping

Kind = Literal["field", "member", "tool", "block", "item", "label"]
KINDS: Final[tuple[Kind, ...]] = ("field", "member", "tool", "block", "item", "label")
MAX_NAMES = 1000
EMPTY: Final[Mapping[str, Any]] = MappingProxyType({})


class LeftOut(dict[str, Kind]):
    """Kinds by name. Clients choose the names, so there are at most MAX_NAMES."""

    def add(self, kind: Kind, name: str) -> None:
        if len(self) < MAX_NAMES:
            self[name] = kind


class BindingForm(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """The form of an answer: a member that is not known is refused."""


@lru_cache(maxsize=64)
def shape_of(kind: Any) -> inspect.Type:
    """The type `kind` as a tree for `known`."""
    return inspect.type_info(kind)


@lru_cache(maxsize=64)
def members_of(struct: Any) -> dict[str, inspect.Type]:
    """The types of its members, by name."""
    shape: Any = shape_of(struct)
    return {one.encode_name: one.type for one in shape.fields}


def known(value: Any, shape: inspect.Type, place: str, left_out: LeftOut) -> Any:
    """The value without members that are null, and without those that its structs do not have, which are named.

    Values without a struct (schemas, arguments of calls) stay as they are, and so do values of a wrong type.
    """
    if isinstance(shape, inspect.UnionType):
        return _known_one_of(value, shape.types, place, left_out)
    if isinstance(shape, inspect.ListType) and isinstance(value, list):
        return [known(one, shape.item_type, f"{place}[]", left_out) for one in value]
    if isinstance(shape, inspect.StructType) and isinstance(value, dict):
        return _known_members(value, shape, place, left_out)
    return value


def _known_one_of(value: Any, shapes: tuple[inspect.Type, ...], place: str, left_out: LeftOut) -> Any:
    for one in shapes:
        if isinstance(one, inspect.ListType) and isinstance(value, list):
            return known(value, one, place, left_out)
        if not isinstance(one, inspect.StructType) or not isinstance(value, dict):
            continue
        if one.tag_field is None or value.get(one.tag_field) == one.tag:
            return known(value, one, place, left_out)
    return value


def _known_members(value: dict[str, Any], shape: inspect.StructType, place: str, left_out: LeftOut) -> dict[str, Any]:
    members = members_of(shape.cls)
    if shape.tag is not None:
        place = f"{place.split('[')[0].split('.')[0]}.{shape.tag}"
    kept: dict[str, Any] = {}
    for name, one in value.items():
        if one is None:
            continue
        if name in members:
            kept[name] = known(one, members[name], f"{place}.{name}", left_out)
        elif name == shape.tag_field or issubclass(shape.cls, BindingForm):
            kept[name] = one
        else:
            left_out.add("member", f"{place}.{name}")
    return kept
