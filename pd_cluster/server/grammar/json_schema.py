"""JSON schemas as llguidance gets them: without what refuses no answer, and with the blanks that models write.

llguidance refuses a schema for each format and for some keywords that it does not implement, whether or not they bind.
By JSON Schema 2020-12 an unknown format (7.2.1 of Validation) and an unknown keyword (4.3.1 of Core) are annotations.
"""

from __future__ import annotations

import math
import re
from typing import Any
from urllib.parse import unquote


def _words(text: str) -> frozenset[str]:
    return frozenset(text.split())


# What models have learned. A blank that may repeat is repeated by weak models. Without any, a model of 135M parameters
# had 18 of 36 fields right instead of 26
ONE_BLANK = {"whitespace_flexible": False, "key_separator": ": ?", "item_separator": ", ?"}
_NO_BLANK = {"whitespace_flexible": False}
MAX_LEVELS = 128  # llguidance reads no more, and functions here recurse by level
TOO_DEEP = f"the schema is nested more than {MAX_LEVELS} levels deep"
# Formats that llguidance holds strings to
FORMATS = _words("date-time time date duration email hostname ipv4 ipv6 uuid uri")
_DRAFTS = frozenset(
    ["https://json-schema.org/draft/2020-12/schema", "https://json-schema.org/draft/2019-09/schema"]
    + [f"http://json-schema.org/draft-0{number}/schema" for number in (4, 6, 7)]
)
_ALL_TYPES = _words("null boolean number integer string array object")
# Keywords that may refuse a value, and the types of such values
BINDING: dict[str, frozenset[str]] = {
    keyword: _words(types) or _ALL_TYPES
    for types, keywords in {
        "string": "minLength maxLength pattern format",
        "number integer": "minimum maximum exclusiveMinimum exclusiveMaximum multipleOf",
        "array": "items prefixItems additionalItems minItems maxItems uniqueItems contains minContains maxContains "
        "unevaluatedItems",
        "object": "properties patternProperties additionalProperties required minProperties maxProperties "
        "propertyNames dependentRequired dependentSchemas dependencies unevaluatedProperties",
        "": "type enum const allOf anyOf oneOf not if then else $ref $dynamicRef $recursiveRef",
    }.items()
    for keyword in keywords.split()
}
_NAMES = _words("$schema $id id $anchor $dynamicAnchor $recursiveAnchor")
STRUCTURE = _NAMES | {"$defs", "definitions"}  # what references need
# Also of OpenAPI. `nullable` widens: an answer without null is right too
_ANNOTATIONS = _words(
    "title description default examples example deprecated readOnly writeOnly contentEncoding contentMediaType "
    "contentSchema nullable discriminator xml externalDocs $comment $vocabulary"
)
_NESTED = _words(  # a schema, or a list of schemas
    "items prefixItems additionalItems contains unevaluatedItems additionalProperties propertyNames "
    "unevaluatedProperties allOf anyOf oneOf not if then else"
)
_NAMED = _words("properties patternProperties dependentSchemas dependencies $defs definitions")
_COUNTS = _words("minLength maxLength minItems maxItems minContains maxContains minProperties maxProperties")
_REFERENCES = ("$ref", "$dynamicRef", "$recursiveRef")
_DECIDING = ("then", "else", "if", "contains", "minContains", "maxContains")  # each about those after it
_LARGEST = 2**63 - 1024  # as a double: llguidance writes no number beyond it
_LOOK_AROUND = re.compile(r"\(\?<?[=!]")  # regexes of llguidance have none


def pruned(schema: dict[str, Any], *, strict: bool) -> dict[str, Any]:
    """The schema without keywords and formats that refuse no value: the same values fit, or fewer.

    `strict`: keep formats and keywords that are unknown. Raises ValueError for a schema that is too deep.
    """
    left = _Pruner(schema, strict=strict).schema(schema)
    return left if isinstance(left, dict) else schema


def guided(schema: dict[str, Any], theirs: Any, *, coerces_one_of: bool, blanks: bool = True) -> dict[str, Any]:
    """The schema with options of llguidance: the client's (`x-guidance`), and ours where it names none.

    A client that says how blanks are read gets llguidance's own separators for those that it does not give.
    """
    if not isinstance(theirs, dict | None):
        raise ValueError("x-guidance must be an object")
    theirs = theirs or {}
    says = theirs.keys() & {"whitespace_flexible", "whitespace_pattern"}
    ours = {} if says else ONE_BLANK if blanks else _NO_BLANK
    return schema | {"x-guidance": {"coerce_one_of": coerces_one_of} | ours | theirs}


