"""A whole cluster of real processes, the three ways through it, and what its nodes say about themselves."""

from __future__ import annotations

import asyncio
import copy
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING, Any

import httpx
import orjson

from tests.cluster import Launched, Launcher

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

BLOCK_SIZE = 16
BLOCK_BYTES = 4 * 6 * 2 * BLOCK_SIZE * 64 * 4  # KV heads, layers, K and V, tokens, head size, float32
ANSWER_DEADLINE_S = 240.0
SETTLE_DEADLINE_S = 30.0  # more than the life of a lease that is no longer renewed
POLL_S = 0.05


class Path(StrEnum):
    """A way through the cluster."""

    MIXED = "mixed"  # one node computes everything
    P_FIRST = "p-first"
    D_FIRST = "d-first"


@dataclass(frozen=True)
class Answer:
    """One 200, streamed or not; `body` is the whole JSON, put together from the chunks when it was streamed."""

    body: dict[str, Any]
    headers: Mapping[str, str]

    @property
    def choices(self) -> list[dict[str, Any]]:
        choices: list[dict[str, Any]] = self.body["choices"]
        return choices

    @property
    def num_cached_tokens(self) -> int:
        return int(self.body["usage"]["prompt_tokens_details"]["cached_tokens"])


class System:
    """P, D, a node for the mixed path, and a router before P and D. `mixed` is D itself unless one is asked for."""

    def __init__(
        self, launcher: Launcher, *flags: str, own_mixed: bool, role_flags: Mapping[str, Sequence[str]] | None = None
    ) -> None:
        roles = ("prefill", "decode", "mixed") if own_mixed else ("prefill", "decode")
        common = ("--min-remote-tokens=1", *flags)
        own = role_flags or {}
        nodes = {
            role: launcher.node(role, f"--node-id={role}", *common, *own.get(role, ()), wait=False) for role in roles
        }
        self._nodes = list(nodes.values())
        self.urls = {role: _url(node) for role, node in nodes.items()}
        self.mixed = "mixed" if own_mixed else "decode"
        self.router_url = launcher.router(prefill=[nodes["prefill"]], decode=[nodes["decode"]]).url

    def without_mixed(self) -> System:
        """The same processes; the way `mixed` goes to D."""
        same = copy.copy(self)
        same.mixed = "decode"
        return same

    def stop(self) -> None:
        """End all nodes at once. Asserts that each ends well."""
        with ThreadPoolExecutor() as pool:
            assert set(pool.map(Launched.stop, self._nodes)) == {0}

    def node_of(self, path: Path) -> str:
        """The node that generates."""
        return self.mixed if path is Path.MIXED else "decode"

    def prefiller_of(self, path: Path) -> str:
        """The node that computes a prompt that no node has cached."""
        return self.mixed if path is Path.MIXED else "prefill"

    # requests

    def ask(self, path: Path, endpoint: str, body: dict[str, Any]) -> Answer:
        """One request."""
        return self.ask_all(path, [(endpoint, body)])[0]

    def ask_all(self, path: Path, requests: Iterable[tuple[str, dict[str, Any]]]) -> list[Answer]:
        """All at once; answers in the order of the requests. Asserts that each is a 200."""
        url = self.urls[self.mixed] if path is Path.MIXED else self.router_url
        headers = {} if path is Path.MIXED else {"x-pd-route": path.value}
        return asyncio.run(_ask_all(url, headers, list(requests)))

    def ask_node(self, node: str, endpoint: str, body: dict[str, Any]) -> Answer:
        """One request that this node serves alone."""
        return self.ask_node_all(node, [(endpoint, body)])[0]

    def ask_node_all(self, node: str, requests: Iterable[tuple[str, dict[str, Any]]]) -> list[Answer]:
        """All at once."""
        return asyncio.run(_ask_all(self.urls[node], {}, list(requests)))

    # what nodes say

    def kv(self, node: str) -> dict[str, Any]:
        """GET /kv."""
        response = httpx.get(f"{self.urls[node]}/kv", trust_env=False)
        assert response.status_code == 200, response.text
        body: dict[str, Any] = response.json()
        return body

    def metrics(self, node: str) -> dict[str, float]:
        """Sample with its labels, as it is written -> value. Asserts that none is there twice."""
        samples: dict[str, float] = {}
        for line in httpx.get(f"{self.urls[node]}/metrics", trust_env=False).text.splitlines():
            if line and not line.startswith("#"):
                name, value = line.rsplit(" ", 1)
                assert name not in samples, f"{name} is exported twice"
                samples[name] = float(value)
        return samples

    def metric(self, node: str, name: str) -> float:
        """One sample of /metrics."""
        return self.metrics(node)[name]

    def settle(self) -> None:
        """Wait until no request, lease or load holds a block on any node. Asserts that it comes to that."""
        for node in self.urls:
            wait_until(lambda node=node: not _held(self.kv(node)), lambda node=node: f"{node}: {self.kv(node)}")  # type: ignore[misc]


