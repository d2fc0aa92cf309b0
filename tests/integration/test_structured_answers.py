"""Grammars through P and D: P draws its one token under the grammar, and the answer is that of one node."""

from __future__ import annotations

import json
import re
from typing import Any, Literal

import httpx
import jsonschema
import openai
import pydantic
import pytest

from tests.integration.foreign import num_redraws
from tests.integration.system import ANSWER_DEADLINE_S, Answer, Path, System, running_system
from tests.integration.test_sampling_parity import (
    CHAT,
    COMPLETIONS,
    HANDOFFS,
    STORY,
    check_handed_over,
    check_same,
    salted,
)
from tests.shallow_model import as_demo_model

pytestmark = [pytest.mark.integration, pytest.mark.timeout(300)]
pytest.importorskip("llguidance")

SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 8},
        "age": {"type": "integer", "minimum": 0, "maximum": 120},
        "tags": {"type": "array", "items": {"enum": ["red", "blue"]}, "minItems": 1, "maxItems": 2},
    },
    "required": ["name", "age", "tags"],
    "additionalProperties": False,
}
FORMAT = {
    "response_format": {"type": "json_schema", "json_schema": {"name": "person", "strict": True, "schema": SCHEMA}}
}
# what is added to a completion of STORY, and a pattern of the whole answers ("": the schema's)
SETTINGS: dict[str, tuple[dict[str, Any], str]] = {
    "schema": ({"seed": 1, "temperature": 1.0, "logprobs": 2} | FORMAT, ""),
    "schema greedy": ({"temperature": 0} | FORMAT, ""),
    "schema, n": ({"seed": 2, "temperature": 1.3, "n": 3, "top_p": 0.9} | FORMAT, ""),
    "penalties": ({"seed": 3, "temperature": 1.0, "frequency_penalty": 1.0, "repetition_penalty": 1.2} | FORMAT, ""),
    "bias, min_tokens": (
        {"seed": 4, "temperature": 1.0, "logit_bias": {"2": 100}, "min_tokens": 60, "ignore_eos": True} | FORMAT, "",
    ),
    "choice": ({"temperature": 0, "structured_outputs": {"choice": ["north", "south"]}}, "north|south"),
    "choice of one token": ({"temperature": 0, "n": 2, "guided_choice": ["1", "2"]}, "[12]"),
    "regex": ({"seed": 5, "temperature": 1.5, "n": 2, "guided_regex": "[A-Z][a-z]{2}-[0-9]"}, "[A-Z][a-z]{2}-[0-9]"),
    "grammar": ({"seed": 6, "temperature": 1.0, "ebnf": 'root ::= ("ab" | "c") root | "."'}, r"(ab|c)*\."),
    "stop string": ({"temperature": 0, "guided_regex": "abc[0-9]{3}", "stop": "c"}, "ab"),
    "two tokens": ({"seed": 7, "temperature": 1.0, "max_tokens": 2} | FORMAT, r'\{"n?a?m?e?"?:?"?'),
}  # fmt: skip


@pytest.fixture
def system(shared_system: System) -> System:
    """The decode node is the mixed one, too."""
    return shared_system


@pytest.fixture(scope="module")
def answers(shared_system: System) -> dict[Path, dict[str, Answer]]:
    """To all settings, by each way at once; streamed P-first."""
    found = {}
    for path in Path:
        bodies = [{"prompt": STORY, "max_tokens": 80} | more for more, _ in SETTINGS.values()]
        if path is not Path.MIXED:
            bodies = [salted(path, body, stream=path is Path.P_FIRST) for body in bodies]
        several = shared_system.ask_all(path, [(COMPLETIONS, body) for body in bodies])
        found[path] = dict(zip(SETTINGS, several, strict=True))
    return found


@pytest.mark.parametrize("path", HANDOFFS)
@pytest.mark.parametrize("name", SETTINGS)
def test_settings(name: str, path: Path, answers: dict[Path, dict[str, Answer]]) -> None:
    mixed = answers[Path.MIXED][name]
    for choice in mixed.choices:
        check_text(choice["text"], SETTINGS[name][1])
        assert choice["finish_reason"] == ("length" if name == "two tokens" else "stop")
    check_handed_over(answers[path][name], mixed)


def check_text(text: str, pattern: str) -> None:
    if pattern:
        assert re.fullmatch(pattern, text), text
    else:
        jsonschema.validate(json.loads(text), SCHEMA)


@pytest.mark.parametrize("path", HANDOFFS)
def test_p_draws_the_first_tokens(path: Path, system: System) -> None:
    """D takes them: it draws none again. Constrained and free requests at once."""
    before = num_redraws(system), num_redraws(system, "no_digest")
    requests = [
        (COMPLETIONS, {"prompt": f"{number} {STORY}", "max_tokens": 80, "seed": number, "cache_salt": f"{path}"} | more)
        for number in range(8)
        for more in (FORMAT, {"max_tokens": 12})
    ]
    answers = system.ask_all(path, requests)
    for answer in answers[::2]:
        jsonschema.validate(json.loads(answer.choices[0]["text"]), SCHEMA)
    assert {answer.headers["x-pd-prefill"] for answer in answers} == {"prefill"}
    assert (num_redraws(system), num_redraws(system, "no_digest")) == before