class _Pruner:
    """Prunes one schema. Members that a JSON pointer of a reference goes through stay, whatever they are."""

    def __init__(self, root: dict[str, Any], *, strict: bool) -> None:
        self._root, self._strict = root, strict
        self._begins: dict[tuple[str, int], list[Any]] = {}  # of the pointer of each reference, by its resource
        self._resources: dict[str, list[Any]] = {}  # what pointers begin at, by the last part of its `$id`
        self._scoped: set[int] = set()  # ids of objects in which an `$id` would count
        self._is_dynamic = False
        self._scan(root, root, 0)
        self._references = {reference for reference, _ in self._begins}
        self._are_local = all(reference.startswith("#") for reference in self._references)
        self._steps: set[tuple[int, str]] = set()  # members on the way of a pointer, which stay
        self._targets: set[int] = set()
        for (reference, _), begins in self._begins.items():
            self._follow(unquote(reference.partition("#")[2]), begins)

    def _scan(self, node: Any, resource: Any, level: int) -> bool:
        """Note the references in a value, which is part of this resource. -> whether it has any, or an anchor."""
        if level > MAX_LEVELS:
            raise ValueError(TOO_DEEP)
        if not isinstance(node, dict | list):
            return False
        if isinstance(node, dict) and isinstance(name := node.get("$id"), str) and not name.startswith("#"):
            resource = node
            self._resources.setdefault(_last_part(name), []).append(node)
        inner = node.values() if isinstance(node, dict) else node
        found = [self._scan(member, resource, level + 1) for member in inner]
        is_scoped = any(found)
        if isinstance(node, dict):
            own = {key: value for key in _REFERENCES if isinstance(value := node.get(key), str)}
            for reference in own.values():
                named = self._resources.setdefault(_last_part(reference.partition("#")[0]), [])
                self._begins[reference, id(resource)] = [resource, self._root] if reference[:1] == "#" else named
            self._is_dynamic = self._is_dynamic or bool(own.keys() - {"$ref"})
            is_scoped = is_scoped or bool(own or node.keys() & {"$anchor", "$dynamicAnchor"})
        if is_scoped:
            self._scoped.add(id(node))
        return is_scoped

    def _follow(self, pointer: str, begins: list[Any]) -> None:
        for node in begins if pointer.startswith("/") else ():
            steps = [step.replace("~1", "/").replace("~0", "~") for step in pointer[1:].split("/")]
            target: Any = node
            for step in steps:
                self._steps.add((id(target), step))
                target = _at(target, step)
            self._targets.add(id(target))

    def schema(self, schema: Any) -> Any:
        if isinstance(schema, list):
            return [self.schema(one) for one in schema]
        if not isinstance(schema, dict):
            return schema
        left = {
            key: self._member(key, value)
            for key, value in schema.items()
            if (id(schema), key) in self._steps or self._may_bind(key, value, schema)
        }
        if "$dynamicAnchor" in left and not self._is_dynamic:  # then it is an anchor as any other
            left = {"$anchor": left.pop("$dynamicAnchor")} | left
        for key in dict.fromkeys((*_DECIDING, *left)):
            if key in left and (id(schema), key) not in self._steps and _is_idle(key, left):
                del left[key]
        return False if _is_free(left.get("not")) and not left.keys() & STRUCTURE else left

    def _may_bind(self, key: str, value: Any, schema: dict[str, Any]) -> bool:
        """Whether a keyword can matter at its place, as far as one sees without its own schemas."""
        if key in _NAMES:
            return self._names(key, value, schema)
        types = BINDING.get(key)
        if types is None:
            return key in STRUCTURE or (self._strict and not (key in _ANNOTATIONS or key.startswith("x-")))
        here = schema.get("type")
        here = {one for one in here if isinstance(one, str)} if isinstance(here, list) else {here}
        if here <= _ALL_TYPES and not here & types:
            return False
        if self._strict:
            return True
        if key == "format" and isinstance(value, str):
            return value in FORMATS
        if key == "required" and isinstance(value, bool):  # of draft 3, about the object around it
            return False
        return value is not None or key == "const"

    def _names(self, key: str, value: Any, schema: dict[str, Any]) -> bool:
        """Whether a reference may need the name that the keyword gives to its schema."""
        if key == "$schema":
            return isinstance(value, str) and value.rstrip("#") in _DRAFTS
        if key == "$recursiveAnchor":
            return self._is_dynamic
        if not isinstance(value, str):
            return False
        if key not in ("$id", "id") or value in self._references:
            return True
        if value.startswith("#"):
            return False
        return not self._are_local or (schema is not self._root and id(schema) in self._scoped)

    def _member(self, key: str, value: Any) -> Any:
        if key in _NESTED:
            left = self.schema(value)
            return left if self._strict or key not in ("anyOf", "oneOf") else self._followed(value, left)
        if key in _NAMED and isinstance(value, dict):
            return {name: self.schema(one) for name, one in value.items()}
        return _number(key, value) if key in BINDING or key in STRUCTURE else self._loose(value)

    def _followed(self, given: Any, left: Any) -> Any:
        """The alternatives without those of a pattern that llguidance cannot read, if others are left.

        Pydantic writes a Decimal as a number or as such a string.
        """
        if not isinstance(left, list) or any((id(given), str(at)) in self._steps for at in range(len(left))):
            return left
        patterns = (one.get("pattern") if isinstance(one, dict) else None for one in left)
        known = [one for one, said in zip(left, patterns, strict=True) if not _LOOK_AROUND.search(str(said or ""))]
        return known or left

    def _loose(self, node: Any) -> Any:
        """The value of an unknown keyword: only references say what in it is a schema."""
        if id(node) in self._targets:
            return self.schema(node)
        if isinstance(node, dict):
            return {key: self._loose(value) for key, value in node.items()}
        return [self._loose(value) for value in node] if isinstance(node, list) else node


