"""Clients that ask for adapters, and one that gives names other adapters meanwhile: of which one may an answer be?"""

from __future__ import annotations

import asyncio
import itertools
import json
import logging
import math
import random
import time
from collections import Counter, defaultdict
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import aiohttp
import orjson

from pd_http.endpoints import LOAD_PATH, UNLOAD_PATH
from tests.deadlines import HANG_S
from tests.security.chaos_load import COMPLETIONS, ROUTES, TIE

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from tests.security.chaos_storm import Event

logger = logging.getLogger(__name__)
NUM_TOKENS = 16
PAUSE_S = 0.3  # after an error, and between orders
ORDER_DEADLINE_S = 60.0
TRIES = 40
TOLD_EVERY = 100  # requests between two lines of the log
# The second: while a node that the router has not seen yet might serve the name
ABSENT = ("404 model_not_found", "503 no_healthy_node")
UNLOADED = ""  # in place of a content
UNLOADED_SHARE = 0.15  # of orders
WHOLE_SHARE = 0.3  # of requests; the others are streamed
Texts = dict[tuple[str, int], str]  # by content and prompt


@dataclass
class Meaning:
    """What a name may mean from the begin of an order to the success of a later one."""

    content: str
    from_s: float
    to_s: float = math.inf


@dataclass
class Names:
    """What each name may have meant, and when. Times are `time.monotonic`."""

    meanings: defaultdict[str, list[Meaning]] = field(default_factory=lambda: defaultdict(list))

    def begin(self, name: str, content: str) -> Meaning:
        meaning = Meaning(content, time.monotonic())
        self.meanings[name].append(meaning)
        return meaning

    def decide(self, name: str, meaning: Meaning) -> None:
        """The order has succeeded: requests from now on mean this."""
        for other in self.meanings[name]:
            if other is not meaning:
                other.to_s = min(other.to_s, time.monotonic())

    def during(self, name: str, from_s: float, to_s: float) -> set[str]:
        return {one.content for one in self.meanings[name] if one.from_s <= to_s and one.to_s >= from_s}


async def texts_of(url: str, contents: Sequence[str], prompts: Sequence[list[int]]) -> Texts:
    """Answers of an undisturbed node to those prompts that no content answers with a tie, or as another one does."""
    found: Texts = {}
    async with aiohttp.ClientSession() as session:
        for number, prompt in enumerate(prompts):
            answers = [await _reference(session, url, content, prompt) for content in contents]
            if "" not in answers and len({text[:4] for text in answers}) == len(contents):
                found |= {(content, number): text for content, text in zip(contents, answers, strict=True)}
    return found


async def _reference(session: aiohttp.ClientSession, url: str, content: str, prompt: list[int]) -> str:
    """ "": two tokens were about equally likely at some place."""
    async with session.post(url + COMPLETIONS, json=_body(content, prompt) | {"logprobs": 2}) as answer:
        assert answer.status == 200, await answer.text()
        (choice,) = orjson.loads(await answer.read())["choices"]
    best = [sorted(place.values(), reverse=True) for place in choice["logprobs"]["top_logprobs"]]
    return "" if any(len(place) < 2 or place[0] - place[1] < TIE for place in best) else choice["text"]


def _body(model: str, prompt: list[int]) -> dict[str, Any]:
    return {"model": model, "prompt": prompt, "max_tokens": NUM_TOKENS, "temperature": 0, "ignore_eos": True}


@dataclass(eq=False)
class _Stream:
    """A request that has begun to answer."""

    router: str
    decode: str
    text: str = ""


