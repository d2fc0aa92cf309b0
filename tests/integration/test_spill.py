"""A slow prefill node, and a decode node that reads what queues there beside its own streams: real processes."""

from __future__ import annotations

import asyncio
from typing import Any

import httpx
import pytest

from tests.deadlines import until
from tests.integration.calls import Call, Outcome
from tests.integration.system import System, wait_until

pytestmark = [pytest.mark.integration, pytest.mark.timeout(300)]

FILLER = "The old man walked to the river. A small dog was in the garden. It was cold and the wind was strong. "
PEOPLE = {
    "Mira": 4831,
    "Oskar": 2210,
    "Lena": 7745,
    "Anton": 3906,
    "Ida": 5518,
    "Nora": 6127,
    "Emil": 9043,
    "Zoe": 1384,
}
DIRECT = "direct; reason=prefill-busy"
COUNTER = 'pd_router_requests_total{order="direct",outcome="ok",reason="prefill-busy"} '


@pytest.fixture
def system(chunked_fp8: System) -> System:
    return chunked_fp8


def body(name: str, *, stream: bool, salt: str) -> dict[str, Any]:
    """About eight hundred tokens, then a question about one of three people."""
    names = [name, *(other for other in PEOPLE if other != name)][:3]
    facts = " ".join(f"{one} {PEOPLE[one]}." for one in sorted(names))
    return {
        "prompt": f"{FILLER * 30}{facts} {name}?", "max_tokens": 8, "temperature": 0, "stream": stream,
        "cache_salt": salt,
    }  # fmt: skip


def counted(system: System) -> float:
    """Requests that the router of this cluster sent to D alone, as P was busy."""
    text = httpx.get(f"{system.router_url}/metrics", trust_env=False).text
    return sum(float(line.rpartition(" ")[2]) for line in text.splitlines() if line.startswith(COUNTER))


def outstanding(system: System) -> list[int]:
    """What the router thinks its nodes have to do."""
    nodes = httpx.get(f"{system.router_url}/nodes", trust_env=False).json()["nodes"]
    return [count for node in nodes for count in node["outstanding"].values()]


async def ask_all(system: System) -> dict[str, Outcome]:
    """Ask about all people of the demo model, every second time streamed. P reads nothing until D reads one."""
    url = system.router_url
    with system.engine_stopped("prefill"):
        calls = {
            name: Call(url, body(name, stream=bool(index % 2), salt=f"burst {name}"))
            for index, name in enumerate(PEOPLE)
        }
        await until(lambda: is_read_by_d(system), lambda: str(outstanding(system)))
    return {name: await call.outcome() for name, call in calls.items()}


def is_read_by_d(system: System) -> bool:
    """Whether the router has sent a prompt to D alone. While P reads nothing, no other is at D."""
    nodes = httpx.get(f"{system.router_url}/nodes", trust_env=False).json()["nodes"]
    return any(node["outstanding"]["sequences"] for node in nodes)


async def ask_one_and_then_all(system: System) -> dict[str, Outcome]:
    """The first one teaches the router how fast P reads."""
    first = await Call(system.router_url, body("Zoe", stream=True, salt="first"), "p-first").outcome()
    assert (first.text, first.headers["x-pd-prefill"]) == (" Zoe 1384.", "prefill")
    await until(lambda: not any(outstanding(system)), lambda: str(outstanding(system)))
    return await ask_all(system)


def test_long_prompts_at_once_are_read_by_both_nodes_and_none_is_lost(system: System) -> None:
    before = counted(system)
    found = asyncio.run(ask_one_and_then_all(system))
    assert {name: (one.status, one.error, one.text) for name, one in found.items()} == {
        name: (200, None, f" {name} {number}.") for name, number in PEOPLE.items()
    }
    routes = [one.headers["x-pd-route"] for one in found.values()]
    assert 1 <= routes.count(DIRECT) < len(PEOPLE)
    # A P that is idle for a moment gets one for the reason `prefill-idle`
    assert {route.partition(";")[0] for route in routes} == {"direct", "p-first"}
    for one in found.values():
        assert one.headers["x-pd-prefill"] == ("decode" if one.headers["x-pd-route"] == DIRECT else "prefill")
    assert {one.headers["x-pd-decode"] for one in found.values()} == {"decode"}
    system.settle()
    wait_until(lambda: not any(outstanding(system)), lambda: str(outstanding(system)))
    wait_until(lambda: counted(system) == before + routes.count(DIRECT), lambda: f"{before}, {counted(system)}")
