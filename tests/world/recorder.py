"""`python -m tests.world.recorder FOLDER SCRIPT`: a server that writes down what a client sends, and answers by script.

It speaks Chat, Responses and Messages, whole and streamed, on a free port of loopback, which it prints. FOLDER gets one
JSON file for each request: method, path, head and body. Nothing of it belongs into the repository: the texts are
those of the client. SCRIPT is a JSON list of answers; each request with tools takes the next one, all others get a
title. An answer has `text`, `calls` (each `{"name", "arguments"}`, with `"kind": "custom"` for a tool with text, with
`"namespace"` for a tool of a group), and `hold`: its stream stands still after the text, until the client leaves.
"""

from __future__ import annotations

import itertools
import json
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterator

HOLD_DEADLINE_S = 120.0
LAST = {"text": "That is all."}  # after the end of a script
TITLE = {"text": "A short title"}  # for requests without tools
Event = tuple[str, dict[str, Any]]


class Recorder(ThreadingHTTPServer):
    """Numbers its requests in the order in which they came."""

    daemon_threads = True

    def __init__(self, folder: Path, answers: list[dict[str, Any]]) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self._folder = folder
        self._answers = iter(answers)
        self._number = itertools.count()
        self._lock = threading.Lock()

    def note(self, method: str, path: str, head: dict[str, str], body: Any) -> dict[str, Any]:
        """The answer to give."""
        with self._lock:
            name = f"{next(self._number):03d}{path.split('?')[0].replace('/', '_')}.json"
            record = {"method": method, "path": path, "head": head, "body": body}
            (self._folder / name).write_text(json.dumps(record, indent=1, ensure_ascii=False))
            asks_for_tools = isinstance(body, dict) and body.get("tools")
            return (next(self._answers, LAST) if asks_for_tools else TITLE) | {"number": name[:3]}


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: Recorder

    def do_GET(self) -> None:
        self.server.note("GET", self.path, dict(self.headers), None)
        self._send_json({"object": "list", "data": [{"id": "tiny", "object": "model", "owned_by": "x"}]})

    do_HEAD = do_GET

    def do_POST(self) -> None:
        raw = self.rfile.read(int(self.headers.get("content-length", 0)))
        try:
            body = json.loads(raw)
        except ValueError:
            body = raw.decode(errors="replace")
        answer = self.server.note("POST", self.path, dict(self.headers), body)
        path = self.path.split("?")[0]
        if path.endswith("/count_tokens"):
            self._send_json({"input_tokens": len(raw) // 4})
        elif path.endswith("/messages"):
            self._answer(body, _message(answer), _message_events(answer))
        elif path.endswith("/responses"):
            self._answer(body, _response(answer), _response_events(answer))
        elif path.endswith("/chat/completions"):
            self._answer(body, _chat(answer), _chat_events(answer))
        else:
            self._send_json({})

    def _answer(self, body: dict[str, Any], whole: dict[str, Any], events: Iterator[Event | None]) -> None:
        if not body.get("stream"):
            return self._send_json(whole)
        self.send_response(200)
        self.send_header("content-type", "text/event-stream")
        self.send_header("connection", "close")
        self.end_headers()
        for event in events:
            if event is None:
                threading.Event().wait(HOLD_DEADLINE_S)
                return None
            name, data = event
            head = f"event: {name}\n" if name else ""
            self.wfile.write(f"{head}data: {json.dumps(data)}\n\n".encode())
            self.wfile.flush()
        if body.get("messages") and "chat" in self.path:
            self.wfile.write(b"data: [DONE]\n\n")
        self.close_connection = True
        return None

    def _send_json(self, data: dict[str, Any]) -> None:
        content = json.dumps(data).encode()
        self.send_response(200)
        self.send_header("content-type", "application/json")
        self.send_header("content-length", str(len(content)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(content)

    def log_message(self, format: str, *arguments: object) -> None:
        """Requests are in files."""


def _calls(answer: dict[str, Any]) -> list[dict[str, Any]]:
    return [
        call | {"id": f"call_{answer['number']}_{at}"}
        for at, call in enumerate(
            given | {"arguments": given["arguments"] if given.get("kind") else json.dumps(given["arguments"])}
            for given in answer.get("calls", ())
        )
    ]


def _chat(answer: dict[str, Any]) -> dict[str, Any]:
    calls = [
        {"id": call["id"], "type": "function", "function": {"name": call["name"], "arguments": call["arguments"]}}
        for call in _calls(answer)
    ]
    message = {"role": "assistant", "content": answer.get("text")} | ({"tool_calls": calls} if calls else {})
    choice = {"index": 0, "message": message, "finish_reason": "tool_calls" if calls else "stop"}
    usage = {"prompt_tokens": answer.get("tokens", 100), "completion_tokens": 10, "total_tokens": 110}
    return {
        "id": f"chatcmpl-{answer['number']}",
        "object": "chat.completion",
        "created": 1,
        "model": "tiny",
        "choices": [choice],
        "usage": usage,
    }


def _chat_events(answer: dict[str, Any]) -> Iterator[Event | None]:
    whole = _chat(answer)
    message = whole["choices"][0]["message"]

    def chunk(delta: dict[str, Any], reason: str | None = None) -> Event:
        choice = {"index": 0, "delta": delta, "finish_reason": reason}
        return "", whole | {"object": "chat.completion.chunk", "choices": [choice], "usage": None}

    yield chunk({"role": "assistant", "content": message["content"] or ""})
    if answer.get("hold"):
        yield None
    for at, call in enumerate(message.get("tool_calls", ())):
        yield chunk({"tool_calls": [call | {"index": at}]})
    yield chunk({}, whole["choices"][0]["finish_reason"])
    yield "", whole | {"object": "chat.completion.chunk", "choices": []}


def _response(answer: dict[str, Any]) -> dict[str, Any]:
    output: list[dict[str, Any]] = []
    if answer.get("text"):
        content = [{"type": "output_text", "text": answer["text"], "annotations": []}]
        output.append(
            {
                "type": "message",
                "id": f"msg_{answer['number']}",
                "role": "assistant",
                "status": "completed",
                "content": content,
            }
        )
    for call in _calls(answer):
        item = {"id": f"i{call['id']}", "call_id": call["id"], "name": call["name"], "status": "completed"}
        if call.get("kind") == "custom":
            item |= {"type": "custom_tool_call", "input": call["arguments"]}
        else:
            item |= {"type": "function_call", "arguments": call["arguments"]}
        output.append(item | ({"namespace": call["namespace"]} if "namespace" in call else {}))
    tokens = answer.get("tokens", 100)
    usage = {
        "input_tokens": tokens, "output_tokens": 10, "total_tokens": tokens + 10,
        "input_tokens_details": {"cached_tokens": 0}, "output_tokens_details": {"reasoning_tokens": 0},
    }  # fmt: skip
    return {
        "id": f"resp_{answer['number']}", "object": "response", "created_at": 1, "status": "completed",
        "model": "tiny", "output": output, "usage": usage, "error": None, "incomplete_details": None, "tools": [],
        "parallel_tool_calls": True, "tool_choice": "auto",
    }  # fmt: skip


def _response_events(answer: dict[str, Any]) -> Iterator[Event | None]:
    whole = _response(answer)
    number = itertools.count()

    def event(kind: str, **data: Any) -> Event:
        return kind, {"type": kind, "sequence_number": next(number), **data}

    begun = whole | {"status": "in_progress", "output": [], "usage": None}
    yield event("response.created", response=begun)
    for at, item in enumerate(whole["output"]):
        text = "arguments" if "arguments" in item else "input"
        empty: dict[str, Any] = {"content": []} if "content" in item else {text: ""}
        yield event("response.output_item.added", output_index=at, item=item | empty | {"status": "in_progress"})
        if "content" in item:
            place = {"item_id": item["id"], "output_index": at, "content_index": 0}
            (part,) = item["content"]
            yield event("response.content_part.added", part=part | {"text": ""}, **place)
            yield event("response.output_text.delta", delta=part["text"], **place)
            if answer.get("hold"):
                yield None
            yield event("response.output_text.done", text=part["text"], **place)
            yield event("response.content_part.done", part=part, **place)
        yield event("response.output_item.done", output_index=at, item=item)
    yield event("response.completed", response=whole)


def _message(answer: dict[str, Any]) -> dict[str, Any]:
    content: list[dict[str, Any]] = []
    if answer.get("text"):
        content.append({"type": "text", "text": answer["text"]})
    for call in _calls(answer):
        use = {"id": call["id"].replace("call", "toolu"), "name": call["name"]}
        content.append({"type": "tool_use", **use, "input": json.loads(call["arguments"])})
    reason = "tool_use" if answer.get("calls") else "end_turn"
    usage = {"input_tokens": answer.get("tokens", 100), "output_tokens": 10}
    return {
        "id": f"msg_{answer['number']}", "type": "message", "role": "assistant", "model": "tiny",
        "content": content, "stop_reason": reason, "stop_sequence": None, "usage": usage,
    }  # fmt: skip


def _message_events(answer: dict[str, Any]) -> Iterator[Event | None]:
    whole = _message(answer)

    def event(kind: str, **data: Any) -> Event:
        return kind, {"type": kind, **data}

    yield event("message_start", message=whole | {"content": [], "stop_reason": None})
    for at, block in enumerate(whole["content"]):
        is_text = block["type"] == "text"
        empty: dict[str, Any] = {"text": ""} if is_text else {"input": {}}
        yield event("content_block_start", index=at, content_block=block | empty)
        given = {"type": "text_delta", "text": block["text"]} if is_text else None
        given = given or {"type": "input_json_delta", "partial_json": json.dumps(block["input"])}
        yield event("content_block_delta", index=at, delta=given)
        if answer.get("hold"):
            yield None
        yield event("content_block_stop", index=at)
    end = {"stop_reason": whole["stop_reason"], "stop_sequence": None}
    yield event("message_delta", delta=end, usage=whole["usage"])
    yield event("message_stop")


def main() -> None:
    folder, script = map(Path, sys.argv[1:])
    folder.mkdir(parents=True, exist_ok=True)
    recorder = Recorder(folder, json.loads(script.read_text()))
    sys.stdout.write(f"http://127.0.0.1:{recorder.server_port}\n")
    sys.stdout.flush()
    recorder.serve_forever()


if __name__ == "__main__":
    main()
