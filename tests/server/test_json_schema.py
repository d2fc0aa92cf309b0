"""What is left of a schema for llguidance: all that binds, and nothing that would be refused without binding."""

from __future__ import annotations

import enum
import json
import random
import uuid
from decimal import Decimal
from typing import Annotated, Any, Literal

import pydantic
import pytest

from pd_cluster.server.grammar.grammar_process import write
from pd_cluster.server.grammar.json_schema import BINDING, FORMATS, guided, pruned

llguidance = pytest.importorskip("llguidance")
VOCABULARY = llguidance.LLTokenizer("byte")
TEXT = {"type": "string"}


def grammar_of(schema: dict[str, Any], *, strict: bool = False) -> str:
    return write("json", json.dumps(schema), [], coerces_one_of=not strict, strict=strict)


def error_of(schema: dict[str, Any], *, strict: bool = False) -> str:
    """What llguidance says against a schema as a request sends it; "" if it takes it."""
    return str(llguidance.LLMatcher.validate_grammar(grammar_of(schema, strict=strict)))


def allows(grammar: str, *texts: str) -> list[bool]:
    start = llguidance.LLMatcher(VOCABULARY, grammar, log_level=0)
    assert not start.is_error(), start.get_error()
    matchers = [(start.deep_copy(), text) for text in texts]
    return [one.consume_tokens(VOCABULARY.tokenize_str(text)) and one.is_accepting() for one, text in matchers]


def test_known_formats_are_those_of_the_library() -> None:
    names = "idn-email idn-hostname uri-reference iri iri-reference uri-template json-pointer relative-json-pointer "
    names += "regex int32 int64 float double byte binary password uuid4 guid json-string duration-iso url phone color"
    for name in [*FORMATS, *names.split()]:
        said = llguidance.LLMatcher.validate_grammar(json.dumps({"grammars": [{"json_schema": {"format": name}}]}))
        assert (said == "") is (name in FORMATS), (name, said)
        assert error_of({"format": name}) == ""
        assert (error_of({"format": name}, strict=True) == "") is (name in FORMATS)
        assert pruned(TEXT | {"format": name}, strict=False) == (TEXT | {"format": name} if name in FORMATS else TEXT)


