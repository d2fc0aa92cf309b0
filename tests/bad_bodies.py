"""Bodies that no server may choke on, for node and router alike."""

from __future__ import annotations

import json
from typing import Any

DEPTH = 100_000
SHALLOWER = 5_000  # fits into a small request, and is still deeper than any parser follows
HI = [{"role": "user", "content": "hi"}]


def nested(depth: int) -> bytes:
    """A JSON list in a list in a list."""
    return b"[" * depth + b"]" * depth


def _call(arguments: Any) -> bytes:
    calls = [{"id": "a", "type": "function", "function": {"name": "f", "arguments": arguments}}]
    return json.dumps({"messages": [*HI, {"role": "assistant", "tool_calls": calls}]}).encode()


# name -> (path, body); each is a 400
BAD_BODIES: dict[str, tuple[str, bytes]] = {
    "chat: not UTF-8 in a name": ("/v1/chat/completions", b'{"messages":[{"role":"user","content":"hi"}],"\xff":1}'),
    "chat: not UTF-8 in the model": ("/v1/chat/completions", b'{"model":"\xff","messages":[]}'),
    "chat: not UTF-8 in a text": ("/v1/chat/completions", b'{"messages":[{"role":"user","content":"\xc3"}]}'),
    "chat: deep in an unknown field": (
        "/v1/chat/completions",
        b'{"messages":[{"role":"user","content":"hi"}],"x":' + nested(DEPTH) + b"}",
    ),
    "chat: deep and never closed": ("/v1/chat/completions", b'{"messages":' + b"[" * DEPTH),
    "chat: deep messages": ("/v1/chat/completions", b'{"messages":' + nested(DEPTH) + b"}"),
    "chat: deep tool arguments": ("/v1/chat/completions", _call(nested(SHALLOWER).decode())),
    "chat: tool arguments never closed": ("/v1/chat/completions", _call("[" * SHALLOWER)),
    "chat: objects all the way down": ("/v1/chat/completions", b'{"a":' * DEPTH + b"1" + b"}" * DEPTH),
    "chat: messages of the wrong type": ("/v1/chat/completions", b'{"messages":{"role":"user"}}'),
    "chat: n beyond all bounds": (
        "/v1/chat/completions",
        b'{"messages":[{"role":"user","content":"hi"}],"n":1' + b"0" * 400 + b"}",
    ),
    "completions: deep prompt": ("/v1/completions", b'{"prompt":' + nested(DEPTH) + b"}"),
    "completions: not UTF-8 in the prompt": ("/v1/completions", b'{"prompt":"\xff"}'),
    "completions: a prompt of the wrong type": ("/v1/completions", b'{"prompt":{"a":1}}'),
    "completions: too long a text": ("/v1/completions", b'{"prompt":"' + b"x" * 200_000 + b'"}'),
    "completions: too many ids": ("/v1/completions", b'{"prompt":[' + b"5," * 200_000 + b"5]}"),
    "tokenize: too long a text": ("/tokenize", b'{"prompt":"' + b"x" * 200_000 + b'"}'),
    "tokenize: deep": ("/tokenize", b'{"prompt":' + nested(DEPTH) + b"}"),
    "detokenize: too many ids": ("/detokenize", b'{"tokens":[' + b"5," * 200_000 + b"5]}"),
    "detokenize: not UTF-8": ("/detokenize", b'{"\xff":[1]}'),
}
OVERSIZED = b'{"prompt":"' + b"x" * 20_000_000 + b'"}'  # more than a small model's node takes: a 413


def check_error(body: Any) -> None:
    """OpenAI's shape."""
    assert body.keys() == {"error"}
    assert body["error"].keys() == {"message", "type", "param", "code"}
    assert body["error"]["type"] == "invalid_request_error"