ASKED_IN_CHAT: dict[str, Any] = {
    "messages": [{"role": "user", "content": STORY}], "max_tokens": 80, "seed": 9, "n": 2, **FORMAT,
}  # fmt: skip


@pytest.fixture(scope="module")
def mixed_chat(shared_system: System) -> Answer:
    return shared_system.ask(Path.MIXED, CHAT, ASKED_IN_CHAT)


@pytest.mark.parametrize("path", HANDOFFS)
def test_chat(path: Path, system: System, mixed_chat: Answer) -> None:
    for choice in mixed_chat.choices:
        jsonschema.validate(json.loads(choice["message"]["content"]), SCHEMA)
    check_same(system, path, CHAT, ASKED_IN_CHAT, mixed_chat, stream=True)


@pytest.mark.parametrize("path", HANDOFFS)
def test_a_refused_grammar_is_a_400_and_opens_no_lease(path: Path, system: System) -> None:
    for more in ({"regex": "("}, {"guided_json": {"uniqueItems": True}}, {"ebnf": "start: <nothing>"}):
        response = httpx.post(
            f"{system.router_url}{COMPLETIONS}", json={"prompt": STORY} | more, headers={"x-pd-route": path.value},
            timeout=ANSWER_DEADLINE_S, trust_env=False,
        )  # fmt: skip
        assert response.status_code == 400, response.text
        assert response.json()["error"]["param"] == next(iter(more))
    system.settle()


@pytest.mark.parametrize("path", Path)
def test_a_grammar_that_leads_nowhere_ends_its_request_alone(path: Path, system: System) -> None:
    """The end of its language shows after its second token only."""
    dead = {"prompt": STORY, "guided_grammar": 'start: "12" X\nX: /1+/ & /2+/', "cache_salt": f"dead {path}"}
    url, headers = (system.urls[system.mixed], {}) if path is Path.MIXED else (
        system.router_url, {"x-pd-route": path.value},
    )  # fmt: skip
    response = httpx.post(f"{url}{COMPLETIONS}", json=dead, headers=headers, timeout=ANSWER_DEADLINE_S, trust_env=False)
    assert response.status_code == 400, response.text
    assert response.json()["error"]["code"] == "grammar_failed"
    system.settle()
    assert system.ask(path, COMPLETIONS, {"prompt": STORY, "guided_choice": ["1"]}).choices[0]["text"] == "1"


class Author(pydantic.BaseModel):
    """What OpenAI's client makes a strict schema of."""

    name: str = pydantic.Field(max_length=8)
    born: int = pydantic.Field(ge=0, le=2100)
    works: list[Literal["Faust", "Egmont"]] = pydantic.Field(min_length=1, max_length=2)


@pytest.mark.parametrize("stream", [False, True])
def test_openai_s_client_parses_the_answer(stream: bool, system: System) -> None:
    with openai.OpenAI(base_url=f"{system.router_url}/v1", api_key="none", max_retries=0) as client:
        asked: dict[str, Any] = {
            "model": "demo_model", "messages": [{"role": "user", "content": STORY}], "seed": 3, "max_tokens": 120,
            "response_format": Author,
        }  # fmt: skip
        if stream:
            with client.chat.completions.stream(**asked) as events:
                answer = events.get_final_completion()
        else:
            answer = client.chat.completions.parse(**asked)
    assert isinstance(answer.choices[0].message.parsed, Author)


@pytest.mark.slow
@pytest.mark.parametrize("path", HANDOFFS)
def test_preemption_on_d_changes_no_answer(path: Path, system: System) -> None:
    """D's cache holds 30 blocks; the requests want twice as many."""
    people = {"type": "array", "items": SCHEMA, "minItems": 3, "maxItems": 4}
    bodies = [
        {"prompt": f"{number} {STORY}", "max_tokens": 80, "seed": number, "temperature": 1.0, "guided_json": people}
        for number in range(10)
    ]
    mixed = system.ask_all(Path.MIXED, [(COMPLETIONS, body) for body in bodies])
    with running_system(*as_demo_model(), "--num-blocks=30") as small:
        answers = small.ask_all(path, [(COMPLETIONS, body) for body in bodies])
        samples = small.settled_metrics("decode")
    preempted = [value for name, value in samples.items() if name.startswith("pd_preemptions_")]
    assert sum(preempted) > 0
    for ours, theirs in zip(answers, mixed, strict=True):
        assert ours.choices[0]["text"] == theirs.choices[0]["text"]
        assert ours.choices[0]["finish_reason"] == theirs.choices[0]["finish_reason"]
