"""Clients of a cluster that is being broken: what they ask, how each answer ended, and whether that was allowed."""

from __future__ import annotations

import asyncio
import math
import random
import time
from collections import Counter
from dataclasses import dataclass, field
from itertools import count
from typing import TYPE_CHECKING, Any

import aiohttp
import orjson

from tests.integration.fault_cluster import make_prompt

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from tests.security.chaos_storm import Event

COMPLETIONS = "/v1/completions"
CONNECT_DEADLINE_S = 5.0
RETRY_PAUSE_S = 0.1  # after both routers refused
TIE = 1e-3  # two best logprobs closer than this may come out in either order in a batch of another size
STREAM_TOKENS, WHOLE_TOKENS = 300, 40
LENGTHS = (17, 60, 130, 250, 420, 700)
ROUTES = ("", "p-first", "d-first")
STREAMED_SHARE = 0.7
SALTED_SHARE = 0.7  # requests with a prompt that no node has cached


@dataclass(frozen=True)
class Case:
    """A prompt, a number of tokens, and the text that an undisturbed node makes of them."""

    prompt: tuple[int, ...]
    num_tokens: int
    text: str


@dataclass(eq=False)
class Request:
    """One request of a client, over all its tries. Times are `time.monotonic`."""

    case: Case
    streamed: bool
    started_s: float
    ended_s: float = math.inf
    router: str = ""
    decode: str = ""  # the node that its stream comes from, once it has begun
    text: str = ""
    finish_reason: str | None = None
    error: str = ""
    lost_connection: bool = False  # to the router, after some text
    tries: int = 0
    heard_s: float = 0.0  # when it last showed something


@dataclass
class Tally:
    """What became of the requests. Everything in `wrong` breaks a promise."""

    counts: Counter[str] = field(default_factory=Counter)
    wrong: list[str] = field(default_factory=list)
    broken_by: Counter[str] = field(default_factory=Counter)  # member and fault -> streams
    slowest_s: float = 0.0

    def add(self, request: Request, events: Iterable[Event]) -> None:
        """Judge one request that has ended."""
        verdict, blamed = judge(request, events)
        self.counts[verdict] += 1
        self.counts["failovers"] += request.tries - 1
        self.slowest_s = max(self.slowest_s, request.ended_s - request.started_s)
        if blamed:
            self.broken_by[blamed] += 1
        if verdict in ("altered", "failed", "broken_without_cause"):
            said = request.error or repr(request.text[-80:])
            meanwhile = [f"{event.member} {event.fault}" for event in events_during(request, events)]
            self.wrong.append(f"{verdict}: {request.router} -> {request.decode}, {said}; meanwhile {meanwhile}")


def judge(request: Request, events: Iterable[Event]) -> tuple[str, str]:
    """(verdict, the event that is to blame or "").

    ok.
    broken: a stream that said so while its decode node was killed or stopped, or that lost its connection while that or
    its router was; its text is a prefix of the reference.
    two_deaths: an error without a byte of text, while two nodes died.
    altered, failed, broken_without_cause: never allowed.
    """
    meanwhile = events_during(request, events)
    if not request.case.text.startswith(request.text):
        return "altered", ""
    if not request.error:
        whole = request.text == request.case.text and request.finish_reason == "length"
        return ("ok" if whole else "altered"), ""
    if request.streamed and request.text:
        guilty = (request.router, request.decode) if request.lost_connection else (request.decode,)
        causes = [event for event in meanwhile if event.breaks_streams and event.member in guilty]
        for event in sorted(causes, key=lambda event: event.is_kill, reverse=True):
            return "broken", f"{event.member} {event.fault}"
        return "broken_without_cause", ""
    deaths = [event for event in meanwhile if event.is_death and event.at_s >= request.started_s]
    return ("two_deaths", "") if len(deaths) >= 2 else ("failed", "")


def events_during(request: Request, events: Iterable[Event]) -> list[Event]:
    """Those that overlap with it."""
    return [event for event in events if event.at_s <= request.ended_s and event.over_s >= request.started_s]