@contextmanager
def running_system(
    *flags: str, own_mixed: bool = False, role_flags: Mapping[str, Sequence[str]] | None = None
) -> Iterator[System]:
    """A cluster for a `with` statement. At its end no node holds a block, and no process is left."""
    with Launcher() as launcher:
        system = System(launcher, *flags, own_mixed=own_mixed, role_flags=role_flags)
        yield system
        system.settle()
        system.stop()


def ask_url(url: str, requests: Iterable[tuple[str, dict[str, Any]]]) -> list[Answer]:
    """All at once, of whatever listens there. Asserts that each is a 200."""
    return asyncio.run(_ask_all(url, {}, list(requests)))


async def _ask_all(url: str, headers: dict[str, str], requests: Sequence[tuple[str, dict[str, Any]]]) -> list[Answer]:
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=0)
    async with httpx.AsyncClient(timeout=ANSWER_DEADLINE_S, limits=limits, trust_env=False) as client:

        async def one(endpoint: str, body: dict[str, Any]) -> Answer:
            response = await client.post(f"{url}{endpoint}", json=body, headers=headers)
            assert response.status_code == 200, f"{endpoint} {headers}: {response.status_code} {response.text}"
            whole = _joined(response.content) if body.get("stream") else response.json()
            return Answer(whole, response.headers)

        return await asyncio.gather(*(one(*request) for request in requests))


def wait_until(condition: Callable[[], bool], explain: Callable[[], str]) -> None:
    """Poll; AssertionError with `explain` after the deadline."""
    end_s = time.monotonic() + SETTLE_DEADLINE_S
    while not condition():
        assert time.monotonic() < end_s, explain()
        time.sleep(POLL_S)


def _url(node: Launched) -> str:
    node.wait_line("ready: ")
    return node.url


def _held(kv: Mapping[str, int]) -> int:
    return kv["in_use"] + kv["leased"] + kv["quarantined"]


def _joined(events: bytes) -> dict[str, Any]:
    """The body that the chunks of a stream amount to. Text, tokens and logprobs are concatenated per choice."""
    lines = [line[6:] for line in events.splitlines() if line.startswith(b"data: ")]
    assert lines[-1] == b"[DONE]", events[-500:]
    chunks = [orjson.loads(line) for line in lines[:-1]]
    choices: dict[int, dict[str, Any]] = {}
    usage = None
    for chunk in chunks:
        assert "error" not in chunk, chunk
        usage = chunk.get("usage") or usage
        for part in chunk["choices"]:
            _add(choices.setdefault(part["index"], {"index": part["index"], "finish_reason": None}), part)
    body = {name: value for name, value in chunks[0].items() if name not in ("choices", "usage")}
    return body | {"choices": [choices[index] for index in sorted(choices)], "usage": usage}


def _add(choice: dict[str, Any], part: dict[str, Any]) -> None:
    assert choice["finish_reason"] is None, f"a chunk after the end: {part}"
    delta = part.get("delta")
    if delta is not None:
        message = choice.setdefault("message", {"role": None, "content": ""})
        message["role"] = delta.get("role") or message["role"]
        message["content"] += delta.get("content") or ""
    else:
        choice["text"] = choice.get("text", "") + part["text"]
    for name, values in (part.get("logprobs") or {}).items():
        if values is not None:
            choice.setdefault("logprobs", {}).setdefault(name, []).extend(values)
    for name in ("finish_reason", "stop_reason", "prompt_logprobs"):
        if part.get(name) is not None:
            choice[name] = part[name]
