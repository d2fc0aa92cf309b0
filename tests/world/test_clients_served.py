"""The bodies of real clients before a cluster of two P and two D: served in both orders, streamed and whole.

The model has the tokenizer and the template of a published one, a tiny shape, random weights and 65,536 positions.
"""

from __future__ import annotations

import itertools
import json
import logging
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any, NamedTuple

import httpx
import pytest

from pd_http.dialects import MESSAGES, RESPONSES
from tests.cluster import Launcher
from tests.cut_streams import CHAT
from tests.integration.system import Path, wait_until
from tests.world.bodies import client_specs, prose
from tests.world.published_models import PUBLISHED
from tests.world.shown import not_shown

if TYPE_CHECKING:
    from collections.abc import Iterator

pytestmark = [pytest.mark.slow, pytest.mark.integration, pytest.mark.timeout(900)]

logger = logging.getLogger(__name__)
MAX_LEN = 65_536
NUM_NODES = 2  # of each role
MODEL = "served"
ANSWER_DEADLINE_S = 300.0
SHARED = 0.9  # of the first turn's prompt that the second one must find in the cache
LIMITS = {CHAT: "max_tokens", MESSAGES: "max_tokens", RESPONSES: "max_output_tokens"}
ROUTES = (Path.P_FIRST, Path.D_FIRST)
SPECS = client_specs()
TURNS = [client for client, spec in SPECS.items() if "second" in spec.requests]


class Usage(NamedTuple):
    prompt: int
    cached: int


