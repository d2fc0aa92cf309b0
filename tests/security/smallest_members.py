"""Bodies of `size` bytes of the smallest member that a list or an object can have, at each place of each API's body.

Bytes say little of a server's work: 8 MB are one prompt, or 2.7 million empty objects. The places are found in the
structs of the bodies by reflection, so a field that is new tomorrow is one of them. Where a struct says `Any`, as at
messages and schemas, TEMPLATES name the places.
"""

from __future__ import annotations

import re
from functools import lru_cache
from typing import TYPE_CHECKING, Any, NamedTuple

from msgspec import inspect

from pd_cluster.server.routes.openapi import BODIES
from pd_http.endpoints import ENDPOINTS

if TYPE_CHECKING:
    from collections.abc import Iterator

LISTED = (b"{}", b"[]", b"0", b'""', b"null", b'{"a":[]}', b'"%d"')
NAMED = (b'"a":0', b'"a":{}', b'"%d":0', b'"%d":[]')  # %d: a number, so that all of them differ
TEXTS = (b"[,", b"},{", b'\\"', b"\\u00e9", b"\\\\")  # marks of JSON, which are none in a text
DEPTH = b"depth"  # a list in a list in a list
_LIMITS = ("max_tokens", "max_output_tokens")  # of answers: what is served is to end soon
_EXAMPLES = {
    "messages": b'[{"role":"user","content":"a"}]', "prompt": b'"a"', "input": b'"a"', "role": b'"user"',
    "max_tokens": b"1", "max_output_tokens": b"1", "sampling": b"{}", "documents": b'["a"]', "tokens": b"[5]",
}  # fmt: skip
_SCHEMA = (
    "{<named>}", '{"type":"object","properties":{<named>}}', '{"type":"object","required":[<listed>]}',
    '{"enum":[<listed>]}', '{"anyOf":[<listed>]}', '{"$defs":{<named>},"type":"object"}',
    '{"type":"object","properties":{"a":{"type":"array","items":{<named>}}}}',
)  # fmt: skip
_PARTS = (
    '{"role":"user","content":[<listed>]}', '{"role":"user","content":[{"type":"text","text":"a",<named>}]}',
    '{"role":"user","content":"a",<named>}',
)  # fmt: skip
_CALL = '{"role":"assistant","tool_calls":[{"id":"a","type":"function","function":{"name":"a","arguments":%s}}]}'
# By field: what its value is to hold. <item>: the field's own smallest entries that are served
TEMPLATES: dict[str, tuple[str, ...]] = {
    "messages": tuple(
        f"[{one}]"
        for one in (
            *_PARTS, '{"role":"assistant","tool_calls":[<listed>]}', _CALL % "{<named>}", _CALL % "[<listed>]",
            '{"role":"tool","tool_call_id":"a","content":[<listed>]}',
            '{"role":"assistant","content":"a","reasoning_details":[<listed>]}',
            '{"role":"assistant","content":[{"type":"tool_use","id":"a","name":"a","input":{<named>}}]}',
        )
    ),
    "input": tuple(
        f"[{one}]" for one in (*_PARTS, '{"type":"function_call_output","call_id":"a","output":[<listed>]}')
    ),
    "tools": tuple(
        f"[{form % schema}]"
        for schema in _SCHEMA
        for form in ('{"type":"function","function":{"name":"a","parameters":%s}}', '{"name":"a","input_schema":%s}')
    ),
    **dict.fromkeys(("schema", "json", "guided_json", "json_schema"), _SCHEMA),
}  # fmt: skip
ITEMS: dict[str, tuple[bytes, ...]] = {
    "messages": (
        b'{"role":"user","content":"a"}',
        b'{"role":"assistant","tool_calls":[{"function":{"name":"a","arguments":"{}"}}]}',
        b'{"role":"user","content":[{"type":"text","text":"a"}]}',
    ),
    "input": (b'{"role":"user","content":"a"}', b'{"type":"function_call","call_id":"a","name":"a","arguments":""}'),
    "tools": (b'{"type":"function","function":{"name":"a"}}', b'{"name":"a","input_schema":{"type":"object"}}'),
}


class Place(NamedTuple):
    """A list or an object of a body. `begin`, `end`: the body around its members, which are one of `members`."""

    path: str  # of the endpoint
    name: str
    begin: bytes
    end: bytes
    members: tuple[bytes, ...]

    def body(self, member: bytes, size: int) -> bytes:
        """A body with `size` bytes of `member`."""
        return self.begin + repeated(member, size) + self.end


class Body(NamedTuple):
    """A request of the attack, built when it is sent: all of them are GB. `name`: in figures and errors."""

    name: str
    place: Place
    member: bytes
    size: int

    @property
    def path(self) -> str:
        """Of the endpoint."""
        return self.place.path

    def data(self) -> bytes:
        """What is sent."""
        return self.place.body(self.member, self.size)


