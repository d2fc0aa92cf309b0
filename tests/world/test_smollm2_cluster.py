"""A real model through P-first, D-first and one node: SmolLM2's tokens, draws and scores beside transformers'.

The figures go to the log: pytest -m slow tests/world/test_smollm2_cluster.py --log-cli-level=INFO
"""

from __future__ import annotations

import json
import logging
import math
from collections import Counter, defaultdict
from typing import TYPE_CHECKING, Any

import httpx
import pytest
import torch

from tests.cluster import Launcher
from tests.integration.system import Answer, Path, System, running_system
from tests.world.chi_square import deviation
from tests.world.published_models import need, template_file
from tests.world.real_prompts import long_texts
from tests.world.smollm2_reference import Continuation, SmolLM2

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path as FilePath

pytestmark = [pytest.mark.slow, pytest.mark.integration, pytest.mark.timeout(1200)]
logger = logging.getLogger(__name__)

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
NUM_TOKENS = 48
AT_ONCE = 8
LOGPROB_ERROR = 5e-4
UNLIKELY = 4.0  # standard deviations
NUM_DRAWS, DRAWS_A_REQUEST = 2000, 50
DRAWN_FROM = "My favourite animal is the"


@pytest.fixture(scope="module")
def directory() -> FilePath:
    return need("smollm2")


@pytest.fixture(scope="module")
def reference(directory: FilePath) -> SmolLM2:
    return SmolLM2(directory)


@pytest.fixture(scope="module")
def system(directory: FilePath) -> Iterator[System]:
    with running_system(f"--model={directory}", "--kv-cache-gb=1", own_mixed=True) as system:
        yield system


@pytest.fixture(scope="module")
def continuations(reference: SmolLM2) -> list[Continuation]:
    return [reference.continued(prompt, messages, NUM_TOKENS) for prompt, messages in reference.prompts()]


# tokens


@pytest.mark.parametrize("path", Path)
def test_tokens_are_those_of_transformers(path: Path, system: System, continuations: list[Continuation]) -> None:
    worst, equal, number = 0.0, 0, 0
    for start in range(0, len(continuations), AT_ONCE):
        some = continuations[start : start + AT_ONCE]
        for expected, answer in zip(some, system.ask_all(path, [_asked(one, path) for one in some]), strict=True):
            tokens, logprobs = _told(answer)
            kept = len(expected.tokens)
            equal += tuple(tokens[:kept]) == expected.tokens
            number += kept
            assert tokens[:kept] == list(expected.tokens), expected
            if not expected.has_tie and kept < NUM_TOKENS:
                assert len(tokens) == kept
                assert answer.choices[0]["finish_reason"] == "stop"
            worst = max(worst, *(abs(a - b) for a, b in zip(logprobs, expected.logprobs, strict=False)))
    logger.info("%s: %d of %d prompts, %d tokens, logprobs off by %.1e", path, equal, len(continuations), number, worst)
    assert worst < LOGPROB_ERROR


def _asked(one: Continuation, path: Path) -> tuple[str, dict[str, Any]]:
    body = {
        "max_tokens": NUM_TOKENS,
        "temperature": 0,
        "return_tokens_as_token_ids": True,
        "cache_salt": f"tokens {path}",
    }
    if one.messages:
        return CHAT, body | {"messages": list(one.messages), "logprobs": True}
    return COMPLETIONS, body | {"prompt": list(one.prompt), "logprobs": 0}


def _told(answer: Answer) -> tuple[list[int], list[float]]:
    """Token ids and log-probabilities of either API."""
    told = answer.choices[0]["logprobs"]
    if "content" in told:
        named = [(entry["token"], entry["logprob"]) for entry in told["content"]]
    else:
        named = list(zip(told["tokens"], told["token_logprobs"], strict=True))
    return [int(name.removeprefix("token_id:")) for name, _ in named], [value for _, value in named]


# draws


SETTINGS: dict[str, dict[str, float]] = {
    "all tokens": {"temperature": 1.0},
    "top_p": {"temperature": 0.8, "top_p": 0.9},
    "min_p": {"temperature": 1.2, "min_p": 0.05},
}


