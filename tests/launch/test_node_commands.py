"""`pd-cluster nodes` against a router process: what it shows, what it orders, and how it says no."""

from __future__ import annotations

import socketserver
import threading
from typing import TYPE_CHECKING

import httpx
import pytest

from pd_cluster.launch.cli import main
from pd_cluster.launch.node_commands import OrderRefused, RouterOrders
from tests.cluster import TEST_KEY, Launcher
from tests.deadlines import HANG_S

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

NODE = "http://127.0.0.1:9"  # no server listens there, and none is needed


@pytest.fixture(scope="module")
def router() -> Iterator[str]:
    with Launcher() as launcher:
        yield launcher.router("--start-empty", real=True).url


@pytest.fixture
def nodes(router: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Callable[..., str]:
    """Runs the command, wants exit status 0, returns what it wrote."""
    monkeypatch.setenv("PD_CLUSTER_KEY", TEST_KEY)

    def run(*arguments: str) -> str:
        assert main(["nodes", *arguments, "--router", router]) == 0
        return capsys.readouterr().out

    return run


@pytest.mark.integration
def test_a_node_is_added_drained_and_removed(nodes: Callable[..., str]) -> None:
    titles, row = nodes("add", NODE, "--role=decode").splitlines()
    assert titles.split() == [
        "NODE_ID", "ROLE", "STATE", "HEALTHY", "SOURCE", "URL", "SEQUENCES", "PROMPT_BYTES",
        "FEED", "QUEUED_TOKENS", "FREE_TOKENS",
    ]  # fmt: skip
    assert row.split() == ["127.0.0.1:9", "decode", "active", "no", "posted", NODE, "0", "0", "none", "0", "-"]
    assert "draining" in nodes("drain", "127.0.0.1:9", "--wait-s=60")  # nothing runs there, so nothing is waited for
    assert "draining" in nodes("list")
    assert "active" in nodes("undrain", NODE)  # by its URL, as it was added
    assert "leaving" in nodes("remove", "127.0.0.1:9")
    assert nodes("list").count("\n") == 1  # the titles


@pytest.mark.integration
@pytest.mark.parametrize(
    ("arguments", "key", "says"),
    [
        (["drain", "unknown"], TEST_KEY, "404: no node is called 'unknown'"),
        (["add", NODE, "--role=decode"], "another key", "401: the order was not signed with this cluster's key"),
        (["reset-cache"], TEST_KEY, "503: no node is reachable"),
        (["stop-profile"], "another key", "401: the order was not signed with this cluster's key"),
        (["add", "no-url", "--role=decode"], TEST_KEY, "400: bad node URL 'no-url'"),
    ],
)
def test_what_the_router_refuses_is_said(
    router: str, arguments: list[str], key: str, says: str,
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    monkeypatch.setenv("PD_CLUSTER_KEY", key)
    assert main(["nodes", *arguments, "--router", router]) == 1
    error = capsys.readouterr().err
    assert says in error
    assert error.count("\n") == 1


class _Greets(socketserver.StreamRequestHandler):
    def handle(self) -> None:
        self.rfile.readline()
        self.wfile.write(b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\nhi")


@pytest.mark.long
def test_something_else_on_that_port_is_no_router() -> None:
    with socketserver.TCPServer(("127.0.0.1", 0), _Greets) as server:
        serving = threading.Thread(target=server.serve_forever)
        serving.start()
        try:
            with (
                httpx.Client(base_url=f"http://127.0.0.1:{server.server_address[1]}", timeout=HANG_S) as client,
                pytest.raises(OrderRefused, match="no answer from a router"),
            ):
                RouterOrders(client, b"k" * 32).list()
        finally:
            server.shutdown()
            serving.join()


@pytest.mark.parametrize(
    ("status", "told", "says"),
    [
        (200, [], "is not a pd-cluster router"),
        (200, {"nodes": []}, "is not a pd-cluster router"),
        (404, {"error": "no such page"}, "404: Not Found"),
    ],
)
def test_whatever_else_answers_is_refused(status: int, told: object, says: str) -> None:
    transport = httpx.MockTransport(lambda _: httpx.Response(status, json=told))
    with (
        httpx.Client(base_url="http://elsewhere", transport=transport) as client,
        pytest.raises(OrderRefused, match=says),
    ):
        RouterOrders(client, b"k" * 32).give("drain", "d-0")


@pytest.mark.long
def test_drain_waits_and_says_what_is_left(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """A fake router with a node that has one sequence left, then none."""
    left = [2, 1, 0]
    asked: list[str] = []

    def answer(request: httpx.Request) -> httpx.Response:
        asked.append(f"{request.method} {request.url.path}")
        sequences = left.pop(0) if len(left) > 1 else left[0]
        row = {"node_id": "d/0", "role": "decode", "state": "draining", "healthy": False, "source": None, "url": NODE}
        return httpx.Response(200, json={**row, "outstanding": {"sequences": sequences, "prefill_bytes": 0}})

    client = httpx.Client
    monkeypatch.setattr(httpx, "Client", lambda **options: client(transport=httpx.MockTransport(answer), **options))
    monkeypatch.setattr("pd_cluster.launch.node_commands.LOOK_EVERY_S", 0.0)
    monkeypatch.setenv("PD_CLUSTER_KEY", TEST_KEY)
    assert main(["nodes", "drain", "d/0", "--wait-s=60"]) == 0
    assert asked == ["POST /nodes/d/0/drain"] * 3
    assert "d/0" in capsys.readouterr().out
    left[:] = [1]
    assert main(["nodes", "drain", "d/0", "--wait-s=0.01"]) == 1
