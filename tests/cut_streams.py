"""Streams that are cut after each of their frames and continued on another node: the client must not notice.

`Ask` sends a request and returns the messages of the answer: `asking` asks the app of a node, without sockets. A
harness with routers and processes in between brings an `Ask` of its own, or uses `Said` alone.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import msgspec
import pytest

from pd_connectors.protocol.stream_codec import StreamParser
from pd_http.frames import (
    AnyFrame,
    Continuation,
    Frame,
    KnownChoice,
    KnownHead,
    StreamEnd,
    StreamFailed,
    StreamHead,
)

if TYPE_CHECKING:
    from starlette.types import ASGIApp, Message

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
Ask = Callable[[str, dict[str, Any]], Awaitable[list[AnyFrame]]]


@dataclass(frozen=True)
class Case:
    """A request with an answer that is cut."""

    name: str
    path: str
    body: dict[str, Any]

    def __str__(self) -> str:
        return self.name

    def drawn(self, **sampling: Any) -> Case:
        return Case(f"{self.name} {sampling}", self.path, self.body | sampling)


class Refused(Exception):
    """The answer has another status than 200."""

    def __init__(self, status: int, content: bytes) -> None:
        super().__init__(f"{status}: {content.decode()}")
        self.status = status
        self.code = json.loads(content)["error"]["code"]


async def post(app: ASGIApp, path: str, body: dict[str, Any], headers: dict[str, str]) -> tuple[int, bytes]:
    """The status and the body of an answer of the app."""
    content, status, sent = bytearray(), 0, [json.dumps(body).encode()]

    async def receive() -> Message:
        if not sent:
            await asyncio.Event().wait()  # the client does not leave
        return {"type": "http.request", "body": sent.pop(), "more_body": False}

    async def send(message: Message) -> None:
        nonlocal status
        status = message.get("status", status)
        content.extend(message.get("body", b""))

    raw = [(name.encode(), value.encode()) for name, value in headers.items()]
    scope = {
        "type": "http", "http_version": "1.1", "method": "POST", "scheme": "http", "path": path,
        "raw_path": path.encode(), "query_string": b"", "root_path": "", "headers": raw,
        "server": ("node", 80), "client": ("router", 1),
    }  # fmt: skip
    await app(scope, receive, send)
    return status, bytes(content)


def asking(app: ASGIApp, request_id: str = "cut") -> Ask:
    """Asks this app for frames."""

    async def ask(path: str, body: dict[str, Any]) -> list[AnyFrame]:
        headers = {"x-request-id": request_id, "x-pd-frames": "1", "content-type": "application/json"}
        status, content = await post(app, path, body, headers)
        if status != 200:
            raise Refused(status, content)
        parser = StreamParser[AnyFrame](AnyFrame)
        messages = parser.feed(content)
        assert not parser.num_pending_bytes, "a message is incomplete"
        assert isinstance(messages[0], StreamHead)
        return messages

    return ask


def data_of(messages: Sequence[AnyFrame]) -> bytes:
    """The bytes of the client."""
    return b"".join(one.data for one in messages if not isinstance(one, StreamHead))


def continuation_of(messages: Sequence[AnyFrame]) -> Continuation:
    """What a router knows that has had these messages."""
    head = messages[0]
    assert isinstance(head, StreamHead)
    known: dict[int, KnownChoice] = {}
    for frame in messages:
        for one in frame.choices if isinstance(frame, Frame) else ():
            had = known.get(one.index, KnownChoice(index=one.index, token_ids=(), num_chars=0))
            known[one.index] = KnownChoice(
                index=one.index,
                token_ids=had.token_ids + one.token_ids,
                num_chars=had.num_chars + one.num_chars,
                finish_reason=one.finish_reason,
                num_cached_tokens=one.num_cached_tokens,
            )
    fields = msgspec.structs.asdict(head) | {"prompt_digest": head.prompt_digest.hex()}
    return Continuation(head=KnownHead(**fields), choices=tuple(known.values()))


def continuing(body: dict[str, Any], continuation: Continuation) -> dict[str, Any]:
    return body | {"kv_transfer_params": {"continuation": msgspec.to_builtins(continuation)}}


async def continue_at(case: Case, messages: Sequence[AnyFrame], num: int, ask: Ask, *, continues: bool) -> bytes:
    """The client's bytes when the stream is cut after its first `num` messages and goes on at `ask`.

    `continues` False: the other node is sent the request as it came, as a router without continuation would.
    """
    body = continuing(case.body, continuation_of(messages[:num])) if continues else case.body
    rest = await ask(case.path, body)
    assert isinstance(rest[-1], StreamEnd), rest[-1]
    if continues:
        assert rest[0] == messages[0], "a continued stream has the same head"
    return data_of(messages[:num]) + data_of(rest)


async def check_cuts(
    case: Case,
    first: Ask,
    second: Ask,
    *,
    same: Callable[[bytes, bytes], None],
    continues: bool = True,
    step: int = 1,
) -> int:
    """Cut after each frame (of `step`), the last one too, and hold the client's bytes to the whole answer's.

    The continued streams run at the same time. Returns the number of cuts.
    """
    messages = await first(case.path, case.body)
    assert isinstance(messages[-1], StreamEnd | StreamFailed)
    whole = data_of(messages)
    places = sorted({*range(2, len(messages), step), len(messages) - 1})
    answers = await asyncio.gather(*(continue_at(case, messages, num, second, continues=continues) for num in places))
    for num, answer in zip(places, answers, strict=True):
        try:
            same(answer, whole)
        except AssertionError as error:
            raise AssertionError(f"{case}, cut after message {num} of {len(messages)}:\n{error}") from error
    return len(places)


def same_bytes(answer: bytes, whole: bytes) -> None:
    assert answer.decode() == whole.decode()


def same_choices(answer: bytes, whole: bytes) -> None:
    """In whatever order the choices come, and whatever the node that began a prompt had cached of it."""
    given, wanted = Said.by(answer), Said.by(whole)
    for said in (given, wanted):
        said.usage.pop("prompt_tokens_details")
    assert given == wanted


def same_content(answer: bytes, whole: bytes) -> None:
    """Wherever events end. The logprobs of a token differ by rounding when its prompt is computed in other pieces."""
    given, wanted = Said.by(answer), Said.by(whole)
    for index, choice in wanted.choices.items():
        mine = given.choices[index].pop("token_logprobs")
        assert mine == pytest.approx(choice.pop("token_logprobs"), abs=1e-3), index
    assert given == wanted


@dataclass
class Said:
    """What a client reads from a stream, in whatever pieces it came."""

    choices: dict[int, dict[str, Any]] = field(default_factory=dict)
    heads: set[str] = field(default_factory=set)
    usage: Any = None  # of the last event
    ends: int = 0  # [DONE]s

    @classmethod
    def by(cls, data: bytes) -> Said:
        said = cls()
        for block in data.decode().removesuffix("\n\n").split("\n\n"):
            assert block.startswith("data: "), block
            assert not said.ends, "an event after [DONE]"
            text = block.removeprefix("data: ")
            if text == "[DONE]":
                said.ends += 1
                continue
            event = json.loads(text)
            said.heads.add(json.dumps({key: event[key] for key in ("id", "object", "created", "model")}))
            if event.get("usage") and not event["choices"]:
                said.usage = event["usage"]
            for choice in event["choices"]:
                said._add(choice)
        return said

    def _add(self, choice: dict[str, Any]) -> None:
        lists: dict[str, Any] = {name: [] for name in ("roles", "tokens", "token_logprobs", "ends", "token_ids")}
        texts = {"text": "", "content": "", "reasoning": "", "calls": {}}
        mine = self.choices.setdefault(choice["index"], lists | texts)
        mine["text"] += choice.get("text", "")
        mine["token_ids"] += choice.get("token_ids", [])
        delta = choice.get("delta", {})
        mine["roles"] += [delta["role"]] if "role" in delta else []
        mine["content"] += delta.get("content", "")
        mine["reasoning"] += delta.get("reasoning", "")
        for call in delta.get("tool_calls", ()):
            had = mine["calls"].setdefault(call["index"], {"ids": [], "names": [], "arguments": ""})
            had["ids"] += [call["id"]] if "id" in call else []
            had["names"] += [call["function"]["name"]] if "name" in call["function"] else []
            had["arguments"] += call["function"]["arguments"]
        self._add_logprobs(mine, choice.get("logprobs"))
        if choice["finish_reason"] is not None:
            mine["ends"].append((choice["finish_reason"], choice["stop_reason"]))

    @staticmethod
    def _add_logprobs(mine: dict[str, Any], logprobs: dict[str, Any] | None) -> None:
        for one in (logprobs or {}).get("content", ()):
            mine["tokens"].append((one["token"], one["bytes"], len(one["top_logprobs"])))
            mine["token_logprobs"].append(one["logprob"])
        if logprobs and "text_offset" in logprobs:
            mine["tokens"] += zip(logprobs["tokens"], logprobs["text_offset"], strict=True)
            mine["token_logprobs"] += logprobs["token_logprobs"]