@lru_cache(maxsize=32)
def repeated(member: bytes, size: int) -> bytes:
    """`size` bytes of members, at least two of them."""
    if member == DEPTH:
        return b"[" * (size // 2) + b"]" * (size // 2)
    if member in TEXTS:
        return member * (size // len(member))
    if b"%d" not in member:
        return b",".join([member] * max(2, size // (len(member) + 1)))
    return b",".join([member % number for number in range(max(2, size // (len(member) + 5)))])


def places() -> list[Place]:
    """Of all bodies that a node reads. APIs that read the same struct count once."""
    found: dict[Any, list[Place]] = {}
    for one in ENDPOINTS:
        if (body := BODIES.get(one.name)) is not None and body not in found:
            found[body] = list(_of_body(one.path, body))
    return [place for of_body in found.values() for place in of_body]


def _of_body(path: str, kind: type) -> Iterator[Place]:
    shape: Any = inspect.type_info(kind)
    required = _required(shape)
    yield Place(path, "unknown fields", b"{" + required, b"}", NAMED)
    for name, inner in (("metadata", _ANY), ("unknown", _ANY)):
        yield from _of_value(path, name, inner, b"{" + required + b'"%b":' % name.encode(), b"}")
    yield Place(path, "a text", b"{" + required + b'"user":"', b'"}', TEXTS)
    for field in shape.fields:
        name, others = field.encode_name, _required(shape, field.encode_name)
        yield from _of_value(path, name, field.type, b"{" + others + b'"%b":' % name.encode(), b"}")


def _of_value(path: str, name: str, shape: Any, begin: bytes, end: bytes) -> Iterator[Place]:
    """Places in a value of this type. `begin`, `end`: what stands around the value."""
    field = name.rpartition(".")[2]
    for template in TEMPLATES.get(field, ()):
        before, kind, after = re.split("<(listed|named)>", template)
        members = LISTED if kind == "listed" else NAMED
        yield Place(path, f"{name} {template}", begin + before.encode(), after.encode() + end, members)
    yield from _of_shape(path, name, shape, begin, end, ITEMS.get(field, ()))


def _of_shape(
    path: str, name: str, shape: Any, begin: bytes, end: bytes, items: tuple[bytes, ...] = ()
) -> Iterator[Place]:
    if isinstance(shape, inspect.UnionType):
        for one in shape.types:
            yield from _of_shape(path, name, one, begin, end, items)
    elif isinstance(shape, inspect.Metadata):
        yield from _of_shape(path, name, shape.type, begin, end, items)
    elif isinstance(shape, inspect.AnyType | inspect.RawType):
        yield Place(path, f"{name}[]", begin + b"[", b"]" + end, (*LISTED, DEPTH, *items))
        yield Place(path, f"{name}[][]", begin + b"[[", b"]]" + end, LISTED)
        yield Place(path, f"{name}{{}}", begin + b"{", b"}" + end, NAMED)
        yield Place(path, f"{name} as text", begin + b'"', b'"' + end, TEXTS)
    elif isinstance(shape, inspect.ListType | inspect.VarTupleType | inspect.SetType):
        yield Place(path, f"{name}[]", begin + b"[", b"]" + end, (*LISTED, DEPTH, *items))
        yield from _of_shape(path, f"{name}[]", shape.item_type, begin + b"[", b"]" + end)
    elif isinstance(shape, inspect.TupleType):
        yield Place(path, f"{name}[]", begin + b"[", b"]" + end, LISTED)
    elif isinstance(shape, inspect.DictType):
        yield Place(path, f"{name}{{}}", begin + b"{", b"}" + end, NAMED)
        yield from _of_shape(path, f"{name}.a", shape.value_type, begin + b'{"a":', b"}" + end)
    elif isinstance(shape, inspect.StructType) and not shape.array_like:
        yield Place(path, f"{name} of {shape.cls.__name__}", begin + b"{" + _required(shape), b"}" + end, NAMED)
        for field in shape.fields:
            others = b"{" + _required(shape, field.encode_name) + b'"%b":' % field.encode_name.encode()
            yield from _of_value(path, f"{name}.{field.encode_name}", field.type, begin + others, b"}" + end)


_ANY = inspect.AnyType()


def _required(shape: Any, without: str = "") -> bytes:
    """The members that the struct must have, but for one, each with a comma after it."""
    members = [] if shape.tag_field is None else [b'"%b":"%b"' % (shape.tag_field.encode(), str(shape.tag).encode())]
    members += [
        b'"%b":%b' % (one.encode_name.encode(), _example(one.encode_name, one.type))
        for one in shape.fields
        if one.encode_name != without and (one.required or one.encode_name in _LIMITS)
    ]
    return b"".join(member + b"," for member in members)


def _example(name: str, shape: Any) -> bytes:
    """A value of the type that is served, or nearly."""
    if name in _EXAMPLES:
        return _EXAMPLES[name]
    if isinstance(shape, inspect.UnionType):
        return _example(name, shape.types[0])
    if isinstance(shape, inspect.Metadata):
        return _example(name, shape.type)
    if isinstance(shape, inspect.LiteralType):
        return b'"%b"' % str(shape.values[0]).encode()
    if isinstance(shape, inspect.StructType):
        return b"{" + _required(shape).removesuffix(b",") + b"}"
    if isinstance(shape, inspect.ListType | inspect.VarTupleType):
        return b"[]"
    if isinstance(shape, inspect.DictType | inspect.AnyType | inspect.RawType):
        return b"{}"
    return b"1" if isinstance(shape, inspect.IntType | inspect.FloatType) else b'"a"'
