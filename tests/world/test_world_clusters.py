"""Real tokenizers with random weights of the published shape, on one node and through P and D.

The embedding has the rows of the published model, so some have no token. Each model answers in forms, calls tools, ends
at stop strings and tells log-probabilities, whatever it draws.
"""

from __future__ import annotations

import json
import re
from typing import TYPE_CHECKING, Any

import httpx
import jsonschema
import pytest

from pd_cluster.server.tools.known_formats import FORMATS
from tests.integration.system import Answer, Path, System, running_system, wait_until
from tests.world.published_models import PUBLISHED, PublishedModel

if TYPE_CHECKING:
    from collections.abc import Iterator

pytestmark = [pytest.mark.slow, pytest.mark.integration, pytest.mark.timeout(600)]

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
HANDOFFS = (Path.P_FIRST, Path.D_FIRST)
PROMPT = "def f(x):\n    return x  # 你好 🦜 naïve. "
CHOICES = ["a,  b,    c", "if x:\n    y", "你好，世界", "👩‍👩‍👧‍👦 🦜", "é ẹ̀", "x"]
PATTERN = r"(?:if [a-z]:\n(?: {4}){1,3}[a-z] = [0-9]{1,3}\n){1,2}"
SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 8},
        "word": {"enum": ["x  y", "日本", "🦜"]},
        "tags": {"type": "array", "items": {"enum": ["red", "blue"]}, "minItems": 1, "maxItems": 2},
    },
    "required": ["name", "word", "tags"],
    "additionalProperties": False,
}
PARAMETERS: dict[str, Any] = {  # in what every format can write, without text that random weights never end
    "type": "object",
    "properties": {
        "city": {"type": "string", "enum": ["Köln", "東京", "New  York"]},
        "days": {"type": "integer", "minimum": 1, "maximum": 9},
        "units": {"type": "array", "items": {"enum": ["C", "F"]}, "minItems": 1, "maxItems": 2},
    },
    "required": ["city", "days", "units"],
    "additionalProperties": False,
}


@pytest.fixture(scope="module", params=PUBLISHED, ids=lambda model: model.name)
def published(request: pytest.FixtureRequest) -> PublishedModel:
    model: PublishedModel = request.param
    return model


@pytest.fixture(scope="module")
def system(published: PublishedModel, tmp_path_factory: pytest.TempPathFactory) -> Iterator[System]:
    """D is the mixed node, too."""
    directory = published.write(tmp_path_factory.mktemp("model") / published.name)
    with running_system(f"--model={directory}", "--load-format=dummy", "--kv-cache-gb=0.05") as system:
        for url in system.urls.values():
            wait_until(lambda url=url: _checks_grammars(url), lambda url=url: f"{url} checks no grammar")  # type: ignore[misc]
        yield system


def _checks_grammars(url: str) -> bool:
    """The process that checks them reads a large vocabulary first, behind all else on the machine: a 503 till then."""
    asked = {"prompt": "a", "max_tokens": 4, "structured_outputs": {"choice": ["a"]}}
    response = httpx.post(f"{url}{COMPLETIONS}", json=asked, timeout=60, trust_env=False)
    assert response.status_code in (200, 503), response.text
    return response.status_code == 200


def answers(system: System, endpoint: str, body: dict[str, Any]) -> Answer:
    """From one node. P-first, whole, and D-first, streamed, give the same."""
    mixed = system.ask(Path.MIXED, endpoint, body)
    for path in HANDOFFS:
        again = system.ask(path, endpoint, body | {"cache_salt": path.value, "stream": False})
        assert _said(again) == _said(mixed), path
    if endpoint == COMPLETIONS:
        streamed = system.ask(Path.D_FIRST, endpoint, body | {"cache_salt": "streamed", "stream": True})
        assert [choice["text"] for choice in streamed.choices] == [choice["text"] for choice in mixed.choices]
    return mixed


def _said(answer: Answer) -> list[Any]:
    """What must not depend on the way: not ids of calls, not the last digits of log-probabilities."""
    return [
        (
            choice.get("text"),
            choice["finish_reason"],
            (choice.get("message") or {}).get("content"),
            [call["function"] for call in (choice.get("message") or {}).get("tool_calls") or ()],
        )
        for choice in answer.choices
    ]


FORMS: dict[str, dict[str, Any]] = {
    "choice": {"structured_outputs": {"choice": CHOICES}},
    "regex": {"structured_outputs": {"regex": PATTERN}},
    "json": {"response_format": {"type": "json_schema", "json_schema": {"name": "one", "schema": SCHEMA}}},
}


@pytest.mark.parametrize("form", FORMS)
def test_answers_have_their_form(form: str, system: System) -> None:
    asked = {"prompt": PROMPT, "max_tokens": 200, "temperature": 1.0, "n": 4, "seed": 5, "logprobs": 1} | FORMS[form]
    for choice in answers(system, COMPLETIONS, asked).choices:
        text = choice["text"]
        assert choice["finish_reason"] == "stop"
        assert "".join(choice["logprobs"]["tokens"][:-1]) == text or "bytes:" in "".join(choice["logprobs"]["tokens"])
        if form == "choice":
            assert text in CHOICES
        elif form == "regex":
            assert re.fullmatch(PATTERN, text)
        else:
            jsonschema.validate(json.loads(text), SCHEMA)


