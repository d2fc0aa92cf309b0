"""No client asks a proxy of the environment for an address of the cluster: case 09 of the public cases."""

from __future__ import annotations

import ast
import asyncio
import re
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import TYPE_CHECKING, Any

import httpx
import orjson
import pytest
from lightkube.config.kubeconfig import KubeConfig
from lightkube.config.models import Cluster, User

from pd_cluster.bench import load
from pd_cluster.launch.cli import main
from pd_cluster.launch.up import _healthy
from pd_http.near_hosts import is_near
from pd_router.sources.kubernetes import KubernetesPods, is_inside

if TYPE_CHECKING:
    from collections.abc import Iterator

    from lightkube.config.kubeconfig import SingleConfig

ROOT = Path(__file__).parents[2]
PACKAGES = ("pd_cluster", "router/pd_http", "router/pd_router", "connectors", "kernels", "helm", "deploy")
# What makes a client of HTTP, and the arguments that keep it from the environment's proxies
CLIENTS: dict[str, set[str]] = {
    "httpx.Client": {"transport", "trust_env=False"},
    "httpx.AsyncClient": {"transport", "trust_env=False"},
    "urllib.request.build_opener": {"urllib.request.ProxyHandler({})"},
    "urllib.request.urlopen": set(),
    "urllib.request.urlretrieve": set(),
    "requests.Session": set(),
    "lightkube.AsyncClient": {"trust_env=not is_inside(self._api)"},
    "lightkube.Client": set(),
}
CLIENTS |= {f"{name}.{verb}": set() for name in ("httpx", "requests") for verb in ("get", "post", "request", "stream")}
ASKS_PROXIES = {
    "router/pd_router/records/otlp.py": "a collector may be outside; one of this network is asked without",
}  # huggingface_hub makes its own client: the hub is outside
VARIABLES = ("HTTP_PROXY", "http_proxy", "HTTPS_PROXY", "https_proxy", "ALL_PROXY", "all_proxy")


