"""OpenAI's own Python client against the router: what it parses, raises and streams, by both orders.

The answers are those of the decode node alone, asked by the same client. Its types are checked by the client itself.
"""

from __future__ import annotations

import asyncio
import math
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import httpx
import openai
import pytest

from pd_cluster.server.requests.predicted_tokens import FollowedPrediction, PredictedTokens
from tests.integration.system import Path, System
from tests.integration.test_sampling_parity import same_numbers

if TYPE_CHECKING:
    from collections.abc import Iterator

pytestmark = [pytest.mark.integration, pytest.mark.timeout(300)]

MODEL = "demo_model"
TIMEOUT_S = 60.0
STORY = "Mira 4831. Oskar 2210. Once upon a time there was a"  # what follows is open
QUESTION = [{"role": "user", "content": "Mira 4831. Oskar 2210. Lena 7745. Oskar?"}]
ROUTES = (Path.P_FIRST, Path.D_FIRST)
Arguments = dict[str, Any]

# what is added to a completion of STORY
COMPLETIONS: dict[str, Arguments] = {
    "greedy": {"temperature": 0},
    "logprobs": {"temperature": 0, "logprobs": 2},
    "n": {"temperature": 1.2, "seed": 11, "n": 2},
    "n, logprobs": {"temperature": 1.2, "seed": 12, "n": 2, "logprobs": 0},
    "stop": {"temperature": 0, "stop": [".", "?"]},
    "seed": {"temperature": 1.0, "seed": 13},
    "bias": {"temperature": 0, "logit_bias": {"1000": 100}},
    "penalties": {"temperature": 1.0, "seed": 14, "presence_penalty": 1.0, "frequency_penalty": 0.5, "top_p": 0.9},
    "ids": {"temperature": 0, "prompt": [70, 80, 90, 100, 110]},
    "several prompts": {"temperature": 0, "prompt": [STORY, "Oskar 2210. Oskar?", "It was cold and"]},
    "other fields": {"temperature": 0, "extra_body": {"ignore_eos": True, "min_tokens": 16, "top_k": 5}},
}
# what is added to a chat about QUESTION
CHATS: dict[str, Arguments] = {
    "greedy": {"temperature": 0},
    "logprobs": {"temperature": 0, "logprobs": True, "top_logprobs": 3},
    "n": {"temperature": 1.2, "seed": 21, "n": 2, "max_completion_tokens": 12},
    "stop": {"temperature": 0, "stop": "2"},
    "seed": {"temperature": 1.5, "seed": 22},
    "system": {"temperature": 0, "messages": [{"role": "system", "content": "Be short."}, *QUESTION]},
}


class Clients:
    """One client per order, and one that talks to the decode node alone."""

    def __init__(self, system: System) -> None:
        self.system = system
        self._mixed = _client(system.urls[system.mixed], {})
        self._routed = {path: _client(system.router_url, {"x-pd-route": path.value}) for path in ROUTES}
        self._answers: dict[str, Any] = {}
        self._routed_answers: dict[tuple[str, Path], dict[str, Any]] = {}

    def __getitem__(self, path: Path) -> Any:
        return self._mixed if path is Path.MIXED else self._routed[path]

    def mixed_answer(self, kind: str, name: str, arguments: Arguments) -> Any:
        """What the decode node answers, asked once and not streamed."""
        key = f"{kind} {name}"
        if key not in self._answers:
            self._answers[key] = plain(ask(self._mixed, kind, arguments))
        return self._answers[key]

    def routed_answer(self, kind: str, name: str, path: Path) -> tuple[dict[str, Any], list[Any]]:
        """By this order: the whole answer, and the chunks of the streamed one. All of a kind are asked for at once."""
        key = kind, path
        if key not in self._routed_answers:
            cases = completion_cases() if kind == "completions" else chat_cases()

            def both(arguments: Arguments) -> tuple[dict[str, Any], list[Any]]:
                whole = plain(ask(self[path], kind, arguments))
                return whole, list(ask(self[path], kind, arguments | {"stream": True}))

            with ThreadPoolExecutor(len(cases)) as pool:
                self._routed_answers[key] = dict(zip(cases, pool.map(both, cases.values()), strict=True))
        found: tuple[dict[str, Any], list[Any]] = self._routed_answers[key][name]
        return found

    def close(self) -> None:
        """Their connections."""
        for client in (self._mixed, *self._routed.values()):
            client.close()