def _is_idle(key: str, schema: dict[str, Any]) -> bool:
    """Whether the keyword refuses nothing beside the others. Those in it have been left out already."""
    value = schema[key]
    match key:
        case "then" | "else":
            return "if" not in schema or _is_free(value)
        case "if":
            return not schema.keys() & {"then", "else"}
        case "contains":
            return schema.get("minContains") == 0 and "maxContains" not in schema
        case "minContains" | "maxContains":
            return "contains" not in schema
        case "not":
            return value is False
        case "uniqueItems":
            return value is False or schema.get("maxItems") in (0, 1)
        case "unevaluatedProperties":  # `additionalProperties` evaluates all that there are
            return _is_free(value) or "additionalProperties" in schema
        case "unevaluatedItems":
            return _is_free(value) or isinstance(schema.get("items"), dict | bool)
        case "propertyNames":
            return _is_free(value) or (isinstance(value, dict) and all(_fits_names(*one) for one in value.items()))
        case "dependentRequired" | "dependentSchemas" | "dependencies":
            needed = _list(schema.get("required"))
            return isinstance(value, dict) and all(
                all(name in needed for name in one) if isinstance(one, list) else _is_free(one)
                for one in value.values()
            )
        case "minLength" | "minItems":
            return value == 0 and value is not False
        case "minProperties":
            return isinstance(value, int) and value <= len({str(one) for one in _list(schema.get("required"))})
        case "maxProperties":
            return isinstance(value, int) and _most_members(schema) <= value
        case "pattern":
            return value in ("", ".*", "^.*")
    return False


def _last_part(name: str) -> str:
    return name.rstrip("#").rpartition("/")[2]


def _list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []


def _most_members(schema: dict[str, Any]) -> float:
    """The most members that an object of the schema can have, as far as its own keywords say."""
    if schema.get("additionalProperties") is not False or "patternProperties" in schema:
        return math.inf
    properties = schema.get("properties")
    return len(properties) if isinstance(properties, dict) else 0


def _is_free(schema: Any) -> bool:
    return schema is True or (isinstance(schema, dict) and schema.keys() <= STRUCTURE)


def _fits_names(key: str, value: Any) -> bool:
    """Whether every string fits the keyword."""
    if key == "type":
        return value == "string" or (isinstance(value, list) and "string" in value)
    return key in STRUCTURE or "string" not in BINDING.get(key, _ALL_TYPES)


def _number(key: str, value: Any) -> Any:
    """The value of a keyword as llguidance reads it: a count as an integer, a bound within its range."""
    if isinstance(value, float) and key in _COUNTS and value.is_integer():
        return int(value)
    if isinstance(value, int | float) and key in ("minimum", "exclusiveMinimum"):
        return value if value >= -_LARGEST else -_LARGEST
    if isinstance(value, int | float) and key in ("maximum", "exclusiveMaximum"):
        return value if value <= _LARGEST else _LARGEST
    return value


def _at(node: Any, step: str) -> Any:
    if isinstance(node, dict):
        return node.get(step)
    is_index = isinstance(node, list) and step.isdecimal() and len(step) < 6 and int(step) < len(node)
    return node[int(step)] if is_index else None
