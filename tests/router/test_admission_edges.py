"""Requests that the room of the nodes does not fit, and what refused ones leave behind."""

from __future__ import annotations

import asyncio
import gc
import logging
from hashlib import sha256
from typing import TYPE_CHECKING, Any

import openai
import pytest

from pd_router.admission import key_limits
from pd_router.admission.api_keys import parse_keys
from pd_router.admission.key_admission import AdmittedRequest
from pd_router.admission.key_limits import LONGEST_S, MAY_WAIT, MINUTE_S
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


@pytest.mark.long
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
            kept = [one for one in gc.get_objects() if type(one) is AdmittedRequest]
        finally:
            gc.enable()
        assert len(kept) == 2, "one that runs, one that waits"
        node.go_on.set()
        assert (await first)[0] == 200
        await second


async def test_a_number_that_is_too_large_is_refused(keys: Path) -> None:
    node = FakeNode("mixed", fakes.decode)
    async with running(node), serving(mixed=[node], api_keys=str(keys)) as router:
        for priority in (2**70, 10**400, 1.5, True):
            status, body, _ = await post(router, "one", BODY | {"priority": priority})
            assert status in (200, 400), (priority, body)


async def test_a_body_after_its_refusal_is_dropped(keys: Path) -> None:
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


@pytest.mark.long
async def test_no_key_is_in_logs_metrics_pages_or_traces(
    keys: Path, caplog: pytest.LogCaptureFixture, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Right ones, wrong ones, and their hashes."""
    monkeypatch.setattr(key_limits, "MAY_WAIT", 0)
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


# --- requests above a limit of concurrency


async def waiting_for_a_place(
    router: Router, node: FakeNode, num_bytes: int = 0
) -> tuple[asyncio.Task[Any], asyncio.Task[Any]]:
    """(a request of a key that may have one under way, and one more, which waits)"""
    first = asyncio.create_task(post(router, "one"))
    await node.wait_seen(1)
    second = asyncio.create_task(post(router, "one", BODY | {"prompt": "second", "user": "x" * num_bytes}))
    await until(lambda: router.count("pd_router_requests_queued") == 1)
    return first, second


async def test_one_above_the_limit_waits_and_other_keys_do_not(keys: Path) -> None:
    write(keys, line("one", concurrency=1) + line("two"))
    node = FakeNode("mixed", fakes.decode_until_told)
    async with running(node), serving(mixed=[node], api_keys=str(keys)) as router:
        first, second = await waiting_for_a_place(router, node)
        other = asyncio.create_task(post(router, "two"))
        await node.wait_seen(2)
        node.go_on.set()
        assert [(await one)[0] for one in (first, second, other)] == [200] * 3
        assert [seen.body["prompt"] for seen in node.seen].index("second") == 2
        await router.idle()
        assert router.services.admission is not None
        limits = router.services.admission._limits["one"]
        assert (limits.running, limits.inside) == (0, 0)


@pytest.mark.parametrize("mean_s", [0.0, 1.0])
async def test_one_that_waits_in_vain_is_refused(keys: Path, mean_s: float) -> None:
    """At once, if the key's requests take as long as is expected by then."""
    write(keys, line("one", concurrency=1))
    node = FakeNode("mixed", fakes.decode_until_told)
    async with running(node), serving(mixed=[node], api_keys=str(keys), max_queue_s=SHORT_S) as router:
        first = asyncio.create_task(post(router, "one"))
        await node.wait_seen(1)
        assert router.services.admission is not None
        router.services.admission._limits["one"].mean_s = mean_s
        status, _, headers = await post(router, "one")
        assert (status, 1 <= int(headers["retry-after"]) <= LONGEST_S) == (429, True)
        assert router.count("pd_router_refusals_total", key="one", reason="concurrency") == 1
        assert router.count("pd_router_queue_seconds_count") == (mean_s == 0.0)
        node.go_on.set()
        assert [(await first)[0], (await post(router, "one"))[0]] == [200, 200]
        await router.idle()


async def test_one_that_leaves_while_it_waits_takes_no_place(keys: Path) -> None:
    write(keys, line("one", concurrency=1))
    node = FakeNode("mixed", fakes.decode_until_told)
    async with running(node), serving(mixed=[node], api_keys=str(keys)) as router:
        first, second = await waiting_for_a_place(router, node)
        assert router.services.admission is not None
        limits = router.services.admission._limits["one"]
        second.cancel()
        await until(lambda: limits.running == 1)
        node.go_on.set()
        assert [(await first)[0], (await post(router, "one"))[0]] == [200, 200]
        await router.idle()


@pytest.mark.long
async def test_those_that_wait_for_their_key_share_the_queue_s_bound_of_bytes(keys: Path) -> None:
    """40 KB of 100 KB wait for their key, and as much in the queue: the next one finds no room."""
    write(keys, line("one", concurrency=1) + line("two"))
    node = FakeNode("mixed", fakes.decode_until_told)
    node.num_slots = 1
    sizes: dict[str, Any] = {"max_queue_mb": 0.1, "max_body_mb": 0.1}
    async with running(node), serving(mixed=[node], api_keys=str(keys), **sizes) as router:
        assert router.services.admission is not None
        queue = router.services.admission.queue
        first, second = await waiting_for_a_place(router, node, 40_000)
        third = asyncio.create_task(post(router, "two", BODY | {"user": "x" * 40_000}))
        await until(lambda: len(queue) == 2)
        assert 80_000 < queue.num_bytes < 81_000
        assert (await post(router, "two", BODY | {"user": "x" * 40_000}))[0] == 429
        assert 80_000 < queue.num_bytes < 81_000
        node.go_on.set()
        assert [(await one)[0] for one in (first, second, third)] == [200] * 3
        await router.idle()


@pytest.mark.long
async def test_bodies_that_wait_for_their_key_leave_memory_to_others(keys: Path) -> None:
    """400 KB of bodies are held at most, of those that wait 200: the third of 90 KB is refused."""
    write(keys, line("one", concurrency=1) + line("two"))
    node = FakeNode("mixed", fakes.decode_until_told)
    sizes: dict[str, Any] = {"max_held_mb": 0.8, "max_body_mb": 0.1}
    async with running(node), serving(mixed=[node], api_keys=str(keys), **sizes) as router:
        long = BODY | {"user": "x" * 90_000}
        ones = [*(await waiting_for_a_place(router, node, 90_000)), asyncio.create_task(post(router, "one", long))]
        await until(lambda: router.count("pd_router_requests_queued") == 2)
        assert (await post(router, "one", long))[0] == 429
        two = asyncio.create_task(post(router, "two", long))
        await node.wait_seen(2)
        node.go_on.set()
        assert [(await one)[0] for one in (*ones, two)] == [200] * 4
        await router.idle()


async def test_a_raised_limit_and_an_end_elsewhere_let_in_what_waits(keys: Path) -> None:
    write(keys, line("one", concurrency=1))
    node = FakeNode("mixed", fakes.decode_until_told)
    async with running(node), serving(mixed=[node], api_keys=str(keys)) as router:
        admission = router.services.admission
        assert admission is not None
        admission.receive_usage(1, {"one": (1, 0.0, 1)})
        waiting = [asyncio.create_task(post(router, "one")) for _ in range(3)]
        await until(lambda: len(admission.queue) == 3)
        admission.receive_usage(1, None)
        await node.wait_seen(1)
        assert len(admission.queue) == 2
        admission.adopt(parse_keys(line("one", concurrency=2).encode()))
        await node.wait_seen(2)
        assert len(admission.queue) == 1
        node.go_on.set()
        assert [(await one)[0] for one in waiting] == [200] * 3
        await router.idle()


@pytest.mark.long
@pytest.mark.parametrize(
    ("limit", "num_refused"),
    [({"concurrency": 2}, 40 - 2 - MAY_WAIT), ({"requests_per_minute": 30}, 10), ({"tokens_per_minute": 1500}, 10)],
)
async def test_a_key_that_exceeded_its_limit_is_served_when_nothing_runs(
    keys: Path, limit: dict[str, int], num_refused: int
) -> None:
    """None of the refused requests comes back: the next ones are new. A budget has refilled when a minute is over."""
    write(keys, line("one", **limit))
    node = FakeNode("mixed", fakes.decode_until_told)

    def body(number: int) -> dict[str, Any]:
        return BODY | {"prompt": f"number {number}", "max_tokens": 50}

    async with running(node), serving(mixed=[node], api_keys=str(keys)) as router:
        admission = router.services.admission
        assert admission is not None
        many = [asyncio.create_task(post(router, "one", body(number))) for number in range(40)]
        reason = next(iter(limit)).removesuffix("_per_minute")
        await until(lambda: router.count("pd_router_refusals_total", key="one", reason=reason) >= num_refused)
        node.go_on.set()
        assert {(await one)[0] for one in many} == {200, 429}
        await router.idle()
        if reason != "concurrency":
            clock = admission.clock
            admission.clock = lambda: clock() + MINUTE_S
        assert [(await post(router, "one", body(number)))[0] for number in range(40, 60)] == [200] * 20
        await router.idle()


@pytest.mark.long
async def test_openai_s_client_comes_back_when_it_is_told(keys: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(key_limits, "MAY_WAIT", 0)
    write(keys, line("one", concurrency=1))
    node = FakeNode("mixed", fakes.decode_until_told)
    async with running(node), serving(mixed=[node], api_keys=str(keys)) as router:
        first = asyncio.create_task(post(router, "one"))
        await node.wait_seen(1)
        async with openai.AsyncOpenAI(base_url=f"{router.url}/v1", api_key=SECRETS["one"], max_retries=2) as client:
            call = client.completions.with_raw_response.create(model="demo", prompt="another")
            task = asyncio.ensure_future(call)
            await until(lambda: router.count("pd_router_refusals_total", key="one", reason="concurrency") == 1)
            node.go_on.set()
            assert (await first)[0] == 200
            answer = await task
        assert (answer.status_code, answer.retries_taken, len(node.seen)) == (200, 1, 2)
        await router.idle()