def _support(probabilities: torch.Tensor, settings: dict[str, float]) -> torch.Tensor:
    """The distribution that is drawn from."""
    scaled = probabilities.pow(1 / settings["temperature"])
    scaled = scaled / scaled.sum()
    if "min_p" in settings:
        scaled = torch.where(scaled >= settings["min_p"] * scaled.max(), scaled, 0.0)
    if "top_p" in settings:
        order = scaled.argsort(descending=True)
        before = scaled[order].cumsum(0) - scaled[order]
        scaled[order[before >= settings["top_p"]]] = 0.0
    return scaled / scaled.sum()


@pytest.mark.parametrize("path", [Path.P_FIRST, Path.D_FIRST])
@pytest.mark.parametrize("name", SETTINGS)
def test_draws_follow_transformers(name: str, path: Path, system: System, reference: SmolLM2) -> None:
    """The first token, which P draws, and the second, which D draws: fixed seeds, so a pass stays a pass."""
    settings = SETTINGS[name]
    prompt = reference.tokenizer.encode(DRAWN_FROM)
    body = {"prompt": prompt, "max_tokens": 2, "n": DRAWS_A_REQUEST, "ignore_eos": True, **settings}
    more = {"logprobs": 0, "return_tokens_as_token_ids": True, "cache_salt": f"{path} {name}"}
    requests = [(COMPLETIONS, body | more | {"seed": seed}) for seed in range(NUM_DRAWS // DRAWS_A_REQUEST)]
    seconds: dict[int, Counter[int]] = defaultdict(Counter)
    for start in range(0, len(requests), AT_ONCE):
        for answer in system.ask_all(path, requests[start : start + AT_ONCE]):
            for choice in answer.choices:
                one, two = (int(token.removeprefix("token_id:")) for token in choice["logprobs"]["tokens"])
                seconds[one][two] += 1
    firsts = Counter({one: drawn.total() for one, drawn in seconds.items()})
    assert firsts.total() == NUM_DRAWS
    found = {"first": _checked(firsts, _support(reference.next_probabilities(prompt), settings))}
    for one, _ in firsts.most_common(5):
        expected = _support(reference.next_probabilities([*prompt, one]), settings)
        found[f"after {reference.tokenizer.decode([one])!r}"] = _checked(seconds[one], expected)
    logger.info("%s, %s: standard deviations above the mean: %s", path, name, found)
    assert max(found.values()) < UNLIKELY


def _checked(drawn: Counter[int], probabilities: torch.Tensor) -> float:
    """The deviation; asserts that nothing was drawn that cannot be. An edge of the support may round."""
    outside = [token for token in drawn if probabilities[token] == 0]
    assert outside == [], [probabilities[token] for token in outside]
    return round(deviation(drawn, probabilities.tolist()), 2)


# scores and vectors


@pytest.mark.parametrize("path", Path)
def test_perplexity_is_that_of_transformers(path: Path, system: System, reference: SmolLM2) -> None:
    ids = reference.tokenizer.encode(long_texts()[-1])
    body = {"prompt": ids, "prompt_logprobs": 0, "max_tokens": 1, "cache_salt": f"scores {path}"}
    (choice,) = system.ask(path, COMPLETIONS, body).choices
    told = [entry[str(number)]["logprob"] for number, entry in zip(ids[1:], choice["prompt_logprobs"][1:], strict=True)]
    expected = reference.scores(ids)
    ours, theirs = math.exp(-sum(told) / len(told)), math.exp(-float(expected.double().mean()))
    logger.info("%s: perplexity of %d tokens %.4f, transformers' %.4f", path, len(ids), ours, theirs)
    assert ours == pytest.approx(theirs, rel=1e-5)
    assert told == pytest.approx(expected.tolist(), abs=LOGPROB_ERROR)


def test_embeddings_are_the_last_hidden_state(directory: FilePath, reference: SmolLM2) -> None:
    texts = ["The capital of France is Paris.", "🦜 你好", "def f(x):\n    return x\n", long_texts()[1]]
    with Launcher() as launcher:
        node = launcher.node("mixed", f"--model={directory}", "--task=embed")
        response = httpx.post(f"{node.url}/v1/embeddings", json={"input": texts}, timeout=120, trust_env=False)
    assert response.status_code == 200, response.text
    errors = []
    for text, entry in zip(texts, response.json()["data"], strict=True):
        expected = reference.last_state(reference.tokenizer.encode(text))
        errors.append(float((torch.tensor(entry["embedding"]) - expected).abs().max()))
    logger.info("embeddings are off by at most %.1e", max(errors))
    assert max(errors) < 1e-5


# answers in forms


PEOPLE = (
    *(("Anna", 31, "f"), ("Peter", 45, "m"), ("Maria", 19, "f"), ("Tom", 62, "m"), ("Lisa", 28, "f")),
    *(("John", 37, "m"), ("Clara", 54, "f"), ("Paul", 23, "m"), ("Emma", 41, "f"), ("Jack", 33, "m")),
    *(("Nora", 67, "f"), ("Oscar", 26, "m")),
)
PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 20},
        "age": {"type": "integer", "minimum": 0, "maximum": 120},
        "sex": {"enum": ["m", "f"]},
    },
    "required": ["name", "age", "sex"],
    "additionalProperties": False,
}
RIGHT_FIELDS = 26  # of 36: what the model gives where a comma and a colon may have a blank


