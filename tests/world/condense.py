"""`python -m tests.world.condense NAME=RECORD ... > SPEC`: the structure of recorded requests, without their texts.

RECORD is a file of `recorder.py`. Each text becomes `{{N}}`, its length; names, tags, enumerations and numbers stay,
because they are what a server meets. Identifiers become `{{#N KEY}}`. Text that is JSON becomes `{"$json": ...}`. The
tools of an MCP server named `tool_0`, `tool_1` and so on become one `$repeat` of their first six. What the first
request has beside its history is written once. The head of a spec (client, version, settings) is written by hand.
"""

from __future__ import annotations

import hashlib
import json
import re
import sys
from pathlib import Path
from typing import Any

NUM_SHAPES = 6
SHORT = 24  # a text of at most so many characters without a blank is a name
MIN_SAID, MIN_SHOWN = 240, 1200  # characters of an assistant's text, and of a result: scripted ones are shorter
IDENTIFIERS = {
    "id", "call_id", "tool_call_id", "tool_use_id", "prompt_cache_key", "user_id", "thread_id", "turn_id", "session_id",
    "root_turn_id", "x-codex-window-id", "x-codex-turn-metadata", "x-codex-installation-id",
}  # fmt: skip
NAMES = {"type", "role", "name", "model", "$ref", "$schema", "format", "pattern", "namespace", "syntax", "title"}
MCP_TOOL = re.compile(r"^(.*)tool_(\d+)$")
TAG = re.compile(r"^\s*<([\w-]+)>")
LABEL = re.compile(r"^(x-anthropic-billing-header: cc_version=[\d.]+)\.\w+(; cc_entrypoint=[\w-]+;)$")


def condensed(
    value: Any, key: str = "", *, is_schema: bool = False, is_said: bool = False, is_shown: bool = False
) -> Any:
    """`value` without its texts. `key`: the member that has it."""
    flags = {"is_schema": is_schema, "is_said": is_said, "is_shown": is_shown}
    if isinstance(value, list):
        if key in ("enum", "required", "include"):
            return value
        return _repeated([condensed(one, key, **flags) for one in value])
    if isinstance(value, dict):
        flags["is_said"] |= value.get("role") == "assistant"
        flags["is_shown"] |= value.get("role") == "tool" or str(value.get("type")).endswith("_output")
        flags["is_shown"] |= value.get("type") == "tool_result"
        flags["is_schema"] |= key in ("parameters", "input_schema", "schema")
        return {name: condensed(one, name, **flags) for name, one in value.items()}
    if not isinstance(value, str) or not value:
        return value
    if key in NAMES or (is_schema and key != "description") or key == "finish_reason":
        found = MCP_TOOL.match(value)
        return f"{found[1]}{{{{tool {found[2]}}}}}" if found and key == "name" else value
    return _text(value, key, is_said=is_said, is_shown=is_shown)


def _text(value: str, key: str, *, is_said: bool, is_shown: bool) -> Any:
    if label := LABEL.match(value):
        return f"{label[1]}.{{{{label 3}}}}{label[2]} cch={{{{label 5}}}};"
    if key in IDENTIFIERS:
        return _identifier(value)
    if key == "arguments":
        return {"$json": {name: _argument(one) for name, one in json.loads(value).items()}}
    if len(value) <= SHORT and not re.search(r"\s", value):
        return value
    if key == "definition":
        return "start: /[\\s\\S]+/\n"
    tag = TAG.match(value)
    if tag and value.rstrip().endswith(f"</{tag[1]}>"):
        return f"<{tag[1]}>\n{{{{{max(24, len(value) - 2 * len(tag[1]) - 7)}}}}}\n</{tag[1]}>"
    least = MIN_SAID if is_said else MIN_SHOWN if is_shown else 100 if key in ("text", "content") else 8
    return f"{{{{{max(least, len(value))}}}}}"


def _argument(value: Any) -> Any:
    return "{{40}}" if isinstance(value, str) else value


def _identifier(value: str) -> str:
    """Those that were equal stay equal."""
    begin = re.match(r"([a-z]+_)?", value)
    assert begin
    digest = hashlib.sha256(value.encode()).hexdigest()[:6]
    return f"{begin[0]}{{{{#{len(value) - len(begin[0])} {digest}}}}}"


def _repeated(values: list[Any]) -> list[Any]:
    """Tools of an MCP server as one `$repeat`, where the first of them stands."""
    kept: list[Any] = []
    shapes: list[tuple[int, Any]] = []
    at = 0
    for value in values:
        function = value.get("function", value) if isinstance(value, dict) else {}
        found = re.search(r"\{\{tool (\d+)\}\}", str(function.get("name")))
        if found is None or "description" not in function:
            kept.append(value)
            continue
        at = at if shapes else len(kept)
        shapes.append((int(found[1]), value))
    if shapes:
        of = [
            json.loads(re.sub(r"\{\{tool \d+\}\}", "{{tool}}", json.dumps(one)))
            for _, one in sorted(shapes, key=lambda s: s[0])
        ]
        kept.insert(at, {"$repeat": len(shapes), "of": of[:NUM_SHAPES]})
    return kept


def main() -> None:
    requests = {}
    for argument in sys.argv[1:]:
        name, _, path = argument.partition("=")
        record = json.loads(Path(path).read_text())
        body = condensed(record["body"])
        # arguments of calls in Messages are objects
        for message in body.get("messages", ()):
            for block in message["content"] if isinstance(message.get("content"), list) else ():
                if block["type"] == "tool_use":
                    block["input"] = {key: _argument(one) for key, one in block["input"].items()}
        body["model"] = "{{model}}"
        requests[name] = (record["path"].split("?")[0], body)
    first = next(iter(requests.values()))[1]
    shared = {key: value for key, value in first.items() if key not in ("messages", "input")}
    spec = {
        "path": next(iter(requests.values()))[0],
        "shared": shared,
        "requests": {
            name: {key: value for key, value in body.items() if shared.get(key) != value}
            | {key: "$absent" for key in shared if key not in body}
            for name, (_, body) in requests.items()
        },
    }
    sys.stdout.write(json.dumps(spec, ensure_ascii=False))


if __name__ == "__main__":
    main()
