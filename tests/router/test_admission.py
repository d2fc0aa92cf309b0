"""Keys, limits and turns through the real router: what clients get, and what nodes see of it."""

from __future__ import annotations

import asyncio
import json
import logging
from hashlib import sha256
from typing import TYPE_CHECKING, Any

import aiohttp
import pytest

from pd_http.errors import StartupError
from pd_router.admission import key_file, key_limits
from tests.router import fake_nodes as fakes
from tests.router.fake_nodes import FakeNode, running
from tests.router.router_process import Router, serving, until

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

pytestmark = pytest.mark.anyio
SECRETS = {name: f"pd-secret-of-{name}" for name in ("one", "two")}
BODY = {"model": "demo", "prompt": "Once upon a time"}
COMPLETIONS = "/v1/completions"


def line(name: str, **fields: Any) -> str:
    return json.dumps({"name": name, "sha256": sha256(SECRETS[name].encode()).hexdigest(), **fields}) + "\n"


def write(path: Path, text: str | None) -> None:
    """None: remove the file."""
    if text is None:
        path.unlink()
    else:
        path.write_text(text)


@pytest.fixture
def keys(tmp_path: Path) -> Path:
    path = tmp_path / "keys"
    write(path, line("one") + line("two"))
    return path


async def post(
    router: Router,
    name: str = "one",
    body: dict[str, Any] | None = None,
    path: str = COMPLETIONS,
    headers: dict[str, str] | None = None,
) -> tuple[int, dict[str, Any], Mapping[str, str]]:
    given = headers or {"authorization": f"Bearer {SECRETS[name]}"}
    async with router.session.post(router.url + path, json=body or BODY, headers=given) as response:
        return response.status, await response.json(), response.headers


async def test_a_request_without_a_key_is_refused_in_its_own_dialect(keys: Path) -> None:
    node = FakeNode("mixed", fakes.decode)
    async with running(node), serving(mixed=[node], api_keys=str(keys)) as router:
        status, body, told = await post(router, headers={"x-other": "1"})
        assert (status, body["error"]["code"]) == (401, "invalid_api_key")
        assert told["www-authenticate"] == "Bearer"
        status, body, _ = await post(router, path="/v1/messages", headers={"x-api-key": "wrong"})
        assert (status, body["type"], body["error"]["type"]) == (401, "error", "authentication_error")
        for path in ("/v1/models", "/v1/models/demo", "/server_info"):
            async with router.session.get(router.url + path) as response:
                assert (response.status, response.headers["www-authenticate"]) == (401, "Bearer")
        for path in ("/tokenize", "/v1/messages/count_tokens"):
            assert (await post(router, path=path, headers={"authorization": "Bearer "}))[0] == 401
        for path in ("/health", "/metrics", "/nodes", "/version"):
            async with router.session.get(router.url + path) as response:
                assert response.status == 200
        assert node.seen == []
        assert router.count("pd_router_refusals_total", key="", reason="key") == 7
        await router.idle()


async def test_nodes_get_the_salt_and_the_priority_of_the_key_and_no_key(keys: Path) -> None:
    write(keys, line("one", priority=2) + line("two", salt="team"))
    p, d = FakeNode("prefill", fakes.prefill), FakeNode("decode", fakes.decode)
    async with running(p, d), serving([p], [d], api_keys=str(keys)) as router:
        asked = BODY | {"cache_salt": "mine", "priority": -5}
        for name, body in (("one", BODY), ("one", asked), ("two", asked), ("two", BODY | {"priority": 7})):
            assert (await post(router, name, body))[0] == 200
        for node in (p, d):
            told = [(seen.body.get("cache_salt"), seen.body.get("priority")) for seen in node.seen]
            assert told == [("one/", 2), ("one/mine", 2), ("team/mine", None), ("team/", 7)]
            assert [seen.headers["x-pd-client"] for seen in node.seen] == ["key:one", "key:one", "key:two", "key:two"]
            assert not any({"authorization", "x-api-key"} & seen.headers.keys() for seen in node.seen)
        async with router.session.get(router.url + "/v1/models", headers={"x-api-key": SECRETS["one"]}) as response:
            assert response.status == 200
        wrongs: list[dict[str, Any]] = [{"cache_salt": 5}, {"priority": "high"}, {"cache_salt": ["a"]}]
        for wrong in wrongs:
            status, refusal, _ = await post(router, "one", BODY | wrong)
            assert (status, refusal["error"]["param"]) == (400, next(iter(wrong)))
        await router.idle()


async def test_without_keys_nothing_changes() -> None:
    node = FakeNode("mixed", fakes.decode)
    async with running(node), serving(mixed=[node]) as router:
        headers = {"authorization": "Bearer node's"}
        assert (await post(router, body=BODY | {"cache_salt": "s", "priority": -1}, headers=headers))[0] == 200
        assert node.seen[0].headers["authorization"] == "Bearer node's"
        assert (node.seen[0].body["cache_salt"], node.seen[0].body["priority"]) == ("s", -1)