class Load:
    """So many clients, each with one request at a time, until told to stop. They fail over between `routers`.

    deadline_s: within which each request must end, retries included.
    """

    def __init__(self, routers: dict[str, str], cases: Sequence[Case], num_clients: int, deadline_s: float, seed: int):
        self._routers = routers
        self._cases = cases
        self._num_clients = num_clients
        self._deadline_s = deadline_s
        self._seed = seed
        self._salts = count()
        self._stopping = asyncio.Event()
        self._under_way: set[Request] = set()
        self.events: list[Event] = []
        self.tally = Tally()

    def streams_on(self, member: str) -> int:
        """Streams that have shown text and have not ended, on this decode node or router."""
        return sum(1 for one in self._under_way if one.streamed and one.text and member in (one.decode, one.router))

    def stop(self) -> None:
        """No new requests; those under way go on."""
        self._stopping.set()

    async def run(self) -> None:
        """Until `stop`, and until the last request has ended."""
        timeout = aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_DEADLINE_S)
        connector = aiohttp.TCPConnector(limit=0, force_close=True)
        async with (
            aiohttp.ClientSession(timeout=timeout, connector=connector) as session,
            asyncio.TaskGroup() as clients,
        ):
            for number in range(self._num_clients):
                clients.create_task(self._client(session, random.Random(self._seed * 1000 + number)))

    async def _client(self, session: aiohttp.ClientSession, rng: random.Random) -> None:
        while not self._stopping.is_set():
            streamed = rng.random() < STREAMED_SHARE
            wanted = STREAM_TOKENS if streamed else WHOLE_TOKENS
            case = rng.choice([case for case in self._cases if case.num_tokens == wanted])
            request = Request(case, streamed, time.monotonic())
            self._under_way.add(request)
            try:
                async with asyncio.timeout(self._deadline_s):
                    await self._ask(session, request, rng)
            except TimeoutError:
                self.tally.counts["hung"] += 1
                silent_s = time.monotonic() - request.heard_s
                where = f"{request.router} -> {request.decode}"
                self.tally.wrong.append(f"hung: {where}, {len(request.text)} bytes, then silent for {silent_s:.1f} s")
                continue
            finally:
                request.ended_s = time.monotonic()
                self._under_way.discard(request)
            self.tally.add(request, self.events)

    async def _ask(self, session: aiohttp.ClientSession, request: Request, rng: random.Random) -> None:
        """Try one router after the other until one has said something: an answer, an error, or a piece of a stream."""
        body: dict[str, Any] = {
            "prompt": request.case.prompt, "max_tokens": request.case.num_tokens, "temperature": 0,
            "ignore_eos": True, "stream": request.streamed,
        }  # fmt: skip
        if rng.random() < SALTED_SHARE:
            body["cache_salt"] = f"salt {next(self._salts)}"
        headers = {"x-pd-route": route} if (route := rng.choice(ROUTES)) else {}
        names = rng.sample(sorted(self._routers), len(self._routers))
        while True:
            request.router = names[request.tries % len(names)]
            request.tries += 1
            try:
                await self._try(session, request, body, headers)
                return
            except (aiohttp.ClientError, OSError) as error:
                if request.text:
                    request.error = f"connection: {error!r}"
                    request.lost_connection = True
                    return
            if request.tries % len(names) == 0:
                await asyncio.sleep(RETRY_PAUSE_S)

    async def _try(
        self, session: aiohttp.ClientSession, request: Request, body: dict[str, Any], headers: dict[str, str]
    ) -> None:
        url = self._routers[request.router] + COMPLETIONS
        async with session.post(url, json=body, headers=headers) as answer:
            request.decode = answer.headers.get("x-pd-decode", "")
            if answer.content_type != "text/event-stream":
                told = orjson.loads(await answer.read())
                _take(request, told)
                return
            async for line in answer.content:
                if line.startswith(b"data: ") and line.strip() != b"data: [DONE]":
                    _take(request, orjson.loads(line[6:]))
            if not request.error and request.finish_reason is None:
                request.error = "the stream ended without a finish reason"


def _take(request: Request, told: dict[str, Any]) -> None:
    request.heard_s = time.monotonic()
    if "error" in told:
        request.error = str(told["error"])
    for choice in told.get("choices", ()):
        request.text += choice["text"]
        request.finish_reason = choice["finish_reason"]


async def make_cases(url: str, per_kind: int) -> list[Case]:
    """Cases with references of the node at `url`, without ties; `per_kind` for streams, as many for whole answers."""
    cases: list[Case] = []
    async with aiohttp.ClientSession() as session:
        for num_tokens in (STREAM_TOKENS, WHOLE_TOKENS):
            found = 0
            for number in count():
                length = LENGTHS[number % len(LENGTHS)] + number // len(LENGTHS)
                case = await _make_case(session, url, length, num_tokens)
                if case is not None:
                    cases.append(case)
                    found += 1
                if found == per_kind:
                    break
                assert number < 20 * per_kind, "hardly any prompt is free of ties"
    return cases


async def _make_case(session: aiohttp.ClientSession, url: str, length: int, num_tokens: int) -> Case | None:
    """None when two tokens were about equally likely at some place."""
    body = {"prompt": make_prompt(length), "max_tokens": num_tokens, "temperature": 0, "ignore_eos": True,
            "logprobs": 2}  # fmt: skip
    async with session.post(url + COMPLETIONS, json=body) as answer:
        assert answer.status == 200, await answer.text()
        (choice,) = orjson.loads(await answer.read())["choices"]
    assert choice["finish_reason"] == "length"
    best = [sorted(place.values(), reverse=True) for place in choice["logprobs"]["top_logprobs"]]
    tied = any(len(place) < 2 or place[0] - place[1] < TIE for place in best)
    return None if tied else Case(tuple(body["prompt"]), num_tokens, choice["text"])  # type: ignore[arg-type]