def _client(url: str, headers: dict[str, str]) -> Any:
    http = openai.DefaultHttpxClient(trust_env=False)
    return openai.OpenAI(
        base_url=f"{url}/v1", api_key="not checked", default_headers=headers, max_retries=0,
        timeout=TIMEOUT_S, http_client=http,
    )  # fmt: skip


@pytest.fixture(scope="module")
def clients(shared_system: System) -> Iterator[Clients]:
    clients = Clients(shared_system)
    yield clients
    clients.close()


def completion(arguments: Arguments) -> Arguments:
    return {"model": MODEL, "prompt": STORY, "max_tokens": 16} | arguments


def chat(arguments: Arguments) -> Arguments:
    return {"model": MODEL, "messages": QUESTION, "max_tokens": 16} | arguments


def completion_cases() -> dict[str, Arguments]:
    return {name: completion(more) for name, more in COMPLETIONS.items()}


def chat_cases() -> dict[str, Arguments]:
    return {name: chat(more) for name, more in CHATS.items()}


def ask(client: Any, kind: str, arguments: Arguments) -> Any:
    """One request, streamed if `arguments` say so."""
    return (client.completions if kind == "completions" else client.chat.completions).create(**arguments)


def plain(answer: Any) -> dict[str, Any]:
    """What must not depend on the way: everything but ids and times. Cached tokens do."""
    body: dict[str, Any] = answer.model_dump(exclude_none=True)
    for name in ("id", "created"):
        assert body.pop(name)
    body["usage"].pop("prompt_tokens_details", None)
    return body


@pytest.mark.slow_cases
@pytest.mark.parametrize("path", ROUTES)
@pytest.mark.parametrize("name", COMPLETIONS)
def test_completion(name: str, path: Path, clients: Clients) -> None:
    expected = clients.mixed_answer("completions", name, completion(COMPLETIONS[name]))
    whole, chunks = clients.routed_answer("completions", name, path)
    same_numbers(whole, expected)
    for choice in expected["choices"]:
        parts = [part for chunk in chunks for part in chunk.choices if part.index == choice["index"]]
        assert "".join(part.text for part in parts) == choice["text"]
        assert [part.finish_reason for part in parts if part.finish_reason] == [choice["finish_reason"]]
        if "logprobs" in choice:
            told = [part.logprobs for part in parts if part.logprobs]
            assert [token for one in told for token in one.tokens] == choice["logprobs"]["tokens"]
            logprobs = [logprob for one in told for logprob in one.token_logprobs]
            assert logprobs == pytest.approx(choice["logprobs"]["token_logprobs"], abs=1e-4)


@pytest.mark.slow_cases
@pytest.mark.parametrize("path", ROUTES)
@pytest.mark.parametrize("name", CHATS)
def test_chat(name: str, path: Path, clients: Clients) -> None:
    expected = clients.mixed_answer("chat", name, chat(CHATS[name]))
    whole, chunks = clients.routed_answer("chat", name, path)
    same_numbers(whole, expected)
    assert {chunk.object for chunk in chunks} == {"chat.completion.chunk"}
    assert len({chunk.id for chunk in chunks}) == 1
    for choice in expected["choices"]:
        parts = [part for chunk in chunks for part in chunk.choices if part.index == choice["index"]]
        assert [part.delta.role for part in parts if part.delta.role] == ["assistant"]
        assert "".join(part.delta.content or "" for part in parts) == choice["message"]["content"]
        assert [part.finish_reason for part in parts if part.finish_reason] == [choice["finish_reason"]]
        if "logprobs" in choice:
            tokens = [entry.token for part in parts if part.logprobs for entry in part.logprobs.content]
            assert tokens == [entry["token"] for entry in choice["logprobs"]["content"]]


