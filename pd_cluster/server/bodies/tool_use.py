"""What a chat request says about tools: the tools themselves, whether one must be called, and how many."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from pd_cluster.errors import InvalidRequest
from pd_http.dialect import OPENAI

if TYPE_CHECKING:
    from pd_cluster.server.bodies.schema import ChatBody
    from pd_http.dialect import ToolLimits

MAX_DEPTH = 96  # levels of a schema: llguidance reads 128, and functions here recurse by level
_NAME = re.compile(r"[A-Za-z0-9_.\-]+")  # OpenAI's, and the dot of MCP servers
_REFERENCE = re.compile(r"#/(\$defs|definitions)/([^/]+)")
_CHOICES = ("none", "auto", "required")
_TYPES = ("string", "number", "integer", "boolean", "object", "array", "null")
_MAPS, _LISTS = ("properties", "$defs", "definitions", "patternProperties"), ("anyOf", "oneOf", "allOf", "prefixItems")
_SCHEMAS = ("items", "additionalProperties", "not")


@dataclass(frozen=True, slots=True)
class Function:
    """A function that the model may call."""

    name: str
    parameters: dict[str, Any]  # JSON schema of its arguments
    strict: bool


@dataclass(frozen=True, slots=True)
class ToolUse:
    """What the model may call. Without `functions` it calls nothing."""

    shown: list[dict[str, Any]] | None = None  # the tools as the client sent them, for the chat template
    functions: tuple[Function, ...] = ()
    required: bool = False  # the answer is calls, without text
    parallel: bool = True  # an answer may have several calls
    limited: bool = False  # of the tools that are shown, only `functions` may be called

    @property
    def is_constrained(self) -> bool:
        """Whether a grammar has to hold the calls to their names or schemas."""
        return self.required or self.limited or any(function.strict for function in self.functions)


def leave_out_tools(body: ChatBody) -> set[str]:
    """Take tools out of the body that are no functions: other kinds have no schema. Returns their names."""
    foreign = [tool for tool in body.tools or () if not _is_function(tool)]
    if body.tools is not None and foreign:
        body.tools = [tool for tool in body.tools if _is_function(tool)]
    return {f"tools.{tool.get('type') or next(iter(tool))}" for tool in foreign}


def _is_function(tool: dict[str, Any]) -> bool:
    """Other APIs' tools without a type have one member: `google_search`. Errors name what is hardly a tool."""
    kind = tool.get("type")
    if kind is None:
        return not tool or "name" in tool or "function" in tool
    return kind == "function" or not isinstance(kind, str)


def choice_of(given: Any) -> Any:
    """A `tool_choice` in the form of any API as one of `_CHOICES`, or as an object of chat."""
    kind = given.get("type", "function") if isinstance(given, dict) else given
    if kind == "any" or (isinstance(given, dict) and kind in _CHOICES):
        return "required" if kind == "any" else kind
    if kind in ("function", "tool") and isinstance(given, dict) and "name" in given:
        return {"type": "function", "function": {"name": given["name"]}}
    return given


def tool_use(body: ChatBody, limits: ToolLimits = OPENAI.tool_limits) -> ToolUse:
    """What the body says. `limits`: of the client's API. Raises InvalidRequest that names the wrong place."""
    functions = _functions(body.tools or [], limits)
    choice = choice_of(body.tool_choice)
    if choice is not None and not isinstance(choice, dict) and choice not in _CHOICES:
        raise InvalidRequest(f"tool_choice must be {', '.join(_CHOICES)} or name a function", "tool_choice")
    if choice not in (None, "none", "auto") and not functions:
        raise InvalidRequest("tool_choice needs tools that this server serves, which are functions", "tool_choice")
    if choice == "none" or not functions:
        return ToolUse()
    of_messages = body.tool_choice if isinstance(body.tool_choice, dict) else {}
    parallel = body.parallel_tool_calls is not False and not of_messages.get("disable_parallel_tool_use")
    if isinstance(choice, dict) and choice.get("type") == "allowed_tools":
        return _allowed(body, functions, choice.get("allowed_tools", choice), parallel)
    if isinstance(choice, dict):
        functions = _of_names(functions, [_named(choice, "tool_choice")])
        parallel = False
    return ToolUse(body.tools, functions, choice not in (None, "auto"), parallel)


