"""Fields of requests that ask for much work by few bytes: schemas, regexes and grammars that are served or a 400.

Each is a function of a number, so that no answer to an earlier one is kept for it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable


def chat_format(schema: dict[str, Any], **members: Any) -> dict[str, Any]:
    return {"response_format": {"type": "json_schema", "json_schema": {"name": "n", "schema": schema} | members}}


def nested(keyword: str, depth: int) -> dict[str, Any]:
    schema: dict[str, Any] = {"type": "string"}
    for at in range(depth):
        schema = {keyword: [schema, {"type": "object", "properties": {f"a{at}": schema}}]}
    return schema


def chained(count: int) -> dict[str, Any]:
    definitions = {f"d{i}": {"anyOf": [{"$ref": f"#/$defs/d{i + 1}"}, {"type": "null"}]} for i in range(count)}
    return {"$ref": "#/$defs/d0", "$defs": definitions | {f"d{count}": {"type": "null"}}}


def tool(name: str, num_arguments: int) -> dict[str, Any]:
    """The schema of a call."""
    arguments = {f"argument_{at}": {"type": ["string", "integer"][at % 2]} for at in range(num_arguments)}
    return {
        "type": "object", "required": ["name", "arguments"], "additionalProperties": False,
        "properties": {"name": {"const": name},
                       "arguments": {"type": "object", "properties": arguments, "required": list(arguments)[:3]}},
    }  # fmt: skip


def _json(schema: dict[str, Any]) -> Callable[[int], dict[str, Any]]:
    return lambda at: {"guided_json": schema | {"title": f"{at}"}}


def _format(schema: dict[str, Any], **members: Any) -> Callable[[int], dict[str, Any]]:
    return lambda at: chat_format(schema | {"title": f"{at}"}, **members)


def _regex(regex: str) -> Callable[[int], dict[str, Any]]:
    return lambda at: {"guided_regex": f"{regex}|{at}"}


def _grammar(grammar: str) -> Callable[[int], dict[str, Any]]:
    return lambda at: {"guided_grammar": f"{grammar}\n// {at}\n"}


# name -> fields by a number, and whether they are refused; None: whatever the library's version makes of them
HOSTILE: dict[str, tuple[Callable[[int], dict[str, Any]], bool | None]] = {
    "1 MB": (_format({"enum": ["x" * 1_000_000]}), True),
    "nested oneOf": (_format(nested("oneOf", 9)), None),
    "nested oneOf, strict": (_format(nested("oneOf", 9), strict=True), True),
    "nested anyOf": (_json(nested("anyOf", 9)), None),
    "nested allOf": (_json(nested("allOf", 9)), None),
    "a deep schema": (lambda at: {"guided_json": '{"items":' * (900 + at % 90) + "{}" + "}" * (900 + at % 90)}, True),
    "a huge enum": (_json({"enum": [f"value {i * 7919}" for i in range(3000)]}), False),
    "128 tools": (_json({"anyOf": [tool(f"tool_{at}", 6) for at in range(128)]}), False),
    "many optional properties": (
        _json({"type": "object", "properties": {f"property_{i}": {"type": "string"} for i in range(1500)}}), None,
    ),
    "a deep chain of references": (_json(chained(1400)), None),
    "a reference to itself": (_json({"$ref": "#"}), None),
    "recursive regex": (_regex("((a{0,1000}){0,1000}){0,1000}"), None),
    "exponential regex": (_regex("(.*a){20}.{30}(b|c.*){20}"), None),
    "slow masks": (_grammar("start: T\nT: /([a-zA-Z0-9]{1,3}[.,-]?){500}/"), None),
    "deep parentheses": (_regex("(" * 20_000 + "a" + ")" * 20_000), True),
    "300 regexes at once": (_grammar("start: T\nT: " + " & ".join(f"/.*{i}.*/" for i in range(300))), True),
    "a chain of 5,000 rules": (
        _grammar("start: r0\n" + "\n".join(f"r{i}:r{i + 1}" for i in range(4500)) + '\nr4500:"a"'), None,
    ),
    "doubled terminals": (
        _grammar("start: R0\n" + "\n".join(f"R{i}: R{i + 1} R{i + 1}" for i in range(60)) + '\nR60: "a"'), True,
    ),
    "an ambiguous grammar": (_grammar('start: a*\na: "x"* | a a a | "x" a'), None),
    "deep GBNF": (lambda at: {"ebnf": f"# {at}\nroot ::= " + "(" * 20_000}, True),
}  # fmt: skip
