"""Clients that ask for adapters, and one that gives names other adapters meanwhile: of which one may an answer be?"""

from __future__ import annotations

import asyncio
import itertools
import math
import random
import time
from collections import Counter, defaultdict
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import aiohttp
import orjson

from pd_http.endpoints import LOAD_PATH
from tests.deadlines import HANG_S
from tests.security.chaos_load import COMPLETIONS, ROUTES, TIE

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from tests.security.chaos_storm import Event

NUM_TOKENS = 16
PAUSE_S = 0.3  # after an error, and between orders
ORDER_DEADLINE_S = 60.0
TRIES = 40
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

    async def order(self, session: aiohttp.ClientSession, name: str, content: str) -> bool:
        """Load `content` under `name`. Whether it succeeded; if not, the name may mean either."""
        meaning, router = self.names.begin(name, content), self._rng.choice(sorted(self._routers))
        body = {"lora_name": name, "lora_path": content, "load_inplace": True}
        try:
            async with (
                asyncio.timeout(ORDER_DEADLINE_S),
                session.post(self._routers[router] + LOAD_PATH, json=body) as answer,
            ):
                status, told = answer.status, await answer.text()
        except (TimeoutError, aiohttp.ClientError, OSError) as error:
            status, told = 0, repr(error)
        self.counts[f"order {status}"] += 1
        if status == 200:
            self.names.decide(name, meaning)
        elif status not in (0, 409, 502, 503):
            self.wrong.append(f"order {name}={content} at {router}: {status} {told[:300]}")
        return status == 200

    async def _give_orders(self, session: aiohttp.ClientSession, contents: Sequence[str]) -> None:
        names = sorted(self.names.meanings)
        while not self._is_over.is_set():
            await self.order(session, self._rng.choice(names), self._rng.choice(contents))
            await asyncio.sleep(self._rng.uniform(0, 2 * PAUSE_S))

    async def _client(self, session: aiohttp.ClientSession) -> None:
        names = [*sorted(self.names.meanings), self._base]
        for _ in self._left:
            name, number = self._rng.choice(names), self._rng.choice(self._numbers)
            for _ in range(TRIES):
                if await self._asked(session, name, number):
                    break
                await asyncio.sleep(PAUSE_S)
            else:
                self.wrong.append(f"{name}: no answer in {TRIES} tries")

    async def _asked(self, session: aiohttp.ClientSession, name: str, number: int) -> bool:
        """One try. Whether it was answered to its end."""
        begun_s, router = time.monotonic(), self._rng.choice(sorted(self._routers))
        stream = _Stream(router, "")
        self._streams.add(stream)
        try:
            ending = await self._read(session, stream, name, self._prompts[number])
        except (aiohttp.ClientError, OSError, TimeoutError) as error:
            ending = type(error).__name__
        finally:
            self._streams.discard(stream)
        self.counts[ending] += 1
        now_s = time.monotonic()
        allowed = {self._base} if name == self._base else self.names.during(name, begun_s, now_s)
        expected = {self._texts[content, number] for content in allowed}
        is_right = stream.text in expected if ending == "ok" else any(one.startswith(stream.text) for one in expected)
        if not is_right:
            of = [content for (content, n), text in self._texts.items() if n == number and text == stream.text]
            meanwhile = [f"{one.member} {one.fault}" for one in self.events if one.over_s >= begun_s]
            self.wrong.append(f"{name} at {router} -> {stream.decode}: of {of}, not {allowed}; meanwhile {meanwhile}")
        return ending == "ok"

    async def _read(self, session: aiohttp.ClientSession, stream: _Stream, name: str, prompt: list[int]) -> str:
        """How it ended: "ok", or why not."""
        headers = {"x-pd-route": route} if (route := self._rng.choice(ROUTES)) else {}
        more = {"cache_salt": str(self._rng.random())} if self._rng.random() < 0.3 else {}
        body = _body(name, prompt) | {"stream": True} | more
        async with (
            asyncio.timeout(ORDER_DEADLINE_S),
            session.post(self._routers[stream.router] + COMPLETIONS, json=body, headers=headers) as answer,
        ):
            stream.decode = answer.headers.get("x-pd-decode", "")
            if answer.status != 200:
                return f"{answer.status} {orjson.loads(await answer.read())['error'].get('code')}"
            ending = "cut"
            async for line in answer.content:
                if line.startswith(b"data: ") and line.strip() != b"data: [DONE]":
                    told = orjson.loads(line[6:])
                    if "error" in told:
                        return "broken"
                    for choice in told["choices"]:
                        stream.text += choice["text"]
                        ending = "ok" if choice["finish_reason"] == "length" else ending
            return ending
