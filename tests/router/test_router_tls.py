"""A real router with two workers between clients and nodes, all over TLS, with API keys: no process tells a key."""

from __future__ import annotations

import asyncio
import json
import ssl
from hashlib import sha256
from typing import TYPE_CHECKING, Any

import aiohttp
import psutil
import pytest

from pd_connectors.protocol.keys import derive_key
from tests.certificates import Authority
from tests.router import fake_nodes as fakes
from tests.router.fake_nodes import FakeNode, running
from tests.router.router_process import signed
from tests.router.test_succession import DEADLINE_S, KEY, routers

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

pytestmark = [pytest.mark.anyio, pytest.mark.integration]


@pytest.fixture
def anyio_backend() -> str:
    """Without uvloop: its TLS connections end after the loop that a test closes."""
    return "asyncio"


SECRET, STRANGER = "pd-the-secret-of-this-test", "pd-the-key-of-a-stranger"
HELD = {"model": "demo", "prompt": "held"}


async def answer(node: FakeNode, request: Any, seen: Any) -> aiohttp.web.StreamResponse:
    held = seen.body["prompt"] == "held"
    return await (fakes.decode_until_told if held else fakes.decode)(node, request, seen)


def key_file(tmp_path: Path, **fields: Any) -> Path:
    path = tmp_path / "keys"
    path.write_text(json.dumps({"name": "one", "sha256": sha256(SECRET.encode()).hexdigest(), **fields}))
    return path


def arguments(pid: int) -> Iterator[str]:
    process = psutil.Process(pid)
    for one in (process, *process.children(recursive=True)):
        yield " ".join(one.cmdline())


async def test_keys_limits_and_orders_over_tls_and_what_is_told_of_keys(tmp_path: Path) -> None:
    files = Authority(tmp_path).issue()
    keys = key_file(tmp_path, concurrency=2, tokens_per_minute=10**9)
    server = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    server.load_cert_chain(files.cert, files.key)
    p, d = FakeNode("prefill", fakes.prefill), FakeNode("decode", answer)
    p.tls = d.tls = server
    trusting = ssl.create_default_context(cafile=files.ca)
    told: list[str] = []
    async with running(p, d):
        flags = "--prefill", p.url, "--decode", d.url, "--workers=2", "--max-queue-s=0.2"
        async with routers(tmp_path, *flags, *files.flags, f"--api-keys={keys}") as router:
            assert router.url.startswith("https://")

            async def post(secret: str, body: dict[str, Any]) -> int:
                headers = {"authorization": f"Bearer {secret}"}
                async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(ssl=trusting)) as session:  # any worker
                    url = f"{router.url}/v1/completions"
                    async with session.post(url, json=body, headers=headers) as response:
                        told.extend((await response.text(), str(response.headers)))
                        return response.status

            async def get(path: str, **headers: str) -> tuple[int, str]:
                async with (
                    aiohttp.ClientSession(connector=aiohttp.TCPConnector(ssl=trusting)) as session,
                    session.get(router.url + path, headers=headers) as response,
                ):
                    told.append(await response.text())
                    return response.status, told[-1]

            assert await post(SECRET, HELD | {"prompt": "x", "stream": True}) == 200
            assert await post(SECRET, {"prompt": 5, "cache_salt": 5}) == 400
            assert await post(STRANGER, HELD) == 401
            assert (await get("/v1/models"))[0] == 401
            assert (await get("/v1/models", **{"x-api-key": SECRET}))[0] == 200

            # two at once, whichever workers have them
            held = [asyncio.create_task(post(SECRET, HELD)) for _ in range(2)]
            await d.wait_seen(3)
            async with asyncio.timeout(DEADLINE_S):
                for _ in range(8):  # until both workers have heard of both, each connection meets any of them
                    while await post(SECRET, HELD | {"prompt": "one more"}) != 429:  # noqa: ASYNC110  # other processes
                        await asyncio.sleep(0.05)
            d.go_on.set()
            assert await asyncio.gather(*held) == [200, 200]

            order = signed("drain", p.url.removeprefix("https://"), key=derive_key(KEY))
            async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(ssl=trusting)) as session:
                url = f"{router.url}/nodes/{p.url.removeprefix('https://')}/drain"
                async with session.post(url, headers=order) as response:
                    assert response.status == 200
            for path in ("/metrics", "/nodes", "/health", "/load"):
                assert (await get(path))[0] == 200
            told.extend(arguments(router.first.pid))
            with pytest.raises(aiohttp.ClientError):
                async with aiohttp.ClientSession() as session:
                    await session.get(router.url + "/health")  # an authority that the client does not know
    told.append((tmp_path / "output").read_text())
    told.extend(str(seen.headers) + str(seen.body) for node in (p, d) for seen in node.seen)
    assert len(told) > 20
    for text in told:
        assert SECRET not in text
        assert STRANGER not in text
        assert sha256(SECRET.encode()).hexdigest() not in text
