"""A pool behind two prefill nodes and a decode node: which node computes what; requests go on when the pool dies.

With `-2-ranks` the second prefill node and the decode node have two ranks, and take what the first node of one stored.
"""

from __future__ import annotations

import random
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import count
from typing import TYPE_CHECKING, Any, Protocol

import httpx
import pytest

from tests.cluster import Launched, Launcher
from tests.connectors.mooncake_master import MooncakeMaster, needs_mooncake
from tests.connectors.store_server import StoreServer, needs_lmcache
from tests.deadlines import HANG_S
from tests.integration.reference import NUM_NEW_TOKENS as NUM_PARITY_TOKENS
from tests.integration.system import ANSWER_DEADLINE_S, BLOCK_SIZE, Answer, wait_until
from tests.integration.test_parity import MOST_TIES, Tally, compare
from tests.shallow_model import as_demo_model

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from tests.integration.reference import DemoModel, Reference
    from tests.integration.system import System

pytestmark = [pytest.mark.integration, pytest.mark.timeout(300)]

NUM_NEW_TOKENS = 6
LENGTHS = (1, 16, 17, 40, 64, 65, 150, 333)
SOME_LENGTHS = (1, 16, 17, 150)  # no whole block, nor with what is computed in any case; one, several
VOCABULARY = range(40, 900)
NUM_REFERENCES = 200  # all of them


class Served(Protocol):
    """Whatever answers completions."""

    @property
    def url(self) -> str: ...


@dataclass(frozen=True)
class Plain:
    """A node without a pool."""

    url: str


@dataclass(frozen=True)
class PoolCluster:
    """`plain` has no pool and no part in the cluster: its answers are what every other node must answer."""

    server: StoreServer | MooncakeMaster
    p1: Launched
    p2: Launched
    d: Launched
    plain: Plain
    router: Launched  # knows P2 and D

    def answer(
        self, node: Served, prompt: Sequence[int], route: str = "", salt: str = "", num_tokens: int = NUM_NEW_TOKENS
    ) -> Answer:
        """A completion of `prompt`."""
        response = httpx.post(
            f"{node.url}/v1/completions",
            json={
                "prompt": list(prompt), "max_tokens": num_tokens, "temperature": 0, "ignore_eos": True,
                "logprobs": 0, "cache_salt": salt or None,
            },
            headers={"x-pd-route": route} if route else {}, timeout=ANSWER_DEADLINE_S, trust_env=False,
        )  # fmt: skip
        assert response.status_code == 200, response.text
        return Answer(response.json(), response.headers)

    def ask(self, node: Served, prompt: Sequence[int], route: str = "", salt: str = "") -> dict[str, Any]:
        """Its tokens, how many of the prompt's were cached, and which node prefilled."""
        answer = self.answer(node, prompt, route, salt)
        return {
            "tokens": answer.choices[0]["logprobs"]["tokens"],
            "cached": answer.num_cached_tokens,
            "prefill": answer.headers["x-pd-prefill"],
        }

    def metric(self, node: Launched, name: str) -> float:
        """One sample of /metrics."""
        lines = httpx.get(f"{node.url}/metrics", trust_env=False).text.splitlines()
        return float(next(line.rsplit(" ", 1)[1] for line in lines if line.startswith(f"{name} ")))

    def settle(self, node: Launched, num_tokens: float) -> None:
        """Wait until the node says that it has computed this many, and has sent to the pool what it had to."""
        self.wait_computed(node, num_tokens)
        wait_until(lambda: self.metric(node, "pd_pool_backlog_bytes") == 0, lambda: f"{node.name} stores in the pool")

    def wait_computed(self, node: Launched, num_tokens: float) -> None:
        """Wait until the node says that it has computed this many.

        What it stores then it tells a second later if nothing else happens.
        """
        wait_until(
            lambda: self.metric(node, COMPUTED) >= num_tokens and self.metric(node, "pd_num_running") == 0,
            lambda: f"{node.name}: {self.metric(node, COMPUTED)} of {num_tokens}",
        )

    def computed(self, node: Launched) -> float:
        """Tokens in this node's steps so far."""
        return self.metric(node, COMPUTED)

    def hits(self) -> float:
        """Tokens that P2 and D have taken from the pool."""
        return self.metric(self.p2, HIT_TOKENS) + self.metric(self.d, HIT_TOKENS)

    def misses(self) -> float:
        """How often these two could not reach the pool."""
        return self.metric(self.p2, UNAVAILABLE) + self.metric(self.d, UNAVAILABLE)


COMPUTED = "pd_engine_step_tokens_total"
HIT_TOKENS = "pd_pool_hit_tokens_total"
UNAVAILABLE = 'pd_pool_misses_total{reason="unavailable"}'


