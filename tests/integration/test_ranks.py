"""Nodes of two ranks (`--tp 2`) beside a node of one: equal answers, and ranks that are killed or stand still.

They have the shallow model: the answers of one are compared with those of the other.

A node ends by a rank's death or stop, its requests are answered by the other node, and no process of it is
left.
"""

from __future__ import annotations

import asyncio
import signal
import sys
from typing import TYPE_CHECKING, Any

import httpx
import pytest

from tests.cluster import Launcher
from tests.deadlines import wait_until
from tests.integration.calls import Call
from tests.integration.fault_cluster import fetch, make_prompt, parse_metrics, until
from tests.integration.gate import Gate
from tests.integration.system import LAYER_BYTES, ask_url
from tests.integration.test_unequal import check_pair
from tests.patient_node import PATIENT_WITH_STEPS
from tests.shallow_model import NUM_LAYERS, shallow_model

if TYPE_CHECKING:
    from collections.abc import Iterator

    import psutil

    from tests.cluster import Launched
    from tests.integration.calls import Outcome

pytestmark = [pytest.mark.integration, pytest.mark.long, pytest.mark.anyio, pytest.mark.timeout(300)]

COMMON = (
    "--async-scheduling=on", "--max-num-seqs=8", "--kv-cache-gb=0.03",
    "--max-num-batched-tokens=64",  # prompts are computed in chunks
    "--max-model-len=700",  # streams go on at nodes of equal limits only
)  # fmt: skip
RANKED = ("--tp=2", "--num-blocks=48", "--swap-gb=0.01")  # too few blocks for what runs at once
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"], "additionalProperties": False}
ASKED: tuple[dict[str, Any], ...] = (
    {"temperature": 0},
    {"temperature": 0.9, "seed": 3},
    {"temperature": 0.9, "seed": 4, "top_k": 30, "logprobs": 2},
    {"temperature": 0.7, "seed": 5, "n": 2},
    {"temperature": 0, "frequency_penalty": 0.7, "repetition_penalty": 1.1},
    {"use_beam_search": True, "n": 3, "length_penalty": 0.5},
    {"temperature": 0.8, "seed": 6, "response_format": {"type": "json_schema", "json_schema": {"schema": SCHEMA}}},
)
STREAMS: tuple[dict[str, Any], ...] = ({"temperature": 0}, {"temperature": 0.8, "seed": 11})
BODIES: list[dict[str, Any]] = [
    {"prompt": make_prompt(40 + 30 * number), "max_tokens": 80, "ignore_eos": True, "stream": True}
    | STREAMS[number % len(STREAMS)]
    for number in range(6)
]
# Why a node ends, by the rank that failed. Each other deadline for silence is longer than `Launched.wait` waits
CAUSES = {
    (0, signal.SIGKILL): "the engine process ended with status",
    (0, signal.SIGSTOP): "the engine has said nothing for",
    (1, signal.SIGKILL): "rank 1 has ended",
    (1, signal.SIGSTOP): "rank 1 has been silent for",
}
SPOKEN = 20  # tokens of the answers of `ranked` when a rank fails
PAUSE_S = 4.2  # an engine that is silent is frozen after 2.25 s; a process that does not run is ended after 3 s
STATUS = 1  # of a node that has lost its engine


def common() -> tuple[str, ...]:
    """Flags of all nodes."""
    return f"--model={shallow_model()}", *COMMON


@pytest.fixture(scope="module")
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture(scope="module")
def launcher() -> Iterator[Launcher]:
    with Launcher() as launcher:
        yield launcher


@pytest.fixture(scope="module")
def gate(tmp_path_factory: pytest.TempPathFactory) -> Gate:
    """Of the nodes of two ranks."""
    return Gate(tmp_path_factory.mktemp("gates"), "ranked")


@pytest.fixture(scope="module")
def nodes(launcher: Launcher, gate: Gate) -> list[Launched]:
    """Of one rank, and of two. They start at once."""
    found = [
        launcher.node("mixed", "--node-id=plain", *common(), wait=False),
        launcher.node(
            "mixed", "--node-id=ranked", *common(), *RANKED, *gate.flags, environment=gate.environment, wait=False
        ),
    ]
    for node in found:
        node.wait_line("ready: ")
    return found


@pytest.fixture(scope="module")
def plain(nodes: list[Launched]) -> Launched:
    return nodes[0]


@pytest.fixture(scope="module")
def ranked(nodes: list[Launched]) -> Launched:
    return nodes[1]


def rank_process(node: Launched, rank: int) -> psutil.Process:
    """Rank 0 lives in the engine's process."""
    module = "pd_cluster.worker.rank" if rank else "pd_cluster.engine.process"
    return next(one for one in node.family() if module in " ".join(one.cmdline()))


def num_swapped(node: Launched) -> float:
    return parse_metrics(httpx.get(f"{node.url}/metrics", trust_env=False).text)["pd_preemptions_swap_total"]


def test_a_rank_is_a_child_of_the_engine(ranked: Launched) -> None:
    """Forked by tests/forked_command.py, and called as the product executes it (tests/worker/test_rank_link.py)."""
    engine, rank = rank_process(ranked, 0), rank_process(ranked, 1)
    assert rank.ppid() == engine.pid
    assert rank.cmdline() == [sys.executable, "-P", "-m", "pd_cluster.worker.rank"]


