"""The open-loop client: sends each request at its time, independent of the others."""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeAlias

import aiohttp
import orjson

from pd_cluster.bench.edits import Edit
from pd_cluster.bench.statistics import RequestRecord
from pd_cluster.errors import StartupError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from pd_cluster.bench.workload import Arrival

Prompt: TypeAlias = "list[int] | Edit"  # token ids, or a chat
PROBE_DEADLINE_S = 30.0
CONNECT_TIMEOUT_S = 30.0
OUTPUTS = ("content", "reasoning_content", "reasoning", "tool_calls")  # of a chat's delta
ODD = (ValueError, TypeError, LookupError, AttributeError)  # what an answer of an unexpected shape raises
ALPHABET = "The quick brown fox jumps over the lazy dog while 0123456789 people count every letter of the story again."


@dataclass(frozen=True, slots=True)
class Target:
    """The endpoint, and the settings that all requests share."""

    url: str
    model: str
    temperature: float = 0.0
    ignore_eos: bool = True
    route: str = ""
    api_key: str = ""
    timeout_s: float = 600.0
    cache_salt: str = ""  # requests with another one find nothing of these in a cache
    counts_tokens: bool = False  # asks for the tokens of each event, which is some work more for the server

    @property
    def headers(self) -> dict[str, str]:
        headers = {"Content-Type": "application/json"}
        if self.route:
            headers["x-pd-route"] = self.route
        if self.api_key:
            headers["Authorization"] = f"Bearer {self.api_key}"
        return headers

    def path_of(self, prompt: Prompt) -> str:
        """A chat if it is an edit."""
        return "/v1/chat/completions" if isinstance(prompt, Edit) else "/v1/completions"

    def body(self, prompt: Prompt, num_output: int) -> bytes:
        """A streamed answer of exactly `num_output` tokens, if the server supports ignore_eos."""
        return self.body_of(prompt.fields() if isinstance(prompt, Edit) else {"prompt": prompt}, num_output)

    def body_of(self, fields: dict[str, Any], num_output: int) -> bytes:
        """The same with other fields for the prompt."""
        return orjson.dumps(
            {
                "model": self.model,
                "max_tokens": num_output,
                "temperature": self.temperature,
                "ignore_eos": self.ignore_eos,
                "stream": True,
                "stream_options": {"include_usage": True, "include_timings": True}
                | ({"continuous_usage_stats": True} if self.counts_tokens else {}),
            }
            | ({"cache_salt": self.cache_salt} if self.cache_salt else {})
            | fields
        )


def open_session() -> aiohttp.ClientSession:
    """A session without a limit on connections and without a cookie jar; close it."""
    connector = aiohttp.TCPConnector(limit=0, ttl_dns_cache=600)
    return aiohttp.ClientSession(connector=connector, cookie_jar=aiohttp.DummyCookieJar())


async def find_model(session: aiohttp.ClientSession, url: str, headers: dict[str, str]) -> str:
    """The first model that the server lists. Raises StartupError."""
    answer = await fetch(session, "GET", f"{url}/v1/models", headers, None)
    try:
        return str(answer["data"][0]["id"])
    except (KeyError, IndexError, TypeError) as error:
        raise StartupError(f"{url}/v1/models lists no model: set --model") from error


async def find_positions(session: aiohttp.ClientSession, target: Target) -> int | None:
    """The most tokens of a prompt and its answer. None: the server does not tell it. Raises StartupError."""
    answer = await fetch(session, "GET", f"{target.url}/v1/models", target.headers, None)
    try:
        return next((one.get("max_model_len") for one in answer["data"] if one["id"] == target.model), None)
    except ODD:
        return None


async def find_vocabulary(session: aiohttp.ClientSession, target: Target) -> list[int]:
    """Token ids that stand for text: those of a sample sentence. Raises StartupError."""
    body = {"model": target.model, "prompt": ALPHABET, "add_special_tokens": False}
    answer = await fetch(session, "POST", f"{target.url}/tokenize", target.headers, body)
    tokens = answer.get("tokens") if isinstance(answer, dict) else None
    if not isinstance(tokens, list) or not tokens:
        raise StartupError(f"{target.url}/tokenize returned no token ids: set --vocab-size")
    return sorted({int(token) for token in tokens})


