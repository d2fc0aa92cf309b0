"""References of schemas: what they need stays, and each is followed once."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from pd_cluster.server.grammar import json_schema
from pd_cluster.server.grammar.json_schema import pruned
from tests.server.test_json_schema import TEXT, allows, grammar_of

if TYPE_CHECKING:
    import pytest


def test_names_that_references_need_stay() -> None:
    for schema, right, wrong in (
        ({"$ref": "other", "$defs": {"a": {"$id": "other", "type": "integer"}}}, "1", '"a"'),
        ({"$ref": "#a", "$defs": {"a": {"$anchor": "a", "type": "integer"}}}, "1", '"a"'),
        ({"$id": "http://a/b", "$ref": "http://a/b#/$defs/c", "$defs": {"c": {"type": "integer"}}}, "1", '"a"'),
        (
            {
                "$ref": "#/$defs/a",
                "$defs": {
                    "a": {"$id": "a", "$ref": "#/$defs/b", "$defs": {"b": {"type": "integer"}}},
                    "b": TEXT,
                },
            }, "1", '"a"',
        ),
        (
            {
                "$ref": "http://a/b#/x-a/c",
                "$defs": {
                    "b": {"$id": "http://a/b", "x-a": {"c": {"type": "integer", "title": "t"}}},
                    "c": {"$id": "http://a/c", "x-a": {"c": TEXT}},
                },
            }, "1", '"a"',
        ),
        (  # its draft does not know `prefixItems`
            {"$schema": "http://json-schema.org/draft-07/schema#", "type": "array", "prefixItems": [TEXT]},
            "[1]", '"a"',
        ),
    ):  # fmt: skip
        assert allows(grammar_of(schema), right, wrong) == [True, False], schema


def test_a_note_beside_a_reference_to_itself_is_no_sibling() -> None:
    tree = {"type": "object", "properties": {"next": {"$ref": "#/$defs/tree", "x-note": 1, "deprecated": True}}}
    schema = {"$ref": "#/$defs/tree", "example": {}, "$defs": {"tree": tree | {"additionalProperties": False}}}
    assert allows(grammar_of(schema), '{"next": {"next": {}}}', '{"next": 1}') == [True, False]


def test_references_of_many_schemas_with_names_are_followed_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """1,600 took 3 s when each was followed in each."""
    followed, follow = [], json_schema._at

    def at(node: Any, step: str) -> Any:
        followed.append(step)
        return follow(node, step)

    monkeypatch.setattr(json_schema, "_at", at)
    for base in ("", "http://x/"):
        followed.clear()
        definitions = {
            f"d{one}": {"$id": f"http://x/{one}", "x-a": {"b": TEXT}, "$ref": f"{base and base + str(one)}#/x-a/b"}
            for one in range(200)
        }
        pruned({"$defs": definitions, "$ref": "#/$defs/d0"}, strict=False)
        assert 400 <= len(followed) <= 1000