@pytest.mark.parametrize("kind", ["required", "named", "strict"])
def test_tools_are_called_in_their_form(kind: str, published: PublishedModel, system: System) -> None:
    """A template without tools is a 400 that says so."""
    function = {"name": "weather", "description": "of a city", "parameters": PARAMETERS, "strict": kind == "strict"}
    choice: Any = {"type": "function", "function": {"name": "weather"}} if kind == "named" else "required"
    asked = {
        "messages": [{"role": "user", "content": PROMPT}],
        "tools": [{"type": "function", "function": function}],
        "tool_choice": choice,
        "temperature": 1.0,
        "seed": 7,
        "max_tokens": 600,
        "logit_bias": _ends_of_reasoning(published),
    }
    if published.tool_format == "":
        response = httpx.post(f"{system.router_url}{CHAT}", json=asked, timeout=60, trust_env=False)
        assert response.status_code == 400, response.text
        assert response.json()["error"]["param"] in ("tools", "messages")
        return
    for answer in answers(system, CHAT, asked).choices:
        assert answer["finish_reason"] in ("tool_calls", "stop")
        calls = answer["message"]["tool_calls"]
        assert calls
        for call in calls:
            assert call["function"]["name"] == "weather"
            jsonschema.validate(json.loads(call["function"]["arguments"]), PARAMETERS)


def _ends_of_reasoning(published: PublishedModel) -> dict[str, int]:
    """A bias that ends what random weights would think forever."""
    if not published.tool_format:
        return {}
    end = FORMATS[published.tool_format].reasoning_end
    found = published.raw_tokenizer.token_to_id(end.partition(">")[0] + ">") if end else None
    return {} if found is None else {str(found): 100}


@pytest.mark.parametrize("seed", range(3))
def test_stop_strings_end_an_answer(seed: int, system: System) -> None:
    """Cut from a free answer, over the border of two tokens."""
    asked = {"prompt": PROMPT, "max_tokens": 60, "temperature": 1.0, "seed": seed, "ignore_eos": True, "logprobs": 0}
    (free,) = answers(system, COMPLETIONS, asked).choices
    text, border = free["text"], free["logprobs"]["text_offset"][12]
    stop = text[border - 2 : border + 2]
    assert len(stop) == 4
    (choice,) = answers(system, COMPLETIONS, asked | {"stop": [stop]}).choices
    assert (choice["finish_reason"], choice["stop_reason"]) == ("stop", stop)
    assert choice["text"] == text[: text.index(stop)]


@pytest.mark.parametrize("seed", range(3))
def test_logprobs_tell_the_text(seed: int, published: PublishedModel, system: System) -> None:
    """Free draws, among them rows without a token, and parts of characters."""
    rows = [published.rows - 1, *_some_rows(published)]
    asked = {
        "prompt": PROMPT, "max_tokens": 60, "temperature": 1.0, "seed": seed, "logprobs": 3, "ignore_eos": True,
        "logit_bias": {str(row): 3 for row in rows}, "skip_special_tokens": False, "echo": seed == 0,
    }  # fmt: skip
    (choice,) = answers(system, COMPLETIONS, asked).choices
    told = choice["logprobs"]
    pieces = [_bytes_of(name) for name in told["tokens"]]
    specials = {token.content for token in published.raw_tokenizer.get_added_tokens_decoder().values()}
    if seed:
        assert b"".join(pieces).decode(errors="replace") == choice["text"]
    for offset, piece in zip(told["text_offset"], pieces, strict=True):
        if (whole := piece.decode(errors="ignore")) and whole.encode() == piece:
            # The echo is the prompt as it was sent: without BOS, and without the blank that sentencepiece adds
            is_begun = seed == 0 and offset == 0
            assert choice["text"][offset:].startswith(whole.lstrip() if is_begun else whole) or (
                is_begun and whole in specials
            )
    ids = asked | {"return_tokens_as_token_ids": True, "echo": False}
    (named,) = system.ask(Path.MIXED, COMPLETIONS, ids).choices
    numbers = [int(name.removeprefix("token_id:")) for name in named["logprobs"]["tokens"]]
    assert all(0 <= number < published.rows for number in numbers)
    raw = published.raw_tokenizer
    drawn = pieces[-len(numbers) :]
    assert [piece for number, piece in zip(numbers, drawn, strict=True) if raw.id_to_token(number) is None] in (
        [],
        [b""] * sum(raw.id_to_token(number) is None for number in numbers),
    )


def _some_rows(published: PublishedModel) -> list[int]:
    """Rows without a token, special ones, and plain added ones."""
    raw = published.raw_tokenizer
    added = sorted(raw.get_added_tokens_decoder())
    empty = [row for row in range(published.rows) if raw.id_to_token(row) is None]
    return [row for row in (*empty[:3], *added[:3], *added[-3:]) if row < published.rows]


def _bytes_of(name: str) -> bytes:
    if name.startswith("bytes:"):
        return bytes(int(byte, 16) for byte in name.removeprefix("bytes:").split("\\x")[1:])
    return name.encode()
