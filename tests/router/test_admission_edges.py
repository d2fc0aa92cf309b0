"""Requests that the room of the nodes does not fit, and what refused ones leave behind."""

from __future__ import annotations

import asyncio
import gc
import logging
from hashlib import sha256
from typing import TYPE_CHECKING, Any

import pytest

from pd_router.admission.key_admission import Visit
from tests.otlp_receiver import collecting
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


async def held_retry(router: Router, node: FakeNode, num_bytes: int = 0) -> tuple[asyncio.Task[Any], asyncio.Task[Any]]:
    """(a request that runs, and the retry of another one that is due meanwhile and is held)"""
    body = BODY | {"prompt": "again", "user": "x" * num_bytes}
    admission = router.services.admission
    assert admission is not None
    first = asyncio.create_task(post(router, "one"))
    await node.wait_seen(1)
    status, _, headers = await post(router, "one", body)
    assert status == 429
    clock = admission.clock
    admission.clock = lambda: clock() + int(headers["retry-after"])
    retry = asyncio.create_task(post(router, "one", body))
    limits = admission._limits["one"]
    await until(lambda: limits._held)
    return first, retry


async def test_a_retry_that_is_due_is_held_until_a_place_is_free(keys: Path) -> None:
    write(keys, line("one", concurrency=1))
    node = FakeNode("mixed", fakes.decode_until_told)
    async with running(node), serving(mixed=[node], api_keys=str(keys)) as router:
        first, retry = await held_retry(router, node)
        assert len(node.seen) == 1
        node.go_on.set()
        assert [(await one)[0] for one in (first, retry)] == [200, 200]
        await router.idle()
        assert router.services.admission is not None
        assert router.services.admission._limits["one"].running == 0


async def test_a_held_retry_that_gets_no_place_is_refused_and_one_that_leaves_takes_none(keys: Path) -> None:
    write(keys, line("one", concurrency=1))
    node = FakeNode("mixed", fakes.decode_until_told)
    async with running(node), serving(mixed=[node], api_keys=str(keys), max_queue_s=0.05) as router:
        first, retry = await held_retry(router, node)
        status, _, headers = await retry
        assert (status, int(headers["retry-after"]) >= 1) == (429, True)
        node.go_on.set()
        assert (await first)[0] == 200
        await router.idle()
    node = FakeNode("mixed", fakes.decode_until_told)
    async with running(node), serving(mixed=[node], api_keys=str(keys)) as router:
        first, retry = await held_retry(router, node)
        assert router.services.admission is not None
        assert router.services.admission._held_bytes > 0
        retry.cancel()
        limits = router.services.admission._limits["one"]
        await until(lambda: not limits._held)
        assert router.services.admission._held_bytes == 0
        node.go_on.set()
        assert (await first)[0] == 200
        assert limits.running == 0
        await router.idle()


async def test_no_key_is_in_logs_metrics_pages_or_traces(
    keys: Path, caplog: pytest.LogCaptureFixture, capfd: pytest.CaptureFixture[str]
) -> None:
    """Right ones, wrong ones, and their hashes."""
    write(keys, line("one", concurrency=1) + line("two"))
    caplog.set_level(logging.DEBUG)
    secrets = [*SECRETS.values(), "pd-wrong-key"]
    p, d = FakeNode("prefill", fakes.prefill), FakeNode("decode", fakes.decode_until_told)
    with collecting() as collector:
        settings: dict[str, Any] = {"otlp_url": collector.url, "trace_ratio": 1.0, "request_log": "all"}
        async with running(p, d), serving([p], [d], api_keys=str(keys), **settings) as router:
            first = asyncio.create_task(post(router, "one"))
            await d.wait_seen(1)
            assert (await post(router, "one"))[0] == 429
            assert (await post(router, headers={"x-api-key": "pd-wrong-key"}))[0] == 401
            d.go_on.set()
            assert (await first)[0] == 200
            assert (await post(router, headers={"x-api-key": SECRETS["two"]}))[0] == 200
            told = []
            for path in ("/metrics", "/nodes", "/load", "/dashboard", "/dashboard/state"):
                async with router.session.get(router.url + path) as response:
                    assert response.status == 200, path
                    told.append(await response.text())
            await until(lambda: len({span.trace_id for span in collector.spans}) >= 2)
            await router.idle()
        told += [str(collector.spans), caplog.text, *capfd.readouterr()]
    assert any('"key":"two"' in text for text in told), "the log was searched"
    assert 'key="one"' in told[0]
    hidden = [*secrets, *(sha256(secret.encode()).hexdigest() for secret in secrets)]
    assert [(secret, text[:80]) for secret in hidden for text in told if secret in text] == []


async def test_held_retries_and_the_queue_share_one_bound_of_bytes(keys: Path) -> None:
    """40 KB each of 100 KB: one is held and one waits in the queue; the next one finds no room."""
    write(keys, line("one", concurrency=1) + line("two"))
    node = FakeNode("mixed", fakes.decode_until_told)
    node.num_slots = 1
    sizes: dict[str, Any] = {"max_queue_mb": 0.1, "max_body_mb": 0.1}
    async with running(node), serving(mixed=[node], api_keys=str(keys), **sizes) as router:
        admission = router.services.admission
        assert admission is not None
        first, retry = await held_retry(router, node, 40_000)
        body = BODY | {"user": "x" * 40_000}
        second = asyncio.create_task(post(router, "two", body))
        await until(lambda: len(admission.queue) == 1)
        assert 80_000 < admission.waiting_bytes < 81_000
        status, _, headers = await post(router, "two", body)
        assert (status, int(headers["retry-after"]) >= 1) == (429, True)
        assert 80_000 < admission.waiting_bytes < 81_000
        node.go_on.set()
        assert [(await one)[0] for one in (first, retry, second)] == [200] * 3
        assert admission.waiting_bytes == 0
        await router.idle()


@pytest.mark.parametrize("bound", [{"_max_queue_bytes": 10}, {"_max_queue_bytes": 60}, {"_max_queue": 0}])
async def test_a_retry_is_not_held_beyond_the_bounds_of_the_queue(keys: Path, bound: dict[str, int]) -> None:
    write(keys, line("one", concurrency=1))
    node = FakeNode("mixed", fakes.decode_until_told)
    async with running(node), serving(mixed=[node], api_keys=str(keys)) as router:
        admission = router.services.admission
        assert admission is not None
        for name, most in bound.items():
            setattr(admission, name, most)
        first = asyncio.create_task(post(router, "one"))
        await node.wait_seen(1)
        status, _, headers = await post(router, "one", BODY | {"prompt": "again"})
        clock = admission.clock
        admission.clock = lambda: clock() + int(headers["retry-after"])
        status, body, headers = await post(router, "one", BODY | {"prompt": "again"})
        assert (status, int(headers["retry-after"]) >= 1) == (429, True)
        assert "the nodes are busy" in str(body), "at once: a retry that was held in vain hears of its key"
        node.go_on.set()
        assert (await first)[0] == 200
        await router.idle()