@pytest.fixture(
    scope="module",
    params=[
        pytest.param(("lmcache", 1), marks=needs_lmcache),
        pytest.param(("mooncake", 1), marks=[needs_mooncake, pytest.mark.slow]),
        pytest.param(("lmcache", 2), marks=[needs_lmcache, pytest.mark.slow]),
        pytest.param(("mooncake", 2), marks=[needs_mooncake, pytest.mark.slow]),
    ],
    ids=["lmcache", "mooncake", "lmcache-2-ranks", "mooncake-2-ranks"],
)
def cluster(request: pytest.FixtureRequest, shared_system: System) -> Iterator[PoolCluster]:
    kind, degree = request.param
    with StoreServer() if kind == "lmcache" else MooncakeMaster() as server, Launcher() as launcher:
        flags = (*as_demo_model(), "--kv-cache-gb=0.05", "--block-size=16", "--min-remote-tokens=17")
        # On a busy machine a search of the pool, and a handover, may take longer than the product gives them. Then a
        # node computes what these tests count
        patient = (f"--pool-deadline-s={HANG_S:g}", f"--load-deadline-s={ANSWER_DEADLINE_S:g}")
        pooled = (f"--connector={kind}", f"--pool-url={server.url}", "--pool-segment-gb=0.2", *patient, *flags)
        nodes = {
            name: launcher.node(role, f"--node-id={name}", f"--tp={ranks}", *pooled, wait=False)
            for name, role, ranks in (("p1", "prefill", 1), ("p2", "prefill", degree), ("d", "decode", degree))
        }
        for node in nodes.values():
            node.wait_line("ready: ")
        router = launcher.router(prefill=[nodes["p2"]], decode=[nodes["d"]])
        yield PoolCluster(server, **nodes, plain=Plain(shared_system.urls["decode"]), router=router)


def make_prompts(seed: int, lengths: Sequence[int] = LENGTHS) -> list[list[int]]:
    """One of each length, of tokens that no other seed's have."""
    draw = random.Random(seed)
    return [[draw.choice(VOCABULARY) for _ in range(length)] for length in lengths]


def num_poolable(prompt: Sequence[int]) -> int:
    """Its tokens in whole blocks, without its last token's."""
    return (len(prompt) - 1) // BLOCK_SIZE * BLOCK_SIZE


def test_a_second_prefill_node_computes_only_the_suffix(cluster: PoolCluster) -> None:
    for prompt in make_prompts(1):
        before_1, before_2 = cluster.computed(cluster.p1), cluster.computed(cluster.p2)
        first = cluster.ask(cluster.p1, prompt)
        assert first["cached"] == 0
        cluster.settle(cluster.p1, before_1 + len(prompt) + NUM_NEW_TOKENS - 1)
        second = cluster.ask(cluster.p2, prompt)
        expected = before_2 + len(prompt) - num_poolable(prompt) + NUM_NEW_TOKENS - 1
        cluster.wait_computed(cluster.p2, expected)
        assert cluster.computed(cluster.p2) == expected
        assert second["cached"] == num_poolable(prompt)
        assert second["tokens"] == first["tokens"] == cluster.ask(cluster.plain, prompt)["tokens"]


def test_a_decode_node_takes_a_prompt_from_the_pool_without_a_prefill_node(cluster: PoolCluster) -> None:
    for prompt in make_prompts(2, SOME_LENGTHS):
        before_1, before_2, before_d = (cluster.computed(node) for node in (cluster.p1, cluster.p2, cluster.d))
        cluster.ask(cluster.p1, prompt)
        cluster.settle(cluster.p1, before_1 + len(prompt) + NUM_NEW_TOKENS - 1)
        answer = cluster.ask(cluster.router, prompt, "d-first")
        expected = before_d + len(prompt) - num_poolable(prompt) + NUM_NEW_TOKENS - 1
        cluster.wait_computed(cluster.d, expected)
        assert cluster.computed(cluster.d) == expected
        cluster.ask(cluster.p2, [VOCABULARY[0]])  # P2 has computed this alone
        cluster.wait_computed(cluster.p2, before_2 + NUM_NEW_TOKENS)
        assert cluster.computed(cluster.p2) == before_2 + NUM_NEW_TOKENS
        assert answer["prefill"] == "d"
        assert answer["tokens"] == cluster.ask(cluster.plain, prompt)["tokens"]


