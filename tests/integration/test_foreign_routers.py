"""Behind the routers of others: the answers are D's, on KV that P computed.

vllm-router asks P for at least one token whatever the client asks for. Each router is installed into a virtual
environment of this test's own; where that cannot be, the test says so and is skipped.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

import pytest

from tests.cluster import Launcher
from tests.integration.foreign import COMPLETIONS, num_redraws
from tests.integration.foreign_routers import Recorder, production_stack, vllm_router
from tests.integration.system import System, ask_url, running_system
from tests.integration.test_first_token import BASE, BODY_FIELDS, CASES, STREAM, check_same
from tests.integration.test_sampling_parity import EOS, STORY
from tests.server.foreign_exchanges import ROUTERS, Exchange, load, save, shape

if TYPE_CHECKING:
    from collections.abc import Iterator

pytestmark = [pytest.mark.integration, pytest.mark.slow, pytest.mark.timeout(1800)]

CHAT = "/v1/chat/completions"
STARTS = dict(zip(ROUTERS, (vllm_router, production_stack), strict=True))
HI: dict[str, Any] = {"model": "demo_model", "messages": [{"role": "user", "content": "Tell me a story of a fox."}]}
ONCE: dict[str, Any] = {"model": "demo_model", "prompt": "Once upon a time there was a fox", "seed": 7}
ASKED: tuple[tuple[str, dict[str, Any]], ...] = (
    (COMPLETIONS, ONCE | {"max_tokens": 3, "temperature": 0.7}),
    (COMPLETIONS, ONCE | {"max_tokens": 3, "logprobs": 1, "ignore_eos": True} | STREAM),
    (CHAT, HI | {"max_completion_tokens": 3, "n": 2, "temperature": 0.3}),
    (CHAT, HI | {"max_tokens": 3, "logprobs": True, "top_logprobs": 2} | STREAM),
)


@pytest.fixture(scope="module")
def system() -> Iterator[System]:
    with running_system("--kv-cache-gb=0.1", "--logits-stage=tests.ban_token:BanToken", own_mixed=True) as system:
        yield system


@pytest.fixture(scope="module", params=ROUTERS)
def foreign(
    request: pytest.FixtureRequest, system: System, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[str, str, Recorder]]:
    """Its name, its address, and what passes between it and the nodes."""
    directory, recorder = tmp_path_factory.mktemp(request.param), Recorder()
    with (
        Launcher() as launcher,
        recorder.before("prefill", system.urls["prefill"]) as prefill,
        recorder.before("decode", system.urls["decode"]) as decode,
    ):
        yield request.param, STARTS[request.param](directory, launcher, prefill, decode), recorder


@pytest.fixture
def url(foreign: tuple[str, str, Recorder]) -> str:
    return foreign[1]


@pytest.fixture
def alters_legs(foreign: tuple[str, str, Recorder]) -> bool:
    """Whether the router asks P for another first token than the client asks for."""
    return foreign[0].startswith("vllm-router")


def test_an_end_that_p_may_not_sample_is_sampled_by_d(system: System, url: str, alters_legs: bool) -> None:
    body = HI | {"max_tokens": 8, "temperature": 0, "logit_bias": {str(EOS): 100}, "cache_salt": url}
    before = num_redraws(system)
    [answer] = ask_url(url, [(CHAT, body)])
    assert (answer.choices[0]["message"]["content"], answer.choices[0]["finish_reason"]) == ("", "stop")
    assert answer.body["usage"]["completion_tokens"] == 1
    assert num_redraws(system) == before + alters_legs


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
@pytest.mark.parametrize("name", CASES)
def test_every_parameter(name: str, stream: bool, system: System, url: str) -> None:
    more, values = CASES[name]
    bodies = [BASE | more | {"model": "demo_model", BODY_FIELDS.get(name, name): value} for value in values]
    mixed = system.ask_node_all("mixed", [(COMPLETIONS, body) for body in bodies])
    read = system.settled_metric("decode", "pd_external_tokens_total")
    extra = {"cache_salt": f"{name} {stream} {url}"} | (STREAM if stream else {})
    for answer, expected in zip(ask_url(url, [(COMPLETIONS, b | extra) for b in bodies]), mixed, strict=True):
        check_same(answer, expected)
    assert system.settled_metric("decode", "pd_external_tokens_total") > read, "the KV was moved"


def test_a_leg_that_asks_for_a_token_anyway_has_its_token_used(system: System, url: str) -> None:
    """With `min_tokens` 1 of the client the two legs are equal."""
    body = BASE | {"model": "demo_model", "min_tokens": 1, "seed": None, "cache_salt": f"equal {url}"}
    before = num_redraws(system)
    ask_url(url, [(COMPLETIONS, body)])
    assert num_redraws(system) == before


def test_several_prompts(system: System, url: str) -> None:
    body = BASE | {"model": "demo_model", "prompt": [STORY, "It was cold and"], "temperature": 0}
    [answer] = ask_url(url, [(COMPLETIONS, body)])
    check_same(answer, system.ask_node("mixed", COMPLETIONS, body))


def test_legs_are_those_that_are_recorded(foreign: tuple[str, str, Recorder]) -> None:
    """`tests/server/test_foreign_exchanges.py` sends the recorded ones."""
    name, url, recorder = foreign
    seen: list[Exchange] = []
    recorder.forget()
    for path, body in ASKED:
        ask_url(url, [(path, body)])
        seen.append({"asked": body, "legs": recorder.take()})
    if os.environ.get("PD_RECORD"):
        save(name, seen)
    for one, recorded in zip(seen, load(name), strict=True):
        assert [_form(leg) for leg in one["legs"]] == [_form(leg) for leg in recorded["legs"]]


def _form(leg: dict[str, Any]) -> Any:
    """What must not change: where it goes, the names and types of what it has, and P's part of D's request."""
    same = {name: leg[name] for name in ("node", "path", "status", "type")}
    return same | {"body": shape(leg["body"]), "answer": shape(leg["answer"]), "headers": sorted(leg["headers"])}