def _allowed(body: ChatBody, functions: tuple[Function, ...], allowed: Any, parallel: bool) -> ToolUse:
    """All tools are shown, so that the prompt stays the same where others are allowed."""
    place = "tool_choice.allowed_tools"
    if not isinstance(allowed, dict) or allowed.get("mode") not in ("auto", "required"):
        raise InvalidRequest(f"{place} must be an object with mode auto or required", "tool_choice")
    listed = allowed.get("tools")
    if not isinstance(listed, list) or not all(isinstance(one, dict) for one in listed):
        raise InvalidRequest(f"{place}.tools must be a list of tools", "tool_choice")
    served = [one for one in listed if one.get("type", "function") == "function"]
    required = allowed["mode"] == "required"
    if not served:
        if required:
            raise InvalidRequest(f"{place} has no function, and others are not served", "tool_choice")
        return ToolUse(body.tools)
    functions = _of_names(functions, [_named(one, f"{place}.tools[{i}]") for i, one in enumerate(served)])
    return ToolUse(body.tools, functions, required, parallel, limited=True)


def _of_names(functions: tuple[Function, ...], names: list[str]) -> tuple[Function, ...]:
    """The functions with these names."""
    known, wanted = {function.name for function in functions}, set(names)
    if missing := sorted(wanted - known):
        raise InvalidRequest(f"tool_choice names the function {missing[0]!r}, which is not in tools", "tool_choice")
    return tuple(function for function in functions if function.name in wanted)


def _named(choice: dict[str, Any], place: str) -> str:
    """The function of `{"type": "function", "function": {"name": ...}}`."""
    choice = choice_of(choice)
    if choice.get("type", "function") != "function":
        raise InvalidRequest(f"{place}.type must be function", "tool_choice", "unsupported_value")
    function = choice.get("function")
    name = function.get("name") if isinstance(function, dict) else None
    if not isinstance(name, str):
        raise InvalidRequest(f"{place}.function.name must be a string", "tool_choice")
    return name


def _functions(tools: list[dict[str, Any]], limits: ToolLimits) -> tuple[Function, ...]:
    if len(tools) > limits.tools:
        raise InvalidRequest(f"tools has {len(tools)} entries; {limits.tools} are allowed", "tools")
    functions: dict[str, Function] = {}
    for i, tool in enumerate(tools):
        function = _function(tool, f"tools[{i}]", limits.name_chars)
        if function.name in functions:
            raise InvalidRequest(f"tools[{i}].function.name: {function.name!r} is there twice", "tools")
        functions[function.name] = function
    return tuple(functions.values())


def _function(tool: dict[str, Any], place: str, name_chars: int) -> Function:
    if tool.get("type", "function") != "function":
        raise InvalidRequest(f"{place}.type must be function", "tools", "unsupported_value")
    given, place = tool.get("function"), f"{place}.function"
    if not isinstance(given, dict):
        raise InvalidRequest(f"{place} must be an object", "tools")
    name = given.get("name")
    if not (isinstance(name, str) and len(name) <= name_chars and _NAME.fullmatch(name)):
        raise InvalidRequest(
            f"{place}.name must be 1 to {name_chars} letters, digits, dots, dashes or underscores", "tools"
        )
    if not isinstance(given.get("description"), str | None):
        raise InvalidRequest(f"{place}.description must be a string", "tools")
    if not isinstance(given.get("strict"), bool | None):
        raise InvalidRequest(f"{place}.strict must be true or false", "tools")
    is_strict, schema = bool(given.get("strict")), given.get("parameters")
    if not isinstance(schema, dict | None):
        raise InvalidRequest(f"{place}.parameters must be a JSON schema, which is an object", "tools")
    # More levels cost more than the rest of a request, and a parser reads the types of the arguments alone
    schema = loosened(schema or {}, 1 if is_strict else 2)
    return Function(name, _object_schema(schema, f"{place}.parameters"), is_strict)