OF_OTHERS = {
    "title": "t", "description": 5, "default": {"format": "x"}, "examples": [{"not": {}}], "example": 1,
    "deprecated": True, "readOnly": True, "writeOnly": True, "contentEncoding": "base64", "contentMediaType": "a/b",
    "$comment": "c", "contentSchema": {"not": {}}, "x-order": 1, "xml": {}, "externalDocs": {"url": "u"},
    "nullable": True, "discriminator": {"propertyName": "a"}, "$vocabulary": {"v": True}, "$id": 5,
    "$schema": "https://example.com/own", "$recursiveAnchor": True, "x-guidance-like": {},
    "markdownDescription": "m", "defaultSnippets": [], "units": "m",
}  # fmt: skip
# schemas that refuse no more than what is left of them
IDLE: list[tuple[dict[str, Any], dict[str, Any]]] = [
    *((TEXT | {key: value}, TEXT) for key, value in OF_OTHERS.items()),
    ({"type": "integer", "format": "int32", "minLength": 2, "pattern": "("}, {"type": "integer"}),
    ({"type": ["string", "null"], "minimum": 1, "uniqueItems": True}, {"type": ["string", "null"]}),
    ({"type": "array", "uniqueItems": False, "unevaluatedItems": True}, {"type": "array"}),
    ({"uniqueItems": True, "maxItems": 1}, {"maxItems": 1}),
    ({"minContains": 0, "maxContains": 3}, {}),
    ({"contains": TEXT, "minContains": 0}, {}),
    ({"not": False, "if": TEXT, "propertyNames": {}}, {}),
    ({"if": TEXT, "then": True, "else": {"title": "t"}}, {}),
    ({"then": TEXT, "else": TEXT}, {}),
    ({"type": "object", "propertyNames": TEXT, "unevaluatedProperties": {}}, {"type": "object"}),
    ({"propertyNames": {"type": ["string", "null"], "format": "uuid4", "minimum": 1}}, {}),
    ({"dependentRequired": {}, "dependentSchemas": {"a": {"title": "t"}}, "dependencies": {"a": [], "b": True}}, {}),
    ({"dependentRequired": {"a": ["b"]}, "required": ["b"]}, {"required": ["b"]}),
    ({"additionalProperties": False, "unevaluatedProperties": False, "maxProperties": 2, "properties": {"a": {}}},
     {"additionalProperties": False, "properties": {"a": {}}}),
    ({"items": TEXT, "unevaluatedItems": False, "minItems": 0}, {"items": TEXT}),
    ({"type": "object", "properties": {"a": {"required": False}}, "minProperties": 1, "required": ["a"]},
     {"type": "object", "properties": {"a": {}}, "required": ["a"]}),
    ({"minLength": 0, "pattern": "", "items": None, "const": None}, {"const": None}),
    ({"properties": {"a": {"not": {}}, "b": {"type": "object", "not": True}}},  # zod's `never`
     {"properties": {"a": False, "b": False}}),
    ({"minLength": 2.0, "maxItems": 3.0}, {"minLength": 2, "maxItems": 3}),
    ({"$dynamicAnchor": "node", "items": {"$ref": "#node"}}, {"$anchor": "node", "items": {"$ref": "#node"}}),
    ({"$id": "a b", "items": {"$id": "http://[", "type": "null"}}, {"items": {"type": "null"}}),
    ({"anyOf": [{"type": "number"}, TEXT | {"pattern": "^(?!a)"}]}, {"anyOf": [{"type": "number"}]}),
    ({"properties": {"format": {"format": "x"}, "title": TEXT, "not": True}},
     {"properties": {"format": {}, "title": TEXT, "not": True}}),
    ({"enum": [{"format": "x", "title": 1}], "default": 1}, {"enum": [{"format": "x", "title": 1}]}),
    ({"const": {"format": "x", "x-a": None}}, {"const": {"format": "x", "x-a": None}}),
    ({"$ref": "#/components/schemas/a", "components": {"schemas": {"a": {"format": "x"}, "b": {"format": "x"}}}},
     {"$ref": "#/components/schemas/a", "components": {"schemas": {"a": {}, "b": {"format": "x"}}}}),
    ({"$ref": "#/x-a/1/b~1c%20d", "x-a": [1, {"b/c d": {"title": "t"}}], "x-b": 1},
     {"$ref": "#/x-a/1/b~1c%20d", "x-a": [1, {"b/c d": {}}]}),
]  # fmt: skip


@pytest.mark.long_cases
@pytest.mark.parametrize(("schema", "left"), IDLE, ids=lambda one: json.dumps(one)[:60])
def test_what_binds_nothing_goes(schema: dict[str, Any], left: dict[str, Any]) -> None:
    assert pruned(schema, strict=False) == left
    assert error_of(schema) == "" or "(?!" in json.dumps(schema)