async def run_load(
    target: Target,
    requests: Sequence[tuple[Arrival, Prompt]],
    on_done: Callable[[RequestRecord], None] = lambda record: None,
) -> list[RequestRecord]:
    """Send every request at its time and wait for all of them. One record each, in the order of `requests`."""
    bodies = [  # before the clock starts
        (target.path_of(prompt), target.body(prompt, arrival.num_output)) for arrival, prompt in requests
    ]
    async with open_session() as session:
        start_s = time.perf_counter()
        tasks: list[asyncio.Task[RequestRecord]] = []
        async with asyncio.TaskGroup() as group:
            for index, ((arrival, prompt), asked) in enumerate(zip(requests, bodies, strict=True)):
                await asyncio.sleep(max(0.0, start_s + arrival.at_s - time.perf_counter()))
                num_input = 0 if isinstance(prompt, Edit) else len(prompt)  # of an edit the server tells
                record = RequestRecord(index, arrival.at_s, time.perf_counter() - start_s, num_input)
                tasks.append(group.create_task(_one(session, target, asked, record, start_s, on_done)))
        return [task.result() for task in tasks]


async def _one(
    session: aiohttp.ClientSession,
    target: Target,
    asked: tuple[str, bytes],
    record: RequestRecord,
    start_s: float,
    on_done: Callable[[RequestRecord], None],
) -> RequestRecord:
    await send(session, target, asked, record, start_s)
    on_done(record)
    return record


async def send(
    session: aiohttp.ClientSession,
    target: Target,
    asked: tuple[str, bytes],
    record: RequestRecord,
    start_s: float,
    hear: Callable[[dict[str, Any]], None] = lambda event: None,
) -> None:
    """Post the body to the path, and write times and failures to the record. `hear` gets each event of the stream."""
    timeout = aiohttp.ClientTimeout(total=target.timeout_s, sock_connect=CONNECT_TIMEOUT_S)
    path, body = asked
    record.sent_s = time.perf_counter() - start_s
    try:
        async with session.post(f"{target.url}{path}", data=body, headers=target.headers, timeout=timeout) as response:
            record.route = response.headers.get("x-pd-route", "")
            if predicted := response.headers.get("x-pd-predicted-ttft"):
                record.predicted_s = float(predicted)
            if response.status != 200:
                record.error = f"HTTP {response.status}: {_message(await response.read())}"
            else:
                await _read_stream(response, record, start_s, hear)
    except TimeoutError:
        record.error = f"no complete answer within {target.timeout_s:g} s"
    except (aiohttp.ClientError, *ODD) as error:
        record.error = f"{type(error).__name__}: {error}"
    record.end_s = time.perf_counter() - start_s


async def _read_stream(
    response: aiohttp.ClientResponse, record: RequestRecord, start_s: float, hear: Callable[[dict[str, Any]], None]
) -> None:
    """Record the time of each event with output. The stream must end with [DONE]."""
    buffer, done = b"", False
    async for piece in response.content.iter_any():
        now_s = time.perf_counter() - start_s
        *events, buffer = (buffer + piece).split(b"\n\n")
        for event in events:
            data = event.removeprefix(b"data:").strip()
            if data == b"[DONE]":
                done = True
            elif event.startswith(b"data:"):
                _note(told := orjson.loads(data), record, now_s)
                hear(told)
    if record.num_output == 0:
        record.num_output = len(record.chunk_times_s)
    if not done and not record.error:
        record.error = "the stream broke off"


def _note(event: dict[str, Any], record: RequestRecord, now_s: float) -> None:
    if "error" in event:
        record.error = f"error in the stream: {_message(orjson.dumps(event))}"
    usage, choices = event.get("usage"), event.get("choices") or ()
    has_text = any(
        choice.get("text") or choice.get("token_ids") or any((choice.get("delta") or {}).get(name) for name in OUTPUTS)
        for choice in choices
    )
    if has_text:
        record.chunk_times_s.append(now_s)
    if usage:
        record.num_output = usage.get("completion_tokens") or 0
        if has_text:
            record.tokens_so_far.append(record.num_output)
        record.num_input = record.num_input or usage.get("prompt_tokens", 0)
        record.num_cached = (usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0
        record.timings_ms = usage.get("timings") or {}


async def fetch(
    session: aiohttp.ClientSession, method: str, url: str, headers: dict[str, str], body: dict[str, Any] | None
) -> Any:
    """Fetch a JSON answer. Raises StartupError."""
    timeout = aiohttp.ClientTimeout(total=PROBE_DEADLINE_S)
    try:
        data = None if body is None else orjson.dumps(body)
        async with session.request(method, url, data=data, headers=headers, timeout=timeout) as response:
            raw = await response.read()
            if response.status != 200:
                raise StartupError(f"{url} answered {response.status}: {_message(raw)}")
            return orjson.loads(raw)
    except (aiohttp.ClientError, TimeoutError, orjson.JSONDecodeError) as error:
        raise StartupError(f"{url} does not answer as expected: {type(error).__name__}: {error}") from error


def _message(raw: bytes) -> str:
    """An OpenAI error's message, else the start of the body."""
    try:
        answer = orjson.loads(raw)
        return str(answer["error"]["message"])[:200]
    except (orjson.JSONDecodeError, KeyError, TypeError):
        return raw[:200].decode(errors="replace")
