"""Requests that the room of the nodes does not fit, and what refused ones leave behind."""

from __future__ import annotations

import asyncio
import gc
from typing import TYPE_CHECKING, Any

import pytest

from pd_router.admission.key_admission import Visit
from tests.router import fake_nodes as fakes
from tests.router.fake_nodes import FakeNode, running
from tests.router.router_process import serving, until
from tests.router.test_admission import BODY, SECRETS, keys, line, post, write

if TYPE_CHECKING:
    from pathlib import Path

    from tests.router.router_process import Router

__all__ = ["keys"]
pytestmark = pytest.mark.anyio
SHORT_S = 0.2


async def embed(router: Router, text: str) -> int:
    return (await post(router, "one", {"model": "demo", "input": text}, "/v1/embeddings"))[0]


async def test_a_prompt_alone_waits_for_no_decode_node(keys: Path) -> None:
    p, d = FakeNode("prefill", fakes.decode), FakeNode("decode", fakes.decode_until_told)
    d.num_slots = 1
    async with running(p, d), serving([p], [d], api_keys=str(keys), max_queue_s=SHORT_S) as router:
        assert router.services.admission is not None
        busy = asyncio.create_task(post(router, "one", BODY))
        await d.wait_seen(1)
        assert await asyncio.gather(*(embed(router, text) for text in "abc")) == [200] * 3
        d.go_on.set()
        await busy
        await router.idle()
        assert router.services.admission.room.running == {}


async def test_a_prompt_alone_needs_no_decode_node(keys: Path) -> None:
    p = FakeNode("prefill", fakes.decode)
    settings: dict[str, Any] = {"api_keys": str(keys), "max_queue_s": SHORT_S, "start_empty": True}
    async with running(p), serving([p], **settings) as router:
        assert await asyncio.gather(*(embed(router, text) for text in "abc")) == [200] * 3


@pytest.mark.parametrize(("num_slots", "num_samples"), [(4, 8), (4, 4), (1, 1)])
@pytest.mark.parametrize("num_keys", [1, 2])
async def test_idle_nodes_take_any_request(keys: Path, num_slots: int, num_samples: int, num_keys: int) -> None:
    node = FakeNode("mixed", fakes.decode)
    node.num_slots = num_slots
    async with running(node), serving(mixed=[node], api_keys=str(keys), max_queue_s=SHORT_S) as router:
        for name in ("one", "two")[:num_keys]:
            assert (await post(router, name))[0] == 200
        assert router.services.admission is not None
        router.services.admission._counted_s = -1e9
        assert (await post(router, "one", BODY | {"n": num_samples}))[0] == 200
        await router.idle()


@pytest.mark.parametrize("settings", [{"max_queue": 1}, {"max_queue_s": SHORT_S}])
async def test_a_refused_request_is_not_kept(keys: Path, settings: dict[str, Any]) -> None:
    node = FakeNode("mixed", fakes.decode_until_told)
    node.num_slots = 1
    async with running(node), serving(mixed=[node], api_keys=str(keys), **settings) as router:
        first = asyncio.create_task(post(router))
        await node.wait_seen(1)
        second = asyncio.create_task(post(router, body=BODY | {"prompt": "second"}))
        await until(lambda: router.count("pd_router_requests_queued") == 1)
        gc.collect()
        gc.disable()
        try:
            assert (await post(router, body=BODY | {"prompt": "third"}))[0] == 429
            kept = [one.content for one in gc.get_objects() if type(one) is Visit and b"third" in one.content]
        finally:
            gc.enable()
        assert kept == []
        node.go_on.set()
        assert (await first)[0] == 200
        await second


async def test_a_number_that_is_too_large_is_refused(keys: Path) -> None:
    node = FakeNode("mixed", fakes.decode)
    async with running(node), serving(mixed=[node], api_keys=str(keys)) as router:
        for priority in (2**70, 10**400, 1.5, True):
            status, body, _ = await post(router, "one", BODY | {"priority": priority})
            assert status in (200, 400), (priority, body)


async def test_a_body_behind_its_refusal_is_dropped(keys: Path) -> None:
    """The client sends a part of the body, reads the refusal, sends the rest, and uses the connection again."""
    node = FakeNode("mixed", fakes.decode)
    write(keys, line("one"))
    async with running(node), serving(mixed=[node], api_keys=str(keys)) as router:
        host, port = router.url.removeprefix("http://").split(":")
        reader, writer = await asyncio.open_connection(host, int(port))
        head = b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
        body = b'{"model": "demo", "prompt": "x"}'
        for sent in (0, 5, len(body)):
            writer.write(head + b"content-length: %d\r\n\r\n" % len(body) + body[:sent])
            assert b"401" in await reader.readuntil(b"\r\n\r\n")
            writer.write(body[sent:])
            await reader.readuntil(b"}}")
        secret = SECRETS["one"].encode()
        writer.write(head + b"x-api-key: %b\r\ncontent-length: %d\r\n\r\n" % (secret, len(body)) + body)
        assert b" 200 " in await reader.readline()
        writer.close()
        assert len(node.seen) == 1
        await router.idle()