PLACES: list[dict[str, Any]] = [
    *({key: [{}]} for key in ("allOf", "anyOf", "oneOf", "prefixItems", "items")),
    *({key: {}} for key in ("items", "additionalItems", "additionalProperties", "not", "contains", "propertyNames")),
    *({key: {}} for key in ("unevaluatedItems", "unevaluatedProperties")),
    *({key: {"a": {}}} for key in ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas")),
    {"dependencies": {"a": {}, "b": ["a"]}},
    {"if": {}, "then": {}, "else": {}},
    {"items": [{"anyOf": [{"properties": {"anyOf": {}}}]}]},
]


@pytest.mark.parametrize("place", PLACES, ids=json.dumps)
def test_every_place_of_a_schema_is_seen(place: dict[str, Any]) -> None:
    text, bound = json.dumps(place), '{"maxLength": 9}'
    given = json.loads(text.replace("{}", '{"format": "uuid4", "maxLength": 9, "title": "t"}'))
    assert pruned(given, strict=False) == json.loads(text.replace("{}", bound))


BOUND = {
    "not": TEXT, "uniqueItems": True, "contains": TEXT, "propertyNames": {"pattern": "^a"},
    "dependentRequired": {"a": ["b"]},
    "dependentSchemas": {"a": {"required": ["b"]}}, "dependencies": {"a": ["b"]}, "unevaluatedProperties": False,
    "unevaluatedItems": TEXT, "$dynamicRef": "#a", "$recursiveRef": "#",
}  # fmt: skip


@pytest.mark.parametrize("strict", [True, False])
def test_a_keyword_that_binds_and_is_not_known_is_named(strict: bool) -> None:
    for keyword, value in BOUND.items():
        assert keyword in BINDING
        assert pruned({keyword: value}, strict=strict) == {keyword: value}
        assert keyword in error_of({"properties": {"a": {keyword: value}}}, strict=strict), keyword
    assert "if" in error_of({"if": TEXT, "then": {"minLength": 1}}, strict=strict)
    assert "contains" in error_of({"contains": TEXT, "minContains": 0, "maxContains": 1}, strict=strict)


def test_strict_keeps_what_is_unknown() -> None:
    schema = TEXT | {"format": "uuid4", "frobnicate": 1, "pattern": None, "title": "t", "x-a": 1, "minimum": 1}
    assert pruned(schema, strict=True) == TEXT | {"format": "uuid4", "frobnicate": 1, "pattern": None}


@pytest.mark.parametrize("kind", ["integer", "number"])
def test_bounds_that_no_regex_can_have_are_tightened(kind: str) -> None:
    """As generators of C# and Java write them: the range of their type."""
    for low, high in ((-(2**63), 2**63 - 1), (0, 2**64 - 1), (-1.7976931348623157e308, 1.7976931348623157e308)):
        assert error_of({"type": kind, "minimum": low, "maximum": high}) == ""
        assert error_of({"type": kind, "exclusiveMinimum": low, "exclusiveMaximum": high}, strict=True) == ""
    assert error_of({"type": kind, "minimum": 2**70}) != "", "tighter than the regex can be"


def test_the_pass_is_bounded() -> None:
    deep: dict[str, Any] = {}
    for _ in range(127):
        deep = {"items": deep}
    assert pruned(deep, strict=False) == deep
    with pytest.raises(ValueError, match="nested more than 128 levels"):
        pruned({"items": deep, "a": {"items": {"items": deep}}}, strict=False)
    for pointer in ("#/", "#//", "#/%zz", "#/a/99999999999", "#/~2", "#/items/-1", "#/items/1", "##"):
        assert pruned({"$ref": pointer, "items": [{}]}, strict=False)["$ref"] == pointer


class Color(enum.StrEnum):
    RED = "red"


class Cat(pydantic.BaseModel):
    kind: Literal["cat"]
    lives: Annotated[int, pydantic.Field(ge=1, le=9)] = pydantic.Field(deprecated=True, examples=[9], default=9)


class Dog(pydantic.BaseModel):
    kind: Literal["dog"]
    friends: list[Pet] = []


class Pet(pydantic.BaseModel):
    pet: Annotated[Cat | Dog, pydantic.Field(discriminator="kind")]


class Everything(pydantic.BaseModel):
    """What Pydantic has of formats, notes and patterns."""

    model_config = pydantic.ConfigDict(json_schema_extra={"x-of-the-team": {"format": 1}}, title="all")

    key: uuid.UUID
    key1: pydantic.UUID1
    key4: pydantic.UUID4
    secret: pydantic.SecretStr
    raw: pydantic.Json[list[int]]
    data: bytes
    encoded: pydantic.Base64Bytes
    path: pydantic.FilePath
    network: pydantic.IPvAnyAddress
    price: Decimal
    rate: Annotated[Decimal, pydantic.Field(gt=0, max_digits=5)]
    pet: Pet
    color: Color = pydantic.Field(description="hue", json_schema_extra={"x-ui": "picker", "example": "red"})
    bag: dict[str, int]
    note: str | None = pydantic.Field(default=None, max_length=9, json_schema_extra={"readOnly": True})


@pytest.mark.parametrize("by_alias", [True, False])
def test_pydantic(by_alias: bool) -> None:
    assert error_of(Everything.model_json_schema(by_alias=by_alias)) == ""
    assert error_of(Everything.model_json_schema(mode="serialization")) == ""


# in the forms that zod (v3 and v4), schemars, springdoc, NSwag, MCP servers and jsonschema.net write
GENERATED: list[dict[str, Any]] = [
    {"$schema": "https://json-schema.org/draft/2020-12/schema", "type": "object", "properties": {
        "tags": {"type": "object", "propertyNames": TEXT, "additionalProperties": TEXT},
        "at": TEXT | {"format": "base64url", "contentEncoding": "base64url", "pattern": "^[A-Za-z0-9_-]*$"},
        "n": {"type": "integer", "exclusiveMinimum": 0, "maximum": 9007199254740991}},
     "required": ["at"], "additionalProperties": False},
    {"$schema": "http://json-schema.org/schema#", "title": "T", "type": "object", "properties": {
        "a": {"type": "integer", "format": "uint64", "minimum": 0.0},
        "b": {"type": ["number", "null"], "format": "double"}}},
    {"type": "object", "properties": {
        "when": TEXT | {"format": "partial-time", "nullable": True, "example": "1", "xml": {"name": "w"}},
        "blob": TEXT | {"format": "byte"}, "pass": TEXT | {"format": "password", "writeOnly": True},
        "ref": {"$ref": "#/components/schemas/Node", "description": "d"}},
     "components": {"schemas": {"Node": {"type": "object", "properties": {
         "children": {"type": "array", "uniqueItems": False,
                      "items": {"$ref": "#/components/schemas/Node", "deprecated": True}},
         "id": TEXT | {"format": "objectid"}}}}}},
    {"$schema": "https://json-schema.org/draft-07/schema#", "$id": "http://example.com/example{1}.json",
     "type": "object", "properties": {"name": {"$id": "#/properties/name", "format": "hostname-or-ip",
                             "type": "string", "default": "", "examples": ["a"], "maxLength": 2147483647}}},
    {"type": "object", "properties": {"url": TEXT | {"format": "uri-reference", "minLength": 1, "maxLength": 2083}},
     "required": ["url"], "x-mcp": {"if": 1}, "$defs": None, "additionalProperties": None},
]  # fmt: skip


@pytest.mark.parametrize("at", range(len(GENERATED)))
def test_generated_schemas(at: int) -> None:
    assert error_of(GENERATED[at]) == ""


RIGHT = ['{"a": 1, "b": [1, 2]}', '{"a":1,"b":[1,2]}', '{"a": {"x": [1, {}], "y": []}, "b": []}']
WRONG = [
    *('{"a":  1, "b": []}', '{ "a": 1, "b": []}', '{"a" :1, "b": []}', '{"a": 1 , "b": []}', '{"a": 1,  "b": []}'),
    *(
        '{"a": 1, "b": [ 1]}',
        '{"a": 1, "b": [1,  2]}',
        '{"a": 1, "b": [1 ]}',
        '{"a": 1, "b": [] }',
        '{"a":\n1, "b": []}',
    ),
    *('{"a": {"x":  1}, "b": []}', '{"a": {"x": [1 , 2]}, "b": []}', ' {"a": 1, "b": []}', '{"a":\t1, "b": []}'),
]
PAIR = {"type": "object", "properties": {"a": {}, "b": {"type": "array"}}, "required": ["a", "b"]}


@pytest.mark.parametrize(
    "grammar",
    [
        grammar_of(PAIR),
        grammar_of(PAIR, strict=True),
        grammar_of({"type": "object", "additionalProperties": {}}),
        grammar_of({"anyOf": [{"$ref": "#/$defs/p"}], "$defs": {"p": PAIR | {"patternProperties": {"^c": TEXT}}}}),
        write("json_object", "true", [], coerces_one_of=False),
    ],
)  # fmt: skip
def test_one_blank_or_none_after_commas_and_colons(grammar: str) -> None:
    assert allows(grammar, *RIGHT) == [True] * len(RIGHT)
    assert allows(grammar, *WRONG) == [False] * len(WRONG)


def test_the_client_s_own_guidance_wins() -> None:
    compact, spaced, wide = '{"a":1,"b":[1,2]}', '{"a": 1, "b": [1, 2]}', '{ "a" : 1 , "b" : [ ] }'
    for theirs, expected in (
        ({"whitespace_flexible": True}, [True, True, True]),
        ({"whitespace_flexible": False}, [True, False, False]),
        ({"whitespace_pattern": " "}, [True, True, True]),
        ({"item_separator": ", ", "key_separator": ": "}, [False, True, False]),
        ({"whitespace_flexible": False, "item_separator": ", ?", "key_separator": ": ?"}, [True, True, False]),
        ({"coerce_one_of": True}, [True, True, False]),
        (None, [True, True, False]),
    ):
        assert allows(grammar_of(PAIR | {"x-guidance": theirs}), compact, spaced, wide) == expected, theirs
    assert guided({}, {"coerce_one_of": False}, coerces_one_of=True)["x-guidance"]["coerce_one_of"] is False
    assert error_of({"not": TEXT, "x-guidance": {"lenient": True}}) == ""


def random_schema(rng: random.Random, depth: int) -> tuple[dict[str, Any], list[Any]]:
    """A schema that llguidance follows, and values of which some fit it."""
    kinds = ["text", "enum", "integer", "null", "ref"] + ["array", "object", "either"] * (depth > 0)
    match rng.choice(kinds):
        case "text":
            more: list[dict[str, Any]] = [
                {},
                {"maxLength": 2},
                {"pattern": "^[ab]+$"},
                {"format": "date"},
                {"minLength": 3},
            ]
            return TEXT | rng.choice(more), ["ab", "abc", "2024-01-31", "", 3]
        case "enum":
            return {"enum": [1, "x", {"format": "y"}]}, [1, "x", {"format": "y"}, {"format": "z"}, 2]
        case "integer":
            return {"type": "integer", "minimum": rng.randint(0, 3), "maximum": 5}, [1, 4, 6, "4"]
        case "null":
            return {"type": ["null", "boolean"]}, [None, True, 0]
        case "ref":
            return {"$ref": "#/$defs/leaf"}, [{"title": "t"}, {"title": 1}, {}]
        case "array":
            schema, values = random_schema(rng, depth - 1)
            return {"type": "array", "items": schema, "maxItems": 2}, [[], [rng.choice(values)], values[:3], "a"]
        case "either":
            (one, some), (two, others) = random_schema(rng, depth - 1), random_schema(rng, depth - 1)
            return {"anyOf": [one, two]}, [*rng.sample(some, 2), *rng.sample(others, 2)]
    keys = rng.sample(["format", "title", "a", "x-a", "$ref", "not"], 2)
    made = {key: random_schema(rng, depth - 1) for key in keys}
    schema = {"type": "object", "properties": {key: one for key, (one, _) in made.items()}}
    schema |= {"required": keys[:1], "additionalProperties": rng.choice([False, TEXT])}
    values = [{key: rng.choice(some) for key, (_, some) in made.items()} for _ in range(4)]
    return schema, [*values, {}, {keys[0]: values[0][keys[0]], "more": "b"}]


NOTES: list[dict[str, Any]] = [{key: value} for key, value in OF_OTHERS.items()] + [
    {"uniqueItems": False}, {"propertyNames": TEXT}, {"if": {"type": "null"}}, {"minContains": 0}, {"not": False},
    {"dependentRequired": {}}, {"unevaluatedProperties": True}, {"format": "uuid4"}, {"pattern": ""}, {"minLength": 0},
    {"dependencies": {"a": []}}, {"$anchor": "b c"}, {"contains": False, "minContains": 0}, {"else": True},
]  # fmt: skip


def noted(rng: random.Random, schema: Any) -> Any:
    """The schema with notes at random places, each before, between or after its keywords."""
    if not isinstance(schema, dict):
        return schema
    members: list[tuple[str, Any]] = []
    for key, value in schema.items():
        if key in ("properties", "$defs"):
            members.append((key, {name: noted(rng, one) for name, one in value.items()}))
        elif key in ("items", "additionalProperties", "anyOf"):
            members.append((key, [noted(rng, one) for one in value] if isinstance(value, list) else noted(rng, value)))
        else:
            members.append((key, value))
    for note in rng.sample(NOTES, rng.randint(0, 4)):
        if not note.keys() & {key for key, _ in members}:
            at = rng.randint(0, len(members))
            members[at:at] = note.items()
    return dict(members)


@pytest.mark.parametrize(
    "num_schemas", [pytest.param(40, marks=pytest.mark.long), pytest.param(1000, marks=pytest.mark.slow)]
)
def test_notes_at_random_places_change_no_answer(num_schemas: int) -> None:
    rng, answers = random.Random(num_schemas), [0, 0]
    leaf = {"type": "object", "properties": {"title": TEXT}, "required": ["title"], "additionalProperties": False}
    for _ in range(num_schemas):
        schema, values = random_schema(rng, 3)
        schema |= {"$defs": {"leaf": leaf}}
        plain = guided(schema, None, coerces_one_of=True)
        before = json.dumps({"grammars": [{"json_schema": plain}]})
        after = noted(rng, schema)
        texts = list({json.dumps(one, separators=by): one for one in values for by in ((",", ":"), (", ", ": "))})
        expected = allows(before, *texts)
        assert allows(grammar_of(after), *texts) == expected, after
        assert pruned(pruned(after, strict=False), strict=False) == pruned(after, strict=False)
        answers[0] += sum(expected)
        answers[1] += len(expected) - sum(expected)
    assert min(answers) > 2 * num_schemas, answers