def loosened(schema: Any, levels: int = MAX_DEPTH) -> Any:
    """A schema as some writers mean it: null for a member that is not there, a type in capitals, or without an object.

    Below the levels it stays as it is.
    """
    if not levels or not isinstance(schema, dict):
        return schema
    if levels == 1 and schema.get("type") in _TYPES and None not in schema.values():
        return schema  # most are: requests with 124 tools take half a millisecond less
    loose: dict[str, Any] = {key: one for key, one in schema.items() if one is not None or key in ("default", "const")}
    for key, one in loose.items():
        if key == "type" and isinstance(one, str | list):
            loose[key] = _type(one) if isinstance(one, str) else [_type(kind) for kind in one]
        elif key == "required" and isinstance(one, list):
            loose[key] = [name for name in one if name is not None]
        elif key in _MAPS and isinstance(one, dict) and levels > 1:
            loose[key] = {
                name: loosened(value if isinstance(value, dict) else _as_schema(value), levels - 1)
                for name, value in one.items()
            }
        elif key in _LISTS and isinstance(one, list) and levels > 2:
            loose[key] = [loosened(value, levels - 1) for value in one]
        elif key in _SCHEMAS and levels > 2:
            loose[key] = loosened(one, levels - 1)
    return loose


def _type(kind: Any) -> Any:
    return kind.lower() if isinstance(kind, str) and kind.lower() in _TYPES else kind


def _as_schema(value: Any) -> Any:
    if value is None:
        return {}
    return {"type": value} if isinstance(value, str) and value.lower() in _TYPES else value


def _object_schema(schema: dict[str, Any], place: str) -> dict[str, Any]:
    """The schema of a function's arguments, which are an object."""
    kinds = schema.get("type", "object")
    if kinds != "object" and not (isinstance(kinds, list) and "object" in kinds):
        raise InvalidRequest(f"{place}.type must be object", "tools")
    properties, required = schema.get("properties", {}), schema.get("required", [])
    if not (isinstance(properties, dict) and all(isinstance(value, dict | bool) for value in properties.values())):
        raise InvalidRequest(f"{place}.properties must map names to schemas", "tools")
    if not (isinstance(required, list) and all(isinstance(key, str) for key in required)):
        raise InvalidRequest(f"{place}.required must be a list of strings", "tools")
    for key in ("$defs", "definitions"):
        if not isinstance(schema.get(key, {}), dict):
            raise InvalidRequest(f"{place}.{key} must map names to schemas", "tools")
    if not is_flat(schema):
        raise InvalidRequest(f"{place} is nested more than {MAX_DEPTH} levels deep", "tools")
    return {"type": "object"} | schema | {"type": "object"}


def is_flat(schema: dict[str, Any]) -> bool:
    """Whether the schema has at most `MAX_DEPTH` levels of objects and lists."""
    level: list[Any] = [schema]
    for _ in range(MAX_DEPTH):
        members = (member for one in level for member in (one.values() if isinstance(one, dict) else one))
        level = [member for member in members if isinstance(member, dict | list)]
        if not level:
            return True
    return False


def inlined(schema: Any, root: dict[str, Any]) -> Any:
    """The schema with the definitions of `root` that it, or an alternative of it, refers to."""
    if not isinstance(schema, dict):
        return schema
    if match := _REFERENCE.fullmatch(str(schema.get("$ref", ""))):
        return root.get(match[1], {}).get(match[2], {})
    forms = {key: schema[key] for key in ("anyOf", "oneOf") if isinstance(schema.get(key), list)}
    return schema | {key: [inlined(one, root) for one in choices] for key, choices in forms.items()}