def _about(name: str, age: int, sex: str) -> str:
    kind = {"m": "man", "f": "woman"}[sex]
    return f"{name} is a {kind} of {age} years. Give this as JSON with the keys name, age and sex (m or f)."


@pytest.mark.parametrize("path", Path)
def test_json_says_what_the_model_knows(path: Path, system: System) -> None:
    shape = {"type": "json_schema", "json_schema": {"name": "person", "schema": PERSON}}
    more = {"temperature": 0, "max_tokens": 60, "response_format": shape}
    asked = [(CHAT, more | {"messages": [{"role": "user", "content": _about(*person)}]}) for person in PEOPLE]
    right = 0
    for (name, age, sex), answer in zip(PEOPLE, system.ask_all(path, asked), strict=True):
        found = json.loads(answer.choices[0]["message"]["content"])
        right += (found["name"] == name) + (found["age"] == age) + (found["sex"] == sex)
    logger.info("%s: %d of %d fields right", path, right, 3 * len(PEOPLE))
    assert right >= RIGHT_FIELDS


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
@pytest.mark.parametrize("path", Path)
def test_stop_strings_end_an_answer(
    path: Path, stream: bool, system: System, reference: SmolLM2, continuations: list[Continuation]
) -> None:
    """One that begins inside a token and ends inside a later one."""
    whole = reference.tokenizer
    for one in continuations[: 2 * AT_ONCE]:
        text, ends = whole.decode(one.tokens), len(whole.decode(one.tokens[:6]))
        stop = text[ends - 2 : ends + 2]
        asked = {"prompt": list(one.prompt), "max_tokens": NUM_TOKENS, "temperature": 0, "stop": [stop]}
        (choice,) = system.ask(path, COMPLETIONS, asked | {"stream": stream}).choices
        assert choice["text"] == text[: text.index(stop)]
        assert (choice["finish_reason"], choice["stop_reason"]) == ("stop", stop)


TOOL = {
    "type": "function",
    "function": {"name": "note_person", "description": "Note a person", "parameters": PERSON, "strict": True},
}


@pytest.mark.parametrize("path", Path)
@pytest.mark.parametrize("choice", ["required", "named"])
def test_tools_are_called_as_declared(choice: str, path: Path, tool_system: System) -> None:
    named = {"type": "function", "function": {"name": "note_person"}}
    more = {
        "temperature": 0,
        "max_tokens": 100,
        "tools": [TOOL],
        "parallel_tool_calls": False,  # this small model repeats a call until the end
        "tool_choice": named if choice == "named" else "required",
    }
    asked = [(CHAT, more | {"messages": [{"role": "user", "content": _about(*person)}]}) for person in PEOPLE[:4]]
    right = 0
    for (name, age, sex), answer in zip(PEOPLE[:4], tool_system.ask_all(path, asked), strict=True):
        (call,) = answer.choices[0]["message"]["tool_calls"]
        found = json.loads(call["function"]["arguments"])
        assert call["function"]["name"] == "note_person"
        assert found.keys() == {"name", "age", "sex"}
        right += (found["name"] == name) + (found["age"] == age) + (found["sex"] == sex)
    logger.info("%s, %s: %d of 12 arguments right", path, choice, right)


@pytest.fixture(scope="module")
def tool_system(directory: FilePath) -> Iterator[System]:
    """The model's template shows no tools: that of another model with the same marks of turns does."""
    template = template_file("trl", "trl/chat_templates/qwen2_5.jinja")
    flags = (f"--model={directory}", f"--chat-template={template}", "--tool-format=hermes", "--kv-cache-gb=0.5")
    with running_system(*flags) as system:
        yield system