def test_answers_equal_those_of_one_rank(plain: Launched, ranked: Launched) -> None:
    """All at once, so that the sequences do not fit: some are preempted to host memory and come back."""
    requests = [
        ("/v1/completions", {"prompt": make_prompt(90 + 17 * number), "max_tokens": 20, "ignore_eos": True} | asked)
        for number, asked in enumerate((*ASKED, *ASKED[:2]))
    ]
    expected, found = ask_url(plain.url, requests), ask_url(ranked.url, requests)
    wait_until(lambda: num_swapped(ranked) > 0, lambda: "no sequence was preempted")
    for (_, body), theirs, ours in zip(requests, expected, found, strict=True):
        for their, our in zip(theirs.choices, ours.choices, strict=True):
            assert (our["text"], our["finish_reason"]) == (their["text"], their["finish_reason"]), body
            if "logprobs" in body:
                assert our["logprobs"]["tokens"] == their["logprobs"]["tokens"]
                assert our["logprobs"]["token_logprobs"] == pytest.approx(their["logprobs"]["token_logprobs"], abs=1e-3)


@pytest.mark.parametrize(("prefill", "decode"), [("plain", "ranked"), ("ranked", "plain")])
def test_a_node_prefills_for_one_of_another_degree(
    launcher: Launcher, nodes: list[Launched], prefill: str, decode: str
) -> None:
    """Pairs with four ranks are in `test_unequal.py`."""
    found = dict(zip(("plain", "ranked"), nodes, strict=True))
    check_pair(launcher, nodes[0], found, prefill, decode, NUM_LAYERS * LAYER_BYTES)


@pytest.mark.slow
async def test_a_step_that_stands_still_for_a_while_ends_no_node(launcher: Launcher) -> None:
    """It counts as frozen meanwhile, and answers. Its process gives signs of life; the step may take longer."""
    flags = ("--node-id=pauses", "--logits-stage=tests.pause_step:PauseStep", *common(), *RANKED)
    node = launcher.node("mixed", *flags, environment=PATIENT_WITH_STEPS)
    body = {"prompt": make_prompt(100), "max_tokens": 8, "temperature": 0, "ignore_eos": True}
    expected = [await Call(node.url, body).outcome() for _ in range(2)][1]  # kinds of steps are no warm-up any more
    paused = await Call(node.url, body | {"logits_args": {"pause_s": PAUSE_S}}).outcome()
    paused.check(expected)
    assert paused.seconds > PAUSE_S

    async def counts_a_freeze() -> bool:
        return parse_metrics((await fetch(f"{node.url}/metrics")).text)["pd_engine_freezes_total"] >= 1

    await until(counts_a_freeze, "the node counts that it was frozen")
    assert node.stop() == 0


@pytest.fixture(scope="module")
async def expected(plain: Launched) -> list[Outcome]:
    calls = [Call(plain.url, body) for body in BODIES]
    outcomes = [await call.outcome() for call in calls]
    assert all(outcome.error is None for outcome in outcomes)
    return outcomes


async def fail(node: Launched, rank: int, signum: signal.Signals) -> None:
    """Signal a rank. The node ends by itself, for that cause, and no process of it is left."""
    process = rank_process(node, rank)
    process.send_signal(signum)
    assert await asyncio.to_thread(node.wait) == STATUS, node.output
    assert CAUSES[rank, signum] in node.output
    assert await asyncio.to_thread(node.leftovers) == []


async def check_fault(
    launcher: Launcher,
    plain: Launched,
    ranked: Launched,
    gate: Gate,
    expected: list[Outcome],
    rank: int,
    signum: signal.Signals,
) -> None:
    """The other node goes on with all streams of the one that a signal to a rank ends."""
    router = launcher.router("--health-interval-s=0.2", "--continue-wait-s=60", mixed=[plain, ranked])

    async def counted(name: str) -> float:
        told = parse_metrics((await fetch(f"{router.url}/metrics")).text)
        return sum(value for key, value in told.items() if key.startswith(name))

    with gate.held(answer=SPOKEN):
        calls = [Call(router.url, body) for body in BODIES]
        await asyncio.gather(*(call.begun() for call in calls))
        await fail(ranked, rank, signum)
    for call, outcome in zip(calls, expected, strict=True):
        (await call.outcome()).check(outcome)

    async def has_moved() -> bool:
        return await counted("pd_router_continuations_total") >= 1

    await until(has_moved, "the router counts a stream that it has moved")

    async def holds_nothing() -> bool:
        kv = (await fetch(f"{plain.url}/kv")).json()
        return bool(kv["in_use"] + kv["leased"] + kv["quarantined"] == 0)

    await until(holds_nothing, "the other node holds nothing")
    router.stop()


async def test_a_killed_rank(
    launcher: Launcher, plain: Launched, ranked: Launched, gate: Gate, expected: list[Outcome]
) -> None:
    """The last test of `ranked`. Its end is noticed before it is missed."""
    await check_fault(launcher, plain, ranked, gate, expected, 1, signal.SIGKILL)


@pytest.mark.slow
@pytest.mark.parametrize("signum", [signal.SIGSTOP, signal.SIGKILL])
@pytest.mark.parametrize("rank", [0, 1])
async def test_a_rank_that_fails(
    launcher: Launcher, plain: Launched, gate: Gate, expected: list[Outcome], rank: int, signum: signal.Signals
) -> None:
    ranked = launcher.node(
        "mixed", f"--node-id=ranked-{rank}-{signum.name}", *common(), *RANKED, *gate.flags,
        environment=gate.environment,
    )  # fmt: skip
    await check_fault(launcher, plain, ranked, gate, expected, rank, signum)