@pytest.mark.parametrize("route", [pytest.param("p-first", marks=pytest.mark.slow), "d-first"])
def test_a_longer_prompt_is_prefilled_from_where_the_pool_ends(cluster: PoolCluster, route: str) -> None:
    """P1 knows the beginning; P2 takes that from the pool, computes the rest, and hands the whole to D."""
    for prompt in make_prompts(3 if route == "p-first" else 4, SOME_LENGTHS):
        longer = prompt + make_prompts(5)[-1][:100]
        before_1, before_2 = cluster.computed(cluster.p1), cluster.computed(cluster.p2)
        cluster.ask(cluster.p1, prompt)
        cluster.settle(cluster.p1, before_1 + len(prompt) + NUM_NEW_TOKENS - 1)
        answer = cluster.ask(cluster.router, longer, route)
        num_pooled = len(prompt) // BLOCK_SIZE * BLOCK_SIZE
        cluster.wait_computed(cluster.p2, before_2 + len(longer) - num_pooled)
        assert cluster.computed(cluster.p2) == before_2 + len(longer) - num_pooled
        assert answer["prefill"] == "p2"
        assert answer["tokens"] == cluster.ask(cluster.plain, longer)["tokens"]


@pytest.mark.parametrize("num_prompts", [14, pytest.param(NUM_REFERENCES, marks=pytest.mark.slow)])
def test_tokens_are_those_of_transformers(
    num_prompts: int, cluster: PoolCluster, demo_model: DemoModel, request: pytest.FixtureRequest
) -> None:
    """Each prompt through P1, which computes it, then, from the pool, through P2 and D by either order; 6 at once."""
    is_all = num_prompts == NUM_REFERENCES
    references: list[Reference] = request.getfixturevalue("references" if is_all else "short_references")
    chosen = references[:num_prompts]
    assert len(chosen) == num_prompts
    before_1, hits = cluster.computed(cluster.p1), cluster.hits()
    tally = Tally()

    def ask(index: int) -> list[Answer]:
        ways = [("p-first", cluster.router), ("d-first", cluster.router)][:: 1 if index % 2 else -1]
        return [
            cluster.answer(node, chosen[index].prompt, route, f"parity {num_prompts}", NUM_PARITY_TOKENS)
            for route, node in [("", cluster.p1), *ways]
        ]

    with ThreadPoolExecutor(6) as pool:
        for index, answers in enumerate(pool.map(ask, range(num_prompts))):
            for answer in answers:
                compare(answer, chosen[index], demo_model, tally)
    assert tally.num_prompts == 3 * num_prompts
    assert tally.num_ties <= MOST_TIES * tally.num_prompts
    most = sum(num_poolable(one.prompt) for one in chosen) / 2
    wait_until(lambda: cluster.hits() - hits > most, lambda: f"{cluster.hits() - hits} tokens came from the pool")
    cluster.settle(cluster.p1, before_1 + sum(len(one.prompt) + NUM_PARITY_TOKENS - 1 for one in chosen))


def test_tenants_share_nothing(cluster: PoolCluster) -> None:
    prompt = make_prompts(6)[-1]
    before = cluster.computed(cluster.p1)
    cluster.ask(cluster.p1, prompt, salt="alice")
    cluster.settle(cluster.p1, before + len(prompt) + NUM_NEW_TOKENS - 1)
    assert cluster.ask(cluster.p2, prompt, salt="bob")["cached"] == 0
    assert cluster.ask(cluster.p2, prompt, salt="alice")["cached"] == num_poolable(prompt)


def test_a_pool_that_dies_under_load_fails_no_request(cluster: PoolCluster) -> None:
    prompts = [prompt for seed in range(10, 13) for prompt in make_prompts(seed) if len(prompt) > BLOCK_SIZE]
    expected = [cluster.ask(cluster.plain, prompt)["tokens"] for prompt in prompts]
    misses_before = cluster.misses()
    served, killed = threading.Semaphore(0), threading.Event()

    def ask(index: int) -> None:
        if index >= 2 * len(prompts) // 3:
            assert killed.wait(ANSWER_DEADLINE_S)  # so that a third of them find it dead
        cluster.ask(cluster.p1, prompts[index])
        answer = cluster.ask(cluster.router, prompts[index], ("p-first", "d-first")[index % 2])
        assert answer["tokens"] == expected[index], f"prompt {index}"
        served.release()

    with ThreadPoolExecutor(6) as pool:
        asked = [pool.submit(ask, index) for index in range(len(prompts))]
        for _ in range(5):
            assert served.acquire(timeout=ANSWER_DEADLINE_S)
        cluster.server.kill()  # in the middle of loads and stores
        killed.set()
        for future in asked:
            future.result(ANSWER_DEADLINE_S)
    wait_until(lambda: cluster.misses() > misses_before, lambda: "no node has missed the pool")

    cluster.server.start()
    seeds = count(100)
    wait_until(lambda: _pooled_again(cluster, next(seeds)), lambda: "no hit after the restart")


def _pooled_again(cluster: PoolCluster, seed: int) -> bool:
    prompt = make_prompts(seed)[-1]
    before = cluster.computed(cluster.p1)
    cluster.ask(cluster.p1, prompt)
    cluster.settle(cluster.p1, before + len(prompt) + NUM_NEW_TOKENS - 1)
    cached: int = cluster.ask(cluster.p2, prompt)["cached"]
    return cached == num_poolable(prompt)
