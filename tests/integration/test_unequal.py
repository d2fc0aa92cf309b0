"""Nodes of one, two and four ranks: each prefills for another, in both orders, and the answers are equal.

Slow: the pairs with four ranks. `test_ranks.py` tests those of one and two ranks, on the nodes of its other tests.
"""

from __future__ import annotations

import random
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import httpx
import pytest

from pd_cluster.launch.node_commands import RouterOrders
from pd_connectors.protocol.keys import derive_key
from tests.cluster import TEST_KEY, Launcher
from tests.deadlines import HANG_S
from tests.integration.fault_cluster import parse_metrics
from tests.integration.reference import random_prompt
from tests.integration.system import BLOCK_BYTES, BLOCK_SIZE, Answer, ask_url, wait_until

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from tests.cluster import Launched

pytestmark = [pytest.mark.integration, pytest.mark.slow, pytest.mark.timeout(300)]

LENGTHS = (97, 160, 300)  # a node that may decode computes shorter ones by itself
SAMPLING: tuple[dict[str, Any], ...] = ({"temperature": 0}, {"temperature": 0.8, "seed": 3})
FLAGS = ("--kv-cache-gb=0.1", "--max-num-batched-tokens=64")  # prompts are computed in chunks


@pytest.fixture(scope="module")
def launcher() -> Iterator[Launcher]:
    with Launcher() as launcher:
        yield launcher


class Nodes:
    """One of each degree, started when it is asked for. A router goes by a node's own role, which each test orders."""

    def __init__(self, launcher: Launcher) -> None:
        self._launcher = launcher
        self._by_degree: dict[int, Launched] = {}

    def of(self, *degrees: int) -> list[Launched]:
        """They start at once."""
        for degree in set(degrees) - self._by_degree.keys():
            flags = (f"--node-id=tp{degree}", f"--tp={degree}", *FLAGS)
            self._by_degree[degree] = self._launcher.node("mixed", *flags, wait=False)
        for degree in degrees:
            self._by_degree[degree].wait_line("ready: ")
        return [self._by_degree[degree] for degree in degrees]


@pytest.fixture(scope="module")
def nodes(launcher: Launcher) -> Nodes:
    return Nodes(launcher)


def ask(server: Launched, prompts: Sequence[list[int]], route: str = "", salt: str = "") -> list[Answer]:
    """Salted: nothing is found that another test has cached. Each prompt is asked for greedily, and drawn.

    By a route all prompts are asked for at once, and when these are answered drawn: from KV that is there.
    """
    body = {"max_tokens": 8, "ignore_eos": True, "cache_salt": salt or None, "logprobs": 0}
    requests = [("/v1/completions", {"prompt": prompt, **body, **how}) for prompt in prompts for how in SAMPLING]
    if not route:
        return ask_url(server.url, requests)
    rounds = [ask_url(server.url, requests[first :: len(SAMPLING)], route) for first in range(len(SAMPLING))]
    return [answer for of_a_prompt in zip(*rounds, strict=True) for answer in of_a_prompt]


def tokens(answers: Sequence[Answer]) -> list[list[str]]:
    return [answer.choices[0]["logprobs"]["tokens"] for answer in answers]


def metric(node: Launched, name: str) -> float:
    return parse_metrics(httpx.get(f"{node.url}/metrics", trust_env=False).text)[name]


@contextmanager
def paired(router: Launched, prefill: str, decode: str) -> Iterator[None]:
    """The nodes of these ids have these roles meanwhile, and are mixed again afterwards."""
    with httpx.Client(base_url=router.url, trust_env=False, timeout=HANG_S) as client:
        orders = RouterOrders(client, derive_key(TEST_KEY))
        try:
            orders.give("role", decode, "decode")
            orders.give("role", prefill, "prefill")
            yield
        finally:
            for node in (prefill, decode):
                orders.give("role", node, "mixed")


def check_pair(
    launcher: Launcher,
    alone: Launched,
    nodes: dict[str, Launched],
    prefill: str,
    decode: str,
    block_bytes: int = BLOCK_BYTES,
) -> None:
    """Through the pair of these ids of `nodes`, the answers equal those of `alone` and of each node by itself."""
    prompts = [random_prompt(random.Random(length), length) for length in LENGTHS]
    router = launcher.router(prefill=[nodes[prefill]], decode=[nodes[decode]])
    expected = tokens(ask(alone, prompts, salt=f"alone {prefill} {decode}"))
    for name in (prefill, decode):
        if nodes[name] is not alone:
            assert tokens(ask(nodes[name], prompts, salt=f"alone {prefill} {decode}")) == expected
    with paired(router, prefill, decode):
        for route in ("p-first", "d-first"):
            before = metric(nodes[decode], "pd_kv_transfer_bytes_total")
            answers = ask(router, prompts, route, f"{route} {prefill} {decode}")
            assert tokens(answers) == expected
            assert {answer.headers["x-pd-prefill"] for answer in answers[:: len(SAMPLING)]} == {prefill}
            cold = sum(-(-length // BLOCK_SIZE) for length in LENGTHS) * block_bytes

            def read(before: float = before) -> float:
                return metric(nodes[decode], "pd_kv_transfer_bytes_total") - before

            wait_until(lambda read=read, cold=cold: read() >= cold, lambda read=read: f"{read()} bytes moved")  # type: ignore[misc]
            assert read() <= 2 * cold, "each prompt moved when it was asked for first"
    router.stop()
    for node in (nodes[prefill], nodes[decode]):
        wait_until(lambda node=node: metric(node, "pd_leases_open") == 0, lambda: "a lease is left")  # type: ignore[misc]
        assert metric(node, "pd_quarantined_blocks") == 0


@pytest.mark.parametrize("degrees", [(2, 4), (4, 2), (4, 1), (1, 4)], ids=lambda pair: "{}-to-{}".format(*pair))
def test_a_node_prefills_for_one_of_another_degree(launcher: Launcher, nodes: Nodes, degrees: tuple[int, int]) -> None:
    alone, prefill, decode = nodes.of(1, *degrees)
    prefill_name, decode_name = (f"tp{degree}" for degree in degrees)
    found = {prefill_name: prefill, decode_name: decode}
    check_pair(launcher, alone, found, prefill_name, decode_name)