@pytest.mark.parametrize("path", ROUTES)
def test_logprobs_say_what_was_written(path: Path, clients: Clients) -> None:
    choice = ask(clients[path], "chat", chat(CHATS["logprobs"])).choices[0]
    entries = choice.logprobs.content
    assert b"".join(bytes(entry.bytes) for entry in entries).decode().startswith(choice.message.content)
    for entry in entries:
        assert [top.logprob for top in entry.top_logprobs] == sorted(
            (t.logprob for t in entry.top_logprobs), reverse=True
        )
        assert entry.token == entry.top_logprobs[0].token, "greedy"
        assert entry.logprob == pytest.approx(entry.top_logprobs[0].logprob)
        assert sum(math.exp(top.logprob) for top in entry.top_logprobs) <= 1 + 1e-5
        assert len(entry.top_logprobs) == 3


@pytest.mark.parametrize("path", ROUTES)
def test_samples_differ_and_their_seed_repeats_them(path: Path, clients: Clients) -> None:
    client = clients[path]

    def texts(seed: int) -> list[str]:
        answer = ask(client, "completions", completion({"temperature": 1.5, "n": 2, "seed": seed}))
        assert [choice.index for choice in answer.choices] == [0, 1]
        return [choice.text for choice in answer.choices]

    assert len({*texts(1), *texts(2)}) == 4
    assert texts(1) == texts(1)


@pytest.mark.slow_cases
@pytest.mark.parametrize("path", ROUTES)
@pytest.mark.parametrize("stream", [False, True])
def test_stop_strings_end_it_and_are_not_shown(stream: bool, path: Path, clients: Clients) -> None:
    text = ask(clients[path], "completions", completion({"temperature": 0})).choices[0].text
    stop = text[6:8]
    arguments = completion({"temperature": 0, "stop": stop, "stream": stream})
    answer = ask(clients[path], "completions", arguments)
    parts = [chunk.choices[0] for chunk in answer] if stream else [answer.choices[0]]
    assert "".join(part.text for part in parts) == text[: text.index(stop)]
    assert parts[-1].finish_reason == "stop"


@pytest.mark.parametrize("path", ROUTES)
def test_usage_ends_a_stream_that_asks_for_it(path: Path, clients: Clients) -> None:
    arguments = chat({"temperature": 0, "stream": True, "stream_options": {"include_usage": True}})
    *chunks, last = ask(clients[path], "chat", arguments)
    assert last.choices == []
    assert all(chunk.usage is None for chunk in chunks)
    whole = clients.mixed_answer("chat", "greedy", chat(CHATS["greedy"]))["usage"]
    usage = last.usage.model_dump(exclude_none=True)
    assert {name: usage[name] for name in whole} == whole


def test_what_of_a_prediction_came_is_the_same_on_every_way(clients: Clients) -> None:
    """Whole and streamed, exactly what the rule says of the tokens of each: two best logits may be close."""
    shown: Arguments = {
        "temperature": 0,
        "max_tokens": 40,
        "extra_body": {"return_token_ids": True, "ignore_eos": True},
    }
    text = clients.mixed_answer("chat", "with ids", chat(shown))["choices"][0]["message"]["content"]
    predicted = f"{text[:30]}zebra{text[30:60]} and a zebra"
    asked = {"prompt": predicted, "add_special_tokens": False}
    url = clients.system.urls["decode"]
    ids = httpx.post(f"{url}/tokenize", json=asked, timeout=TIMEOUT_S, trust_env=False).json()["tokens"]
    accepted = []
    for path in Path:
        for stream in (False, True):
            told = shown | {"extra_body": shown["extra_body"] | {"cache_salt": f"prediction {path} {stream}"}}
            more = {"stream": True, "stream_options": {"include_usage": True}} if stream else {}
            prediction = {"type": "content", "content": [{"type": "text", "text": predicted}]}
            given = ask(clients[path], "chat", chat(told | more | {"prediction": prediction}))
            parts = list(given) if stream else [given]
            choices = [choice for part in parts for choice in part.choices]
            # A first chunk has none
            tokens = [token for choice in choices for token in getattr(choice, "token_ids", ())]
            rule = FollowedPrediction(PredictedTokens(ids))
            rule.push(tokens)
            usage = parts[-1].usage
            details = usage.completion_tokens_details
            assert usage.completion_tokens == len(tokens) == 40
            numbers = (details.accepted_prediction_tokens, details.rejected_prediction_tokens)
            assert numbers == (rule.num_accepted, rule.num_rejected), (path, stream)
            accepted.append(rule.num_accepted)
    assert max(accepted) > 5 < len(ids) - max(accepted)