@pytest.fixture(scope="module")
def router(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Its address."""
    published = next(one for one in PUBLISHED if one.name == "qwen3")
    directory = published.write(tmp_path_factory.mktemp("model") / published.name, max_len=MAX_LEN)
    flags = (
        f"--model={directory}", f"--served-model-name={MODEL}", "--load-format=dummy", "--kv-cache-gb=0.4",
        "--min-remote-tokens=1",
    )  # fmt: skip
    with Launcher() as launcher:
        prefill, decode = (
            [launcher.node(role, f"--node-id={role}{i}", *flags, wait=False) for i in range(NUM_NODES)]
            for role in ("prefill", "decode")
        )
        for node in (*prefill, *decode):
            node.wait_line("ready: ")
        url = launcher.router(prefill=prefill, decode=decode).url
        used: set[str] = set()
        seeds = itertools.count()

        def have_all_learned() -> bool:
            used.update(learn(url, seeds))
            return len(used) == 2 * NUM_NODES

        wait_until(have_all_learned, lambda: f"only {used} have read a prompt")
        yield url


def learn(router: str, seeds: Iterator[int]) -> set[str]:
    """Let nodes read prompts at once, and return their names: one that has read none tells a GPU's speed.

    The texts are like those of the clients: by them the router learns how many tokens a byte has.
    """

    def names(route: Path, seed: int) -> set[str]:
        body = {"model": MODEL, "prompt": prose(20_000, f"learn {seed}"), "max_tokens": 1}
        answer = httpx.post(
            f"{router}/v1/completions", json=body, headers={"x-pd-route": route.value}, timeout=ANSWER_DEADLINE_S,
            trust_env=False,
        )  # fmt: skip
        assert answer.status_code == 200, answer.text
        return {answer.headers["x-pd-prefill"], answer.headers["x-pd-decode"]}

    with ThreadPoolExecutor(8) as threads:
        return set().union(*threads.map(names, [*ROUTES] * 4, [*itertools.islice(seeds, 8)]))


def ask(router: str, route: Path, path: str, body: dict[str, Any]) -> httpx.Response:
    """Asserts that the answer is a 200."""
    body = body | {LIMITS[path]: 4}
    answer = httpx.post(
        f"{router}{path}", json=body, headers={"x-pd-route": route.value}, timeout=ANSWER_DEADLINE_S, trust_env=False
    )
    assert answer.status_code == 200, answer.text
    return answer


def busy(router: str) -> list[str]:
    """What the router counts for its nodes as prompt tokens to compute, or as running."""
    text = httpx.get(f"{router}/metrics", timeout=ANSWER_DEADLINE_S, trust_env=False).text
    counts = [line for line in text.splitlines() if line.startswith(("pd_router_node_queued", "pd_router_node_seq"))]
    assert counts
    return [line for line in counts if float(line.split()[-1])]


def usage(path: str, answer: httpx.Response) -> Usage:
    """Of a whole answer, or of the events of a streamed one."""
    lines = [line.removeprefix("data: ") for line in answer.text.splitlines() if line.startswith("data: {")]
    parts = [json.loads(line) for line in lines] or [answer.json()]
    assert not any(one.get("error") or one.get("type") == "error" for one in parts), answer.text
    found: dict[str, Any] = {}
    for one in parts:
        for holder in (one, one.get("message") or {}, one.get("response") or {}):
            found |= {key: value for key, value in (holder.get("usage") or {}).items() if value is not None}
    if path == MESSAGES:
        cached = found.get("cache_read_input_tokens") or 0
        return Usage(found["input_tokens"] + cached + (found.get("cache_creation_input_tokens") or 0), cached)
    if path == RESPONSES:
        return Usage(found["input_tokens"], found["input_tokens_details"]["cached_tokens"])
    return Usage(found["prompt_tokens"], found["prompt_tokens_details"]["cached_tokens"])


@pytest.mark.parametrize("route", ROUTES)
@pytest.mark.parametrize("client", TURNS)
def test_the_second_turn_finds_the_first_ones_prompt(client: str, route: Path, router: str) -> None:
    """The router chooses the nodes. The turns have other labels; the second one is streamed."""
    spec = SPECS[client]
    asked = {"texts": route.value}
    answers = [ask(router, route, spec.path, spec.body("first", MODEL, label=1, stream=False, **asked))]
    wait_until(lambda: not busy(router), lambda: str(busy(router)))  # the feed may come after the answer
    body = spec.body("second", MODEL, label=2, stream=True, **asked)
    if spec.path == CHAT:
        body["stream_options"] = {"include_usage": True}
    answers.append(ask(router, route, spec.path, body))
    first, second = (usage(spec.path, answer) for answer in answers)
    nodes = [(answer.headers["x-pd-prefill"], answer.headers["x-pd-decode"]) for answer in answers]
    logger.info(
        "%s %s: %d tokens, then %d with %d cached", client, route.value, first.prompt, second.prompt, second.cached
    )
    assert second.cached >= SHARED * first.prompt, (first, second, nodes)


@pytest.mark.parametrize("client", SPECS)
def test_every_body_is_served(client: str, router: str) -> None:
    """Whole and streamed, P-first and D-first."""
    spec = SPECS[client]
    for name in spec.requests:
        for route in ROUTES:
            for stream in (False, True):
                answer = ask(router, route, spec.path, spec.body(name, MODEL, label=3, stream=stream))
                assert answer.headers["x-pd-route"].startswith(route.value.split("-")[0])
                assert answer.text.startswith(("data:", "event:")) == stream


@pytest.mark.parametrize("client", [client for client, spec in SPECS.items() if spec.path == CHAT])
def test_the_prompt_has_all_of_a_chat_body(client: str, router: str) -> None:
    """As the node says that it was. The bodies of other APIs are looked through in `test_client_bodies.py`."""
    spec = SPECS[client]
    for name in spec.requests:
        body = spec.body(name, MODEL, stream=False)
        answer = ask(router, Path.P_FIRST, spec.path, body | {"return_token_ids": True})
        text = httpx.post(
            f"{router}/detokenize", json={"model": MODEL, "tokens": answer.json()["prompt_token_ids"]},
            timeout=ANSWER_DEADLINE_S, trust_env=False,
        ).json()["prompt"]  # fmt: skip
        lost = not_shown(body, text, answer.headers.get("x-pd-ignored", ""))
        # the template of Qwen3 shows the thoughts of the last turn alone
        assert [one for one in lost if not one.path.endswith(".reasoning_content")] == []