class _Counting(BaseHTTPRequestHandler):
    """Answers as a proxy and as a server, and notes how it was asked: a proxy is asked with the whole URL."""

    targets: list[str]

    def do_GET(self) -> None:
        self.targets.append(self.path)
        content = orjson.dumps({"nodes": [], "data": [{"id": "m"}]})
        self.send_response(200)
        self.send_header("content-length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    do_CONNECT = do_GET

    def log_message(self, *_: Any) -> None: ...


def _serving() -> tuple[HTTPServer, list[str]]:
    targets: list[str] = []
    server = HTTPServer(("127.0.0.1", 0), type("Counting", (_Counting,), {"targets": targets}))
    threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
    return server, targets


@pytest.fixture
def world(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[str, list[str], list[str]]]:
    """The URL of a server, the targets that it was asked for, and those that a proxy of the environment was."""
    (server, asked), (proxy, proxied) = _serving(), _serving()
    for name in VARIABLES:
        monkeypatch.setenv(name, f"http://127.0.0.1:{proxy.server_port}")
    monkeypatch.delenv("NO_PROXY", raising=False)
    monkeypatch.delenv("no_proxy", raising=False)
    yield f"http://127.0.0.1:{server.server_port}", asked, proxied
    for one in (server, proxy):
        one.shutdown()
        one.server_close()


@pytest.mark.long
def test_addresses_of_the_cluster_are_asked_themselves(world: tuple[str, list[str], list[str]]) -> None:
    url, asked, proxied = world

    async def bench() -> None:
        async with load.open_session() as session:
            await load.find_model(session, url, {})

    assert httpx.get(f"{url}/x").status_code == 200
    assert proxied == [f"{url}/x"], "the environment names a proxy, which clients ask by default"
    assert _healthy(url, 0)
    assert not _healthy(url, 1), "it tells of no node"
    assert main(["nodes", "list", "--router", url]) == 0
    asyncio.run(bench())
    assert (asked, len(proxied)) == (["/health", "/health", "/nodes", "/v1/models"], 1)


def _api(server: str) -> SingleConfig:
    config = KubeConfig.from_one(cluster=Cluster(server=server), user=User()).get()
    assert config is not None
    return config


def test_the_api_server_of_this_machine_is_asked_itself(world: tuple[str, list[str], list[str]]) -> None:
    url, asked, proxied = world

    async def slept(_: float) -> None:
        raise EOFError  # it was asked once; its answer is no list of pods

    async def follow() -> None:
        async for _ in KubernetesPods("serving", {}, _api(url), slept).watch():
            pass

    with pytest.raises(EOFError):
        asyncio.run(follow())
    assert [target.partition("?")[0] for target in asked] == ["/api/v1/namespaces/serving/pods"]
    assert proxied == []


@pytest.mark.parametrize(
    ("server", "service_host", "inside"),
    [
        ("https://10.96.0.1:443", "10.96.0.1", True),
        ("https://[fd00:10:96::1]:443", "fd00:10:96::1", True),
        ("https://[FD00:10:96:0::1]", "fd00:10:96:0:0:0:0:1", True),
        ("https://[fd00:10:96::1]:443", "[fd00:10:96::1]", True),
        ("https://api.shoot.example.com", "API.shoot.example.com", True),  # as some providers set it
        ("https://kubernetes.default.svc", "10.96.0.1", True),
        ("https://kubernetes.default.svc.cluster.local.:443", "", True),
        ("https://kubernetes", "10.96.0.1", True),
        ("http://127.0.0.1:8001", "10.96.0.1", True),  # kubectl proxy
        ("https://[::1]:6443", "", True),
        ("https://localhost:6443", "", True),
        ("https://10.1.2.3:6443", "10.96.0.1", False),
        ("https://[fd00:10:96::2]", "fd00:10:96::1", False),
        ("https://kubernetes.default.example.com", "10.96.0.1", False),
        ("https://api.example.com:6443", "", False),
    ],
)
def test_which_api_servers_are_asked_without_a_proxy(
    server: str, service_host: str, inside: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KUBERNETES_SERVICE_HOST", service_host)
    assert is_inside(_api(server)) is inside


def _calls(tree: ast.AST) -> Iterator[tuple[str, ast.Call]]:
    """Each call with the full name of what is called, as far as the file's imports tell."""
    names: dict[str, str | None] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names |= {alias.asname or alias.name.split(".")[0]: alias.asname and alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            names |= {alias.asname or alias.name: f"{node.module}.{alias.name}" for alias in node.names}
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            first, dot, rest = ast.unparse(node.func).partition(".")
            yield f"{names.get(first) or first}{dot}{rest}", node


def _trusting(tree: ast.AST) -> Iterator[str]:
    for name, call in _calls(tree):
        given = {*map(ast.unparse, call.args), *(word.arg or "" for word in call.keywords)}
        given |= {f"{word.arg}={ast.unparse(word.value)}" for word in call.keywords}
        asks = name.startswith("aiohttp.") and "trust_env=True" in given  # its default is False
        if asks or (name in CLIENTS and not given & CLIENTS[name]):
            yield name


def test_every_client_leaves_the_environments_proxies() -> None:
    texts = {
        str(path.relative_to(ROOT)): path.read_text(encoding="utf-8")
        for package in PACKAGES
        for path in (ROOT / package).rglob("*.py")
    }
    libraries = re.compile("aiohttp|" + "|".join({client.split(".")[0] for client in CLIENTS}))
    # no other file can call one, and to parse and walk them all takes two seconds
    found = {path for path, text in texts.items() if libraries.search(text) and any(_trusting(ast.parse(text)))}
    assert found <= ASKS_PROXIES.keys()


@pytest.mark.parametrize(
    "line",
    [
        "import httpx; httpx.Client(base_url='x')", "import httpx as h; h.AsyncClient(trust_env=True)",
        "from httpx import get; get('x')", "import urllib.request; urllib.request.urlopen('x')",
        "from urllib.request import urlopen; urlopen('x')", "import requests; requests.post('x')",
        "import aiohttp; aiohttp.ClientSession(trust_env=True)",
        "import urllib.request; urllib.request.build_opener()",
    ],
)  # fmt: skip
def test_a_client_that_trusts_the_environment_is_seen(line: str) -> None:
    assert list(_trusting(ast.parse(line)))


@pytest.mark.parametrize(
    ("host", "near"),
    [
        ("localhost", True), ("127.0.0.1", True), ("::1", True), ("10.0.0.7", True), ("192.168.1.2", True),
        ("collector", True), ("otel.monitoring.svc", True), ("otel.monitoring.svc.cluster.local.", True),
        ("8.8.8.8", False), ("api.honeycomb.io", False), ("localhost.example.com", False),
    ],
)  # fmt: skip
def test_hosts_that_are_asked_without_a_proxy(host: str, near: bool) -> None:
    assert is_near(host) is near