class AdapterLoad:
    """`num` requests by so many clients. `base`: the name of the model, which is a content, too."""

    def __init__(
        self, routers: Mapping[str, str], texts: Texts, prompts: Sequence[list[int]], base: str, num: int, seed: int
    ) -> None:
        self._routers, self._texts, self._prompts, self._base = dict(routers), texts, prompts, base
        self._numbers = sorted({number for _, number in texts})
        self._left = itertools.repeat(None, num)
        self._rng = random.Random(seed)
        self._streams: set[_Stream] = set()
        self._is_over = asyncio.Event()
        self.names = Names()
        self.events: list[Event] = []
        self.counts: Counter[str] = Counter()
        self.wrong: list[str] = []
        self.seconds: list[float] = []  # of each request, with all of its tries
        self._begun_s = time.monotonic()

    @property
    def told(self) -> dict[str, Any]:
        """For the log."""
        ranked = sorted(self.seconds) or [0.0]
        seconds = {f"p{part}": round(ranked[len(ranked) * part // 100], 2) for part in (50, 90, 99)}
        return {
            "requests": len(self.seconds), "took_s": round(time.monotonic() - self._begun_s), "s_each": seconds,
            "slowest_s": round(ranked[-1], 1), **dict(sorted(self.counts.items())), "num_wrong": len(self.wrong),
        }  # fmt: skip

    def streams_on(self, member: str) -> int:
        """For the storm."""
        return sum(member in (one.router, one.decode) for one in self._streams if one.text)

    async def run(self, num_clients: int, contents: Sequence[str]) -> None:
        """All requests, while names get other contents."""
        timeout = aiohttp.ClientTimeout(total=None, sock_connect=HANG_S)
        async with aiohttp.ClientSession(
            timeout=timeout, connector=aiohttp.TCPConnector(limit=0, force_close=True)
        ) as session:
            orders = asyncio.create_task(self._give_orders(session, contents))
            await asyncio.gather(*(self._client(session) for _ in range(num_clients)))
            self._is_over.set()
            await orders

    async def load_all(self, session: aiohttp.ClientSession, contents: Sequence[str]) -> None:
        """Give each name a content, though nodes may be away."""
        for name, content in zip(sorted(self.names.meanings), contents, strict=False):
            for _ in range(TRIES):
                if await self.order(session, name, content):
                    break
                await asyncio.sleep(4 * PAUSE_S)  # nodes keep what a dead router had them prepare for YIELDS_S
            else:
                self.wrong.append(f"{name}: not loaded in {TRIES} tries")

    async def order(self, session: aiohttp.ClientSession, name: str, content: str) -> bool:
        """Load `content` under `name`, or unload it. Whether it succeeded; if not, the name may mean either."""
        meaning, router = self.names.begin(name, content), self._rng.choice(sorted(self._routers))
        body = {"lora_name": name} | ({"lora_path": content, "load_inplace": True} if content else {})
        path = LOAD_PATH if content else UNLOAD_PATH
        try:
            async with (
                asyncio.timeout(ORDER_DEADLINE_S),
                session.post(self._routers[router] + path, json=body) as answer,
            ):
                status, told = answer.status, await answer.text()
        except (TimeoutError, aiohttp.ClientError, OSError) as error:
            status, told = 0, repr(error)
        self.counts[f"{'order' if content else 'unload'} {status}"] += 1
        if status == 200:
            self.names.decide(name, meaning)
        elif status not in (0, 409, 502, 503) and not (status == 404 and not content):  # it may be unloaded already
            self.wrong.append(f"order {name}={content} at {router}: {status} {told[:300]}")
        return status == 200

    async def _give_orders(self, session: aiohttp.ClientSession, contents: Sequence[str]) -> None:
        names = sorted(self.names.meanings)
        while not self._is_over.is_set():
            name, is_load = self._rng.choice(names), self._rng.random() >= UNLOADED_SHARE
            if not is_load:
                await self.order(session, name, UNLOADED)
                await asyncio.sleep(self._rng.uniform(0, 2 * PAUSE_S))
            await self.order(session, name, self._rng.choice(contents))
            await asyncio.sleep(self._rng.uniform(0, 2 * PAUSE_S))

    async def _client(self, session: aiohttp.ClientSession) -> None:
        names = [*sorted(self.names.meanings), self._base]
        for _ in self._left:
            name, number = self._rng.choice(names), self._rng.choice(self._numbers)
            begun_s = time.monotonic()
            for _ in range(TRIES):
                ending = await self._asked(session, name, number)
                if ending == "ok":
                    break
                name = self._rng.choice(names) if ending == "absent" else name
                await asyncio.sleep(PAUSE_S)
            else:
                self.wrong.append(f"{name}: no answer in {TRIES} tries")
            self.seconds.append(time.monotonic() - begun_s)
            if len(self.seconds) % TOLD_EVERY == 0:
                logger.info("%s", json.dumps(self.told))

    async def _asked(self, session: aiohttp.ClientSession, name: str, number: int) -> str:
        """One try. How it ended: "ok", "absent" if the name may mean nothing, or why not."""
        begun_s, router = time.monotonic(), self._rng.choice(sorted(self._routers))
        stream = _Stream(router, "")
        self._streams.add(stream)
        try:
            ending = await self._read(session, stream, name, self._prompts[number])
        except (aiohttp.ClientError, OSError, TimeoutError) as error:
            ending = type(error).__name__
        finally:
            self._streams.discard(stream)
        allowed = {self._base} if name == self._base else self.names.during(name, begun_s, time.monotonic())
        if ending in ABSENT and UNLOADED in allowed:
            ending = "absent"
        self.counts[ending] += 1
        expected = {self._texts[content, number] for content in allowed - {UNLOADED}}
        begins = not stream.text or any(one.startswith(stream.text) for one in expected)
        if not (stream.text in expected if ending == "ok" else begins):
            of = [content for (content, n), text in self._texts.items() if n == number and text == stream.text]
            meanwhile = [f"{one.member} {one.fault}" for one in self.events if one.over_s >= begun_s]
            self.wrong.append(f"{name} at {router} -> {stream.decode}: {ending}, of {of}, not {allowed}; {meanwhile}")
        return ending

    async def _read(self, session: aiohttp.ClientSession, stream: _Stream, name: str, prompt: list[int]) -> str:
        """How it ended: "ok", or why not."""
        headers = {"x-pd-route": route} if (route := self._rng.choice(ROUTES)) else {}
        more = {"cache_salt": str(self._rng.random())} if self._rng.random() < 0.3 else {}
        is_streamed = self._rng.random() >= WHOLE_SHARE
        body = _body(name, prompt) | {"stream": is_streamed} | more
        async with (
            asyncio.timeout(ORDER_DEADLINE_S),
            session.post(self._routers[stream.router] + COMPLETIONS, json=body, headers=headers) as answer,
        ):
            stream.decode = answer.headers.get("x-pd-decode", "")
            if answer.status != 200:
                return f"{answer.status} {orjson.loads(await answer.read())['error'].get('code')}"
            if not is_streamed:
                return _take(stream, orjson.loads(await answer.read()))
            endings = [
                _take(stream, orjson.loads(line[6:]))
                async for line in answer.content
                if line.startswith(b"data: ") and line.strip() != b"data: [DONE]"
            ]
            return "broken" if "broken" in endings else endings[-1] if endings else "cut"


def _take(stream: _Stream, told: dict[str, Any]) -> str:
    """Add what a chunk or a whole answer has. How it would end if nothing more came."""
    if "error" in told:
        return "broken"
    ending = "cut"
    for choice in told["choices"]:
        stream.text += choice["text"]
        ending = "ok" if choice["finish_reason"] == "length" else "cut"
    return ending
