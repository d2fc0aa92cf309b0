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
from tests.patient_node import PATIENT
from tests.shallow_model import NUM_LAYERS

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
    from contextlib import AbstractContextManager

    from tests.integration.gate import Gate

BLOCK_SIZE = 16
LAYER_BYTES = 4 * 2 * BLOCK_SIZE * 64 * 4  # of a block: KV heads, K and V, tokens, head size, float32
BLOCK_BYTES = 6 * LAYER_BYTES  # of the whole demo model
SHALLOW_BLOCK_BYTES = NUM_LAYERS * LAYER_BYTES  # of the shallow one
ANSWER_DEADLINE_S = 600.0  # a prompt of 32,768 tokens took more than 240 s on two crowded cores
SETTLE_DEADLINE_S = 60.0  # more than the life of a lease that is no longer renewed
POLL_S = 0.1  # as often as a node tells; a look takes 10 ms of CPU
NO_REUSE = httpx.Limits(max_connections=None, max_keepalive_connections=0)  # a node may just close an idle connection
STEPS = "pd_engine_steps_total"
HELD = (
    "pd_num_running", "pd_num_waiting", "pd_num_waiting_for_remote_kv",
    *(f'pd_kv_blocks{{state="{state}"}}' for state in ("in_use", "leased", "quarantined")),
)  # fmt: skip
ROOM = "--kv-cache-gb=0.1"  # 8,000 tokens of the demo model. A node writes all of its cache: 2.5 s of CPU a GB
ONE_TOKEN = ("/v1/completions", {"prompt": [5], "max_tokens": 1})
ONE_VECTOR = ("/v1/embeddings", {"input": [[5]]})


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
        self,
        launcher: Launcher,
        *flags: str,
        own_mixed: bool = False,
        role_flags: Mapping[str, Sequence[str]] | None = None,
        gate: Gate | None = None,
    ) -> None:
        """`gate`: of D, see `decode_held`."""
        roles = ("prefill", "decode", "mixed") if own_mixed else ("prefill", "decode")
        common = (ROOM, "--min-remote-tokens=1", *flags)
        own = {role: [*(role_flags or {}).get(role, ())] for role in roles}
        own["decode"] += gate.flags if gate else ()
        self._gate = gate
        self._one_token: tuple[str, dict[str, Any]] = ONE_VECTOR if "--task=embed" in flags else ONE_TOKEN
        self._http = httpx.Client(timeout=ANSWER_DEADLINE_S, limits=NO_REUSE, trust_env=False)
        nodes = {
            role: launcher.node(
                role,
                f"--node-id={role}",
                *common,
                *own[role],
                environment={**PATIENT, **(gate.environment if gate else {})},
                wait=False,
            )
            for role in roles
        }
        self._by_role, self._nodes = nodes, list(nodes.values())
        self.urls = {role: _url(node) for role, node in nodes.items()}
        self.mixed = "mixed" if own_mixed else "decode"
        self.router_url = launcher.router(prefill=[nodes["prefill"]], decode=[nodes["decode"]]).url

    def decode_held(self, *, answer: float) -> AbstractContextManager[None]:
        """D computes no answer of so many tokens until the end."""
        assert self._gate is not None
        return self._gate.held(answer=answer)

    @contextmanager
    def engine_stopped(self, role: str) -> Iterator[None]:
        """SIGSTOP to the engine of this node until the end: what routers send it waits there."""
        (engine,) = (
            process
            for process in self._by_role[role].family()
            if "pd_cluster.engine.process" in " ".join(process.cmdline())
        )
        engine.suspend()
        try:
            yield
        finally:
            engine.resume()

    def without_mixed(self) -> System:
        """The same processes; the way `mixed` goes to D."""
        same = copy.copy(self)
        same.mixed = "decode"
        return same

    def stop(self) -> None:
        """End all nodes at once. Asserts that each ends well."""
        self._http.close()
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

    def settled_metrics(self, node: str) -> dict[str, float]:
        """Sample with its labels, as it is written -> value, with all that the node counted before it answered.

        An engine tells its counters up to 0.1 s after an answer. One more token makes it tell them: figures that
        come after the answers so far and count another step hold all of these answers. Some of these tokens are
        counted, too.

        A look before POLL_S would be in vain.
        """
        seen = self.metrics(node).get(STEPS, 0.0)
        endpoint, body = self._one_token
        assert self._http.post(self.urls[node] + endpoint, json=body).status_code == 200
        end_s = time.monotonic() + SETTLE_DEADLINE_S
        while True:
            time.sleep(POLL_S)
            told = self.metrics(node)
            if told.get(STEPS, 0.0) > seen:
                return told
            assert time.monotonic() < end_s, f"{node} counts no step after {seen}"

    def settled_metric(self, node: str, name: str) -> float:
        """One of these."""
        return self.settled_metrics(node)[name]

    def metrics(self, node: str) -> dict[str, float]:
        """GET /metrics: what the node's engine has told so far. Asserts that no sample is there twice."""
        samples: dict[str, float] = {}
        for line in self._http.get(f"{self.urls[node]}/metrics").text.splitlines():
            if line and not line.startswith("#"):
                name, value = line.rsplit(" ", 1)
                assert name not in samples, f"{name} is exported twice"
                samples[name] = float(value)
        return samples

    def metric(self, node: str, name: str) -> float:
        """One of these."""
        return self.metrics(node)[name]

    def settle(self) -> None:
        """Wait until no request, lease or load holds a block on any node. Asserts that it comes to that.

        All that was answered before is counted then, as `settled_metrics` says it.
        """
        for node in self.urls:
            if _held(self.settled_metrics(node)):
                self._wait_idle(node)

    def _wait_idle(self, node: str) -> None:
        wait_until(lambda: not _held(self.metrics(node)), lambda: f"{node}: {self.metrics(node)}")


@contextmanager
def running_system(
    *flags: str,
    own_mixed: bool = False,
    role_flags: Mapping[str, Sequence[str]] | None = None,
    gate: Gate | None = None,
) -> Iterator[System]:
    """A cluster for a `with` statement. At its end no node holds a block, and no process is left."""
    with Launcher() as launcher:
        system = System(launcher, *flags, own_mixed=own_mixed, role_flags=role_flags, gate=gate)
        yield system
        system.settle()
        system.stop()


def ask_url(url: str, requests: Iterable[tuple[str, dict[str, Any]]], route: str = "") -> list[Answer]:
    """All at once, of whatever listens there. Asserts that each is a 200."""
    return asyncio.run(_ask_all(url, {"x-pd-route": route} if route else {}, list(requests)))


async def _ask_all(url: str, headers: dict[str, str], requests: Sequence[tuple[str, dict[str, Any]]]) -> list[Answer]:
    async with httpx.AsyncClient(timeout=ANSWER_DEADLINE_S, limits=NO_REUSE, trust_env=False) as client:

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


def _held(samples: Mapping[str, float]) -> float:
    return sum(samples[name] for name in HELD)


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
