"""A request with a JSON body, and its whole answer."""

from __future__ import annotations

import asyncio
import json
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from tests.deadlines import HANG_S

if TYPE_CHECKING:
    from collections.abc import Mapping

    import aiohttp

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
HI: dict[str, Any] = {"model": "demo", "messages": [{"role": "user", "content": "hi"}]}  # for CHAT
PROMPT: dict[str, Any] = {"model": "demo", "prompt": "x"}  # for COMPLETIONS


class Served(Protocol):
    """A node or a router, and a session towards it."""

    url: str
    session: aiohttp.ClientSession


@dataclass(frozen=True)
class Answer:
    status: int
    headers: Mapping[str, str]  # names in any case
    body: bytes

    @property
    def text(self) -> str:
        return self.body.decode()

    @property
    def json(self) -> Any:
        return json.loads(self.body)

    @property
    def ok(self) -> Any:
        """What an answer with status 200 tells."""
        assert self.status == 200, self.text
        return self.json

    @property
    def error(self) -> dict[str, Any]:
        assert self.status != 200, self.text
        error: dict[str, Any] = self.json["error"]
        return error

    @property
    def told(self) -> tuple[int, Any]:
        return self.status, self.json

    @property
    def chunks(self) -> list[Any]:
        """Of a stream, without `[DONE]`."""
        return [json.loads(line[6:]) for line in self.text.splitlines() if line.startswith("data: {")]

    @property
    def route(self) -> str:
        """The order of the legs and its reason, as a router tells it."""
        return self.headers.get("x-pd-route", "")

    @property
    def prefilled_by(self) -> str:
        return self.headers.get("x-pd-prefill", "")

    @property
    def decoded_by(self) -> str:
        return self.headers.get("x-pd-decode", "")


async def post(
    to: Served, path: str, body: Mapping[str, Any], headers: Mapping[str, str] | None = None, **fields: Any
) -> Answer:
    """`fields`: more of the body."""
    async with (
        asyncio.timeout(HANG_S),
        to.session.post(to.url + path, json={**body, **fields}, headers=headers) as response,
    ):
        return Answer(response.status, response.headers, await response.read())