@pytest.mark.parametrize("path", ROUTES)
def test_headers_tell_the_way(path: Path, clients: Clients) -> None:
    salt = {"extra_body": {"cache_salt": f"headers {path}"}}  # or D has it cached
    raw = clients[path].chat.completions.with_raw_response.create(**chat(salt))
    assert raw.headers["x-pd-route"] == f"{path.value}; reason=header"
    assert (raw.headers["x-pd-prefill"], raw.headers["x-pd-decode"]) == ("prefill", "decode")
    assert raw.headers["x-request-id"]
    assert raw.parse().choices[0].message.content


@pytest.mark.parametrize("path", ROUTES)
def test_mistakes_are_the_clients_own_exceptions(path: Path, clients: Clients) -> None:
    client = clients[path]
    with pytest.raises(openai.NotFoundError) as missing:
        ask(client, "chat", chat({"model": "gpt-4"}))
    assert (missing.value.status_code, missing.value.code) == (404, "model_not_found")
    for wrong, param in (({"temperature": -1}, "temperature"), ({"n": 0}, "n"), ({"max_tokens": 10**6}, "max_tokens")):
        for stream in (False, True):
            with pytest.raises(openai.BadRequestError) as bad:
                ask(client, "completions", completion({**wrong, "stream": stream}))
            assert (bad.value.param, bad.value.type) == (param, "invalid_request_error")
    for prediction in ("text", {"type": "content", "content": "x" * 400_000}):
        with pytest.raises(openai.BadRequestError) as bad:
            ask(client, "chat", chat({"prediction": prediction}))
        assert bad.value.param == "prediction"


def test_models_are_listed(clients: Clients) -> None:
    for path in Path:
        assert [model.id for model in clients[path].models.list()] == [MODEL]


@pytest.mark.parametrize("path", ROUTES)
def test_a_stream_that_is_closed_early_ends_everywhere(path: Path, clients: Clients) -> None:
    arguments = completion({"max_tokens": 3000, "stream": True, "extra_body": {"ignore_eos": True}})
    before = clients.system.settled_metric("decode", "pd_generation_tokens_total")
    with ask(clients[path], "completions", arguments) as stream:
        assert next(iter(stream)).choices[0].text is not None
    clients.system.settle()
    assert clients.system.metric("decode", "pd_num_running") == 0
    generated = clients.system.settled_metric("decode", "pd_generation_tokens_total") - before
    assert generated < 3000


def test_many_at_once(clients: Clients) -> None:
    """The asynchronous client, 16 requests over both orders, streamed and not."""
    expected = clients.mixed_answer("completions", "greedy", completion(COMPLETIONS["greedy"]))["choices"][0]["text"]

    async def one(client: Any, index: int) -> str:
        headers = {"x-pd-route": ROUTES[index % 2].value}
        arguments = completion({"temperature": 0, "extra_headers": headers, "stream": index % 4 < 2})
        answer = await client.completions.create(**arguments)
        if index % 4 < 2:
            return "".join([chunk.choices[0].text async for chunk in answer])
        return str(answer.choices[0].text)

    async def all_clients() -> list[str]:
        http = openai.DefaultAsyncHttpxClient(trust_env=False)
        async with openai.AsyncOpenAI(
            base_url=f"{clients.system.router_url}/v1", api_key="-", max_retries=0, timeout=TIMEOUT_S, http_client=http
        ) as client:
            return await asyncio.gather(*(one(client, index) for index in range(16)))

    assert asyncio.run(all_clients()) == [expected] * 16