async def test_a_limit_says_when_to_come_again(keys: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(key_limits, "MAY_WAIT", 0)
    write(keys, line("one", requests_per_minute=60, concurrency=1) + line("two"))
    node = FakeNode("mixed", fakes.decode_until_told)
    async with running(node), serving(mixed=[node], api_keys=str(keys)) as router:
        first = asyncio.create_task(post(router))
        await node.wait_seen(1)
        status, body, headers = await post(router, body=BODY | {"prompt": "another"})
        assert (status, body["error"]["type"], headers["retry-after"]) == (429, "rate_limit_error", "1")
        assert "1 s" in body["error"]["message"]
        node.go_on.set()
        assert (await first)[0] == 200
        assert (await post(router, "two"))[0] == 200
        assert router.count("pd_router_refusals_total", key="one", reason="concurrency") == 1
        assert (await post(router, body=BODY | {"prompt": "another"}))[0] == 200
        await router.idle()


async def test_tokens_of_answers_count(keys: Path) -> None:
    async def answer(node: FakeNode, request: Any, seen: Any) -> aiohttp.web.StreamResponse:
        return aiohttp.web.json_response({"usage": {"prompt_tokens": 1000, "completion_tokens": 5000}})

    write(keys, line("one", tokens_per_minute=6000))
    node = FakeNode("mixed", answer)
    async with running(node), serving(mixed=[node], api_keys=str(keys)) as router:
        assert (await post(router))[0] == 200
        status, _, headers = await post(router)
        assert status == 429
        assert 1 <= int(headers["retry-after"]) <= 8  # for what the next one is expected to use: 500 tokens, or so


async def test_a_request_that_fails_costs_no_tokens(keys: Path) -> None:
    write(keys, line("one", tokens_per_minute=600, concurrency=1))
    node = FakeNode("mixed", fakes.refuse(400))
    async with running(node), serving(mixed=[node], api_keys=str(keys)) as router:
        assert [(await post(router))[0] for _ in range(10)] == [400] * 10


@pytest.mark.long
async def test_when_the_nodes_are_full_keys_take_turns(keys: Path) -> None:
    node = FakeNode("mixed", fakes.decode_until_told)
    node.num_slots = 1
    async with running(node), serving(mixed=[node], api_keys=str(keys)) as router:
        greedy = [asyncio.create_task(post(router, "one", BODY | {"n": 1, "prompt": f"g{i}"})) for i in range(6)]
        await until(lambda: router.count("pd_router_requests_queued") == 5)
        quiet = asyncio.create_task(post(router, "two", BODY | {"prompt": "quiet"}))
        await until(lambda: router.count("pd_router_requests_queued") == 6)
        node.go_on.set()
        assert {(await one)[0] for one in (*greedy, quiet)} == {200}
        prompts = [seen.body["prompt"] for seen in node.seen]
        assert prompts.index("quiet") <= 2
        assert router.count("pd_router_queue_seconds_count") == 6
        await router.idle()
        assert router.services.admission is not None
        assert router.services.admission.room.running == {}


async def test_a_full_queue_keeps_the_place_of_a_key_that_asks_for_little(keys: Path) -> None:
    node = FakeNode("mixed", fakes.decode_until_told)
    node.num_slots = 1
    async with running(node), serving(mixed=[node], api_keys=str(keys), max_queue=2) as router:
        greedy = []
        for num_queued in (0, 1, 2):  # one after the other: of requests at once any may come last
            greedy.append(asyncio.create_task(post(router, "one", BODY | {"prompt": f"g{num_queued}"})))
            await node.wait_seen(1)
            await until(lambda num=num_queued: router.count("pd_router_requests_queued") == num)  # type: ignore[misc]
        status, body, headers = await post(router, "one", BODY | {"prompt": "too much"})
        assert (status, body["error"]["code"]) == (429, "rate_limit_exceeded")
        assert int(headers["retry-after"]) >= 1
        quiet = asyncio.create_task(post(router, "two"))
        status, _, _ = await greedy[2]  # the last of the greedy ones made room
        assert status == 429
        node.go_on.set()
        assert [(await one)[0] for one in (greedy[0], greedy[1], quiet)] == [200] * 3
        await router.idle()


async def test_the_bodies_that_wait_are_bounded_too(keys: Path) -> None:
    """40 KB each of 100 KB: the third of the greedy key is refused, and the other key takes its last place."""
    node = FakeNode("mixed", fakes.decode_until_told)
    node.num_slots = 1
    sizes: dict[str, Any] = {"max_queue_mb": 0.1, "max_body_mb": 0.1}
    async with running(node), serving(mixed=[node], api_keys=str(keys), **sizes) as router:
        assert router.services.admission is not None
        queue = router.services.admission.queue

        def send(name: str, num_bytes: int = 40_000) -> asyncio.Task[Any]:
            return asyncio.create_task(post(router, name, BODY | {"user": "x" * num_bytes}))

        first = send("one")
        await node.wait_seen(1)
        second = send("one")
        await until(lambda: len(queue) == 1)
        third = send("one")
        await until(lambda: len(queue) == 2)
        assert 80_000 < queue.num_bytes < 81_000
        status, body, headers = await send("one")
        assert (status, body["error"]["code"]) == (429, "rate_limit_exceeded")
        assert int(headers["retry-after"]) >= 1
        assert router.count("pd_router_refusals_total", key="one", reason="queue") == 1
        quiet = send("two", 50_000)
        assert (await third)[0] == 429
        assert 90_000 < queue.num_bytes < 91_000
        node.go_on.set()
        assert [(await one)[0] for one in (first, second, quiet)] == [200] * 3
        assert queue.num_bytes == 0
        await router.idle()


async def test_a_body_that_may_come_may_wait(keys: Path) -> None:
    """Else a request that is longer than the queue would only be served by nodes without others."""
    node = FakeNode("mixed", fakes.decode_until_told)
    node.num_slots = 1
    sizes: dict[str, Any] = {"max_queue_mb": 0.01, "max_body_mb": 0.1}
    async with running(node), serving(mixed=[node], api_keys=str(keys), **sizes) as router:
        first = asyncio.create_task(post(router))
        await node.wait_seen(1)
        long = asyncio.create_task(post(router, "two", BODY | {"user": "x" * 90_000}))
        await until(lambda: router.count("pd_router_requests_queued") == 1)
        node.go_on.set()
        assert [(await one)[0] for one in (first, long)] == [200, 200]


async def test_a_client_that_leaves_the_queue_leaves_nothing(keys: Path) -> None:
    node = FakeNode("mixed", fakes.decode_until_told)
    node.num_slots = 1
    async with running(node), serving(mixed=[node], api_keys=str(keys)) as router:
        first = asyncio.create_task(post(router))
        await node.wait_seen(1)
        async with aiohttp.ClientSession() as session:
            gone = asyncio.create_task(
                session.post(router.url + COMPLETIONS, json=BODY, headers={"x-api-key": SECRETS["one"]})
            )
            await until(lambda: router.count("pd_router_requests_queued") == 1)
            gone.cancel()
        await until(lambda: router.count("pd_router_requests_queued") == 0)
        node.go_on.set()
        assert (await first)[0] == 200
        await until(lambda: router.count("pd_router_client_disconnects_total", phase="request") == 1)
        assert router.services.admission is not None
        assert [limits.running for limits in router.services.admission._limits.values()] == [0]
        await router.idle()


async def test_one_that_waits_too_long_is_refused(keys: Path) -> None:
    node = FakeNode("mixed", fakes.decode_until_told)
    node.num_slots = 1
    async with running(node), serving(mixed=[node], api_keys=str(keys), max_queue_s=0.05) as router:
        first = asyncio.create_task(post(router))
        await node.wait_seen(1)
        status, _, headers = await post(router, "two")
        assert status == 429
        assert int(headers["retry-after"]) >= 1
        node.go_on.set()
        assert (await first)[0] == 200
        await router.idle()


async def test_a_first_token_that_would_be_late_is_refused_at_once(keys: Path) -> None:
    p, d = FakeNode("prefill", fakes.prefill), FakeNode("decode", fakes.decode)
    settings = {"api_keys": str(keys), "slo_ttft_ms": 100.0, "slo_slack": 2.0}
    async with running(p, d), serving([p], [d], **settings) as router:  # type: ignore[arg-type]
        assert (await post(router))[0] == 200
        node = next(node for node in router.services.table.nodes if node.role == "prefill")
        node.speed.note(1000, 0.0, router.services.table.clock())  # in all the time since the clock began
        long = BODY | {"prompt": "x" * 100_000}
        status, _, headers = await post(router, body=long)
        assert (status, len(p.seen)) == (429, 1)
        assert int(headers["retry-after"]) >= 1
        assert router.count("pd_router_refusals_total", key="one", reason="late") == 1
        await router.idle()


@pytest.mark.long
async def test_the_file_is_followed_and_a_bad_one_changes_nothing(
    keys: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(key_file, "LOOK_EVERY_S", 0.01)
    caplog.set_level(logging.INFO, "pd_router")
    node = FakeNode("mixed", fakes.decode)
    async with running(node), serving(mixed=[node], api_keys=str(keys)) as router:
        assert (await post(router, "two"))[0] == 200
        write(keys, line("one") + SECRETS["two"])
        await until(lambda: router.count("pd_router_key_file_changes_total", result="bad") >= 1)
        assert (await post(router, "two"))[0] == 200
        write(keys, None)
        await until(lambda: router.count("pd_router_key_file_changes_total", result="bad") >= 2)
        assert (await post(router, "two"))[0] == 200
        write(keys, line("one"))
        await until(lambda: router.count("pd_router_key_file_changes_total", result="ok") >= 1)
        assert [(await post(router, name))[0] for name in ("one", "two")] == [200, 401]
        assert "stay as they were" in caplog.text
        assert not any(secret in caplog.text for secret in SECRETS.values())


def test_a_file_that_is_bad_at_the_start_is_an_error(tmp_path: Path) -> None:
    write(tmp_path / "bad", "x")
    for path in ("bad", "none"):
        with pytest.raises(StartupError, match="--api-keys"):
            key_file.KeyFile(str(tmp_path / path))
