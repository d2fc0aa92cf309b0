"""A key that exceeded its limit, at a real cluster: requests that do not come back keep nothing from those that do."""

from __future__ import annotations

import asyncio
import time
from typing import TYPE_CHECKING

import aiohttp
import pytest

from pd_router.admission.api_keys import new_key

if TYPE_CHECKING:
    from pathlib import Path

    from tests.cluster import Launcher

pytestmark = [pytest.mark.slow, pytest.mark.integration, pytest.mark.timeout(300)]
EVERY_S, NUM_NEW = 2.0, 30


async def statuses_of(url: str, key: str) -> tuple[list[int], list[int]]:
    """40 requests at once, then a new one every 2 s for a minute. None comes back."""
    headers = {"authorization": f"Bearer {key}"}

    async def ask(session: aiohttp.ClientSession, text: str) -> int:
        body = {"prompt": text, "max_tokens": 20, "ignore_eos": True}
        async with session.post(f"{url}/v1/completions", json=body, headers=headers) as response:
            await response.read()
            return response.status

    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as session:
        first = await asyncio.gather(*(ask(session, f"one of many, {number}") for number in range(40)))
        begun_s, then = time.monotonic(), list[int]()
        for number in range(NUM_NEW):
            await asyncio.sleep(max(0.0, begun_s + number * EVERY_S - time.monotonic()))
            then.append(await ask(session, f"a new one, {number}"))
    return list(first), then


def test_new_requests_are_served_while_nothing_runs(launcher: Launcher, tmp_path: Path) -> None:
    key, text = new_key("one")
    (tmp_path / "keys").write_text(text.rstrip("}\n") + ', "concurrency": 2}\n')
    router = launcher.router(f"--api-keys={tmp_path / 'keys'}", mixed=[launcher.node("mixed")])
    first, then = asyncio.run(statuses_of(router.url, key))
    assert set(first) <= {200, 429}
    assert 2 + 16 <= first.count(200) < 40
    assert then == [200] * NUM_NEW
